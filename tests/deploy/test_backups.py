"""Backups: complete, private, of one moment, and never restored over what is newer."""

import io
import json
import os
import sqlite3
import tarfile
from collections import Counter
from contextlib import closing

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
    done = restore(archive, tmp_path / "new")
    assert (set(done.written), done.same) == ({f"{tmp_path}/new{name}" for name in names}, ())
    new = tmp_path / f"new{home}"
    with closing(sqlite3.connect(new / "superlink.db")) as copy:
        assert copy.execute("SELECT id FROM node").fetchall() == [(1,)]
    assert (new / "runs" / "a" / "metrics.jsonl").read_text() == '{"round": 1}\n'  # a whole line
    for name in ("ca.key", "nodes/node-0.key", "ca.crt"):
        assert (new / "pki" / name).read_bytes() == (home / "pki" / name).read_bytes()
        assert (new / "pki" / name).stat().st_mode == (home / "pki" / name).stat().st_mode
    assert (new / "pki").stat().st_mode & 0o777 == 0o700
    assert restore(archive, tmp_path / "new").written == ()


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
    restore(archive)
    with pytest.raises(LedgerError, match="lacks charge 2"):
        spend(client, 3)


def test_a_lost_client_is_restored_with_what_it_had_spent(client, tmp_path):
    archive = tmp_path / "client.tar"
    spend(client, 2)
    back_up(archive, [client])
    for path in client.iterdir():
        path.unlink()
    restore(archive)
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
        (outside, r"contains a path with \.\."),
    ],
)
def test_a_damaged_archive_restores_nothing(client, tmp_path, change, error):
    archive = tmp_path / "client.tar"
    back_up(archive, [client])
    damaged(archive, change)
    with pytest.raises(DeployError, match=error):
        restore(archive, tmp_path / "new")
    assert not (tmp_path / "new").exists()


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
    status, out, _ = coterie("backup", "restore", archive)
    assert (status, out.splitlines()[0]) == (0, "1 files restored, 1 are there")
    assert "what was charged after this copy is not in them" in out
