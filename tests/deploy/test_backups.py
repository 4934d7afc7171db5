"""Backups: complete, private, of one moment, and never restored over what is newer."""

import gzip
import hashlib
import io
import json
import os
import sqlite3
import tarfile
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from kit.tables import for_rows

from coterie.deploy.backups import back_up, restore
from coterie.deploy.certificates import create
from coterie.privacy import ClientLedger, Event, LedgerError, read_ledger
from coterie.site.errors import DeployError


@pytest.fixture
def server(tmp_path):
    """Keys, an open database with a write-ahead log, and a run folder."""
    home = tmp_path / "server"
    create(home / "pki", 1, ["localhost"])
    (home / "runs" / "a").mkdir(parents=True)
    (home / "runs" / "a" / "result.json").write_text("{}")
    (home / "runs" / "a" / "metrics.jsonl").write_text('{"round": 1}\n{"round"')
    (home / "runs" / "a" / "result.json.7.tmp").write_text("half")
    with closing(sqlite3.connect(home / "superlink.db")) as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("CREATE TABLE node (id)")
        database.execute("INSERT INTO node VALUES (1)")
        database.commit()
        yield home, database


@pytest.fixture
def client(tmp_path):
    state = tmp_path / "state"
    state.mkdir()
    spend(state, 1)
    return state


def spend(state, *rounds):
    for number in rounds:
        with closing(ClientLedger(1e-5, 8.0, state / "budget.jsonl", anchors=state / "client-0.anchors.jsonl")) as own:
            own.spend(number, Counter({Event(0.05, 2.0): 10}))


def test_a_running_server_is_copied_and_restored_elsewhere(server, tmp_path):
    home, database = server
    archive = tmp_path / "server.tar"
    database.execute("INSERT INTO node VALUES (2)")  # not committed
    names = back_up(archive, [home / "pki", home / "superlink.db", home / "runs"])
    assert not any(name.endswith(("-wal", "-shm", ".tmp")) for name in names)
    assert archive.stat().st_mode & 0o777 == 0o600
    done = restore(archive, root=tmp_path / "new")
    assert (set(done.written), done.same) == ({f"{tmp_path}/new{name}" for name in names}, ())
    new = tmp_path / f"new{home}"
    with closing(sqlite3.connect(new / "superlink.db")) as copy:
        assert copy.execute("SELECT id FROM node").fetchall() == [(1,)]
    assert (new / "runs" / "a" / "metrics.jsonl").read_text() == '{"round": 1}\n'  # a whole line
    for name in ("ca.key", "nodes/node-0.key", "ca.crt"):
        assert (new / "pki" / name).read_bytes() == (home / "pki" / name).read_bytes()
        assert (new / "pki" / name).stat().st_mode == (home / "pki" / name).stat().st_mode
    assert (new / "pki").stat().st_mode & 0o777 == 0o700
    assert restore(archive, root=tmp_path / "new").written == ()


def test_an_older_ledger_does_not_replace_a_newer_one(client, tmp_path):
    archive = tmp_path / "client.tar"
    back_up(archive, [client])
    spend(client, 2, 3)
    before = (client / "budget.jsonl").read_bytes()
    with pytest.raises(DeployError, match="budget be spent again"):
        restore(archive)
    assert (client / "budget.jsonl").read_bytes() == before


def test_a_lost_ledger_that_comes_back_older_is_noticed_by_the_anchors(client, tmp_path):
    archive = tmp_path / "client.tar"
    back_up(archive, [client / "budget.jsonl"])
    spend(client, 2)
    (client / "budget.jsonl").unlink()
    restore(archive, [client])
    with pytest.raises(LedgerError, match="lacks charge 2"):
        spend(client, 3)


def test_a_lost_client_is_restored_with_what_it_had_spent(client, tmp_path):
    archive = tmp_path / "client.tar"
    spend(client, 2)
    back_up(archive, [client])
    for path in client.iterdir():
        path.unlink()
    restore(archive, [client])
    spend(client, 3)
    assert [charge["round"] for charge in read_ledger(client / "budget.jsonl")[1]] == [1, 2, 3]


def test_nothing_is_restored_if_one_file_differs(server, tmp_path):
    home, _ = server
    archive = tmp_path / "server.tar"
    back_up(archive, [home / "runs"])
    (home / "runs" / "a" / "result.json").write_text('{"other": 1}')
    (home / "runs" / "a" / "metrics.jsonl").unlink()
    with pytest.raises(DeployError, match=r"result.json: is there with another content"):
        restore(archive)
    assert not (home / "runs" / "a" / "metrics.jsonl").exists()


def test_a_failed_copy_keeps_the_older_one(client, tmp_path, monkeypatch):
    archive = tmp_path / "client.tar"
    back_up(archive, [client])
    before = archive.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tarfile.TarFile, "addfile", full)
    with pytest.raises(DeployError, match=r"an older one is unchanged: .*No space left"):
        back_up(archive, [client])
    assert archive.read_bytes() == before
    assert [path.name for path in tmp_path.glob("*.tmp")] == []


def test_what_cannot_be_copied_is_named(tmp_path):
    with pytest.raises(DeployError, match=r"missing: does not exist"):
        back_up(tmp_path / "a.tar", [tmp_path / "missing"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DeployError, match="contains no file"):
        back_up(tmp_path / "a.tar", [tmp_path / "empty"])
    (tmp_path / "broken.db").write_text("no database")
    with pytest.raises(DeployError, match="not a database"):
        back_up(tmp_path / "a.tar", [tmp_path / "broken.db"])
    os.mkfifo(tmp_path / "empty" / "pipe")
    with pytest.raises(DeployError, match="contains no file"):
        back_up(tmp_path / "a.tar", [tmp_path / "empty"])


def damaged(archive, change):
    """Write the archive's files again, changed."""
    with tarfile.open(archive) as tar:
        files = {member.name: tar.extractfile(member).read() for member in tar}
    change(files)
    with tarfile.open(archive, "w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def outside(files):
    (name, content), *_ = files.items()
    manifest = json.loads(files["manifest.json"])
    manifest["files"][f"../{name}"] = manifest["files"].pop(name)
    files |= {f"../{name}": content, "manifest.json": json.dumps(manifest).encode()}
    del files[name]


@for_rows(
    ("change", "error"),
    [
        (lambda files: files.pop("manifest.json"), "not a complete backup"),
        (lambda files: files.update({"manifest.json": b"{"}), "not a complete backup"),
        (lambda files: files.update({next(iter(files)): b"changed"}), "is damaged"),
        (lambda files: files.update({"/etc/more": b""}), "is damaged"),
        (lambda files: files.pop(next(iter(files))), "is damaged"),
        (outside, r"has absolute paths without \.\."),
    ],
)
def test_a_damaged_archive_restores_nothing(client, tmp_path, change, error):
    archive = tmp_path / "client.tar"
    back_up(archive, [client])
    damaged(archive, change)
    with pytest.raises(DeployError, match=error):
        restore(archive, root=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def crafted(archive, members):
    """An archive of (member, content) whose digests are right: whoever writes one computes them."""
    digests = {member.name: hashlib.sha256(content).hexdigest() for member, content in members}
    manifest = json.dumps({"files": digests}).encode()
    with tarfile.open(archive, "w") as tar:
        for member, content in [*members, (tarfile.TarInfo("manifest.json"), manifest)]:
            member.size = len(content) if member.isreg() else 0
            tar.addfile(member, io.BytesIO(content))


def entry(name, kind=tarfile.REGTYPE, target=""):
    member = tarfile.TarInfo(str(name))
    member.type, member.linkname = kind, str(target)
    return member


def test_an_archive_does_not_decide_where_files_are_written(client, tmp_path, coterie):
    victim = tmp_path / "home" / ".ssh" / "authorized_keys"
    crafted(tmp_path / "a.tar", [(entry(client / "new.json"), b"{}"), (entry(victim), b"key of a stranger")])
    for words in ([], [client], [victim.parent / "other"], [f"{client}x"]):
        status, _, err = coterie("backup", "restore", tmp_path / "a.tar", *words)
        assert (status, "outside the given paths" in err, str(victim.parent) in err) == (1, True, True), words
        assert not victim.parent.exists()
        assert not (client / "new.json").exists()
    assert coterie("backup", "restore", tmp_path / "a.tar", client, victim)[0] == 0
    assert victim.read_bytes() == b"key of a stranger"  # named


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE])
def test_links_devices_and_folders_are_refused(kind, client, tmp_path):
    link = entry(client / "link", kind, client / "file")
    crafted(tmp_path / "a.tar", [(entry(client / "file"), b"1"), (link, b"1")])
    with pytest.raises(DeployError, match="is not a complete backup"):
        restore(tmp_path / "a.tar", [client])
    assert not (client / "file").exists()


def test_relative_paths_and_compressed_archives_are_refused(client, tmp_path):
    crafted(tmp_path / "a.tar", [(entry("etc/passwd"), b"1")])
    with pytest.raises(DeployError, match="contains etc/passwd, and a backup has absolute paths"):
        restore(tmp_path / "a.tar", root=tmp_path / "new")
    (tmp_path / "b.tar").write_bytes(gzip.compress((tmp_path / "a.tar").read_bytes())[:-20])
    with pytest.raises(DeployError, match="is not a complete backup"):
        restore(tmp_path / "b.tar", root=tmp_path / "new")


def test_paths_with_dots_come_back(client, tmp_path, monkeypatch):
    monkeypatch.chdir(client)
    back_up(tmp_path / "a.tar", [Path("../state")])
    before = (client / "budget.jsonl").read_bytes()
    (client / "budget.jsonl").unlink()
    restore(tmp_path / "a.tar", [Path("../state")])
    assert (client / "budget.jsonl").read_bytes() == before


def test_what_is_no_archive(tmp_path):
    for content in (b"", b"text", bytes(10240)):
        (tmp_path / "a.tar").write_bytes(content)
        with pytest.raises(DeployError, match="not a complete backup"):
            restore(tmp_path / "a.tar")
    with pytest.raises(DeployError, match="not a complete backup"):
        restore(tmp_path / "missing.tar")


def test_the_command_warns_of_restored_ledgers(coterie, client, tmp_path):
    archive = tmp_path / "client.tar"
    assert coterie("backup", "create", archive, client)[:2] == (0, f"{archive}: 2 files\n")
    status, out, _ = coterie("backup", "restore", archive)
    assert (status, out) == (0, "0 files restored, 2 are there\n")
    (client / "budget.jsonl").unlink()
    status, _, err = coterie("backup", "restore", archive)
    assert (status, f"has 1 missing files outside the given paths, in {client}; nothing" in err) == (1, True)
    status, out, _ = coterie("backup", "restore", archive, client)
    assert (status, out.splitlines()[0]) == (0, "1 files restored, 1 are there")
    assert "what was charged after this copy is not in them" in out
