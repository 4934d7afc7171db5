"""Run folders with lost or damaged files: no charge is lost, and no certificate is given that is not true."""

import builtins
import contextlib
import errno
import io
import json
import os
import shutil
import signal
import sys

import pytest
from kit.commands import assert_refused, document, settings
from kit.forging import rewrite_ledger
from safetensors import safe_open
from safetensors.numpy import save_file

from coterie.privacy import certificate
from coterie.privacy.ledger_lines import read_ledger

ROUNDS = 4
#: The run, cut short after three of four rounds: what lies ahead must be calibrated and charged.
CUT = settings(
    rounds=ROUNDS, stop_after=3, evaluate="private", evaluate_every=2, epsilon=100, accountant="rdp"
)  # calibrated at once


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of a run with all its files, made once."""
    from coterie.cli import main

    where = tmp_path_factory.mktemp("made") / "run"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", ["coterie", "run", *CUT, "--out", str(where)])
        patched.setattr(sys, "path", [*sys.path])
        with contextlib.suppress(SystemExit):
            main()
    assert (where / "result.json").exists()
    return where


@pytest.fixture
def run(made, tmp_path):
    """A copy of that folder, which a test may damage."""
    shutil.copytree(made, tmp_path / "run")
    return tmp_path / "run"


HANGS = 120


@contextlib.contextmanager
def in_time():
    """End what hangs, on a busy machine too."""

    def late(*_):
        raise TimeoutError(f"it hung for {HANGS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, HANGS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def words(command, run):
    return {
        "resume": ("run", "--resume", "--out", run),
        "check": ("privacy", "check", run),
        "report": ("report", run, "--out", run.parent / "page.html"),
    }[command]


def shortened(path, lines=1):
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-lines]))


LOSSES = ["deleted", "emptied", "header alone", "shortened", "torn", "another", "old, shortened"]


# ---- a ledger that lost charges ----------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["resume", "check", "report"])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_ledger_that_lost_charges_is_refused(coterie, run, made, loss, command):
    ledger = run / "ledger.jsonl"
    if loss == "deleted":
        ledger.unlink()
    elif loss == "emptied":
        ledger.write_bytes(b"")
    elif loss == "header alone":
        shortened(ledger, len(read_ledger(ledger)[1]))
    elif loss == "shortened":
        shortened(ledger, 2)
    elif loss == "torn":
        ledger.write_bytes(ledger.read_bytes()[:-200])
    elif loss == "another":
        rewrite_ledger(ledger, lambda lines: [line.update(time="then") for line in lines[1:]])
    else:
        unchain_checkpoint(run)
        shortened(ledger, 2)
    before = ledger.read_bytes() if ledger.exists() else None
    assert_refused(coterie(*words(command, run)), "ledger.jsonl", "restore", "certif")
    assert (ledger.read_bytes() if ledger.exists() else None) == before


def unchain_checkpoint(run):
    """Make a checkpoint of an older version of it."""
    path = run / "checkpoint" / "state.safetensors"
    with safe_open(path, framework="numpy") as file:
        about = json.loads(file.metadata()["about"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
    for key in ("charges", "chain", "digest"):
        about.pop(key, None)
    save_file(tensors, path, metadata={"about": json.dumps(about)})


def test_a_folder_of_an_older_version_resumes(coterie, run):
    ledger = run / "ledger.jsonl"
    charges = read_ledger(ledger)[1]
    unchain_checkpoint(run)
    assert coterie("privacy", "check", run)[0] == 0
    status, out, err = coterie("run", "--resume", "--out", run, "--json")
    assert status == 0, err
    assert document(out)["certified"] is True
    assert len(read_ledger(ledger)[1]) >= len(charges)
    assert coterie("privacy", "check", run)[0] == 0


def test_a_lost_charge_of_a_private_evaluation_is_refused(coterie, run):
    """The last charge of all, which comes after the last checkpoint."""
    assert read_ledger(run / "ledger.jsonl")[1][-1]["for"] == "evaluation"
    shortened(run / "ledger.jsonl")
    assert_refused(coterie(*words("resume", run)), "private accuracy of round 3", "ledger.jsonl", "restore")


# ---- every file of a folder, damaged in every way -----------------------------------------------------------

FILES = [
    "SHA256SUMS",
    "checkpoint/state.safetensors",
    "config.toml",
    "ledger.jsonl",
    "local.json",
    "metrics.jsonl",
    "models/cluster-0.safetensors",
    "privacy.json",
    "report.html",
    "result.json",
]
DAMAGES = ["truncated", "emptied", "swapped", "flipped bit", "missing", "FIFO", "directory"]


def damage(path, how):
    content = path.read_bytes()
    if how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif how == "emptied":
        path.write_bytes(b"")
    elif how == "swapped":
        root = path.parent if path.parent.name == "run" else path.parent.parent
        other = root / ("result.json" if path.name != "result.json" else "metrics.jsonl")
        path.write_bytes(other.read_bytes())
    elif how == "flipped bit":
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :])
    else:
        path.unlink()
        if how == "FIFO":
            os.mkfifo(path)
        elif how == "directory":
            path.mkdir()


def test_every_file_of_the_folder_is_damaged_below(made):
    files = {str(file.relative_to(made)) for file in made.rglob("*") if file.is_file()}
    assert {file for file in files if file != "models/cluster-1.safetensors"} == set(FILES)


# Files that a command never reads can only be in its way.
MODEL, *PAGES = "models/cluster-0.safetensors", "report.html", "result.json"
UNREAD = {
    "resume": ["SHA256SUMS", MODEL, "privacy.json", *PAGES],
    "check": ["config.toml", "local.json", *PAGES],
    "report": ["SHA256SUMS", "local.json", MODEL, "report.html"],
}
CASES = [
    (name, how, command)
    for name in FILES
    for how in DAMAGES
    for command in UNREAD
    if name not in UNREAD[command] or how in ("FIFO", "directory")
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "how", "command"), CASES)
def test_a_damaged_file_ends_in_one_line_or_does_no_harm(coterie, run, made, name, how, command):
    header, true = read_ledger(made / "ledger.jsonl")
    damage(run / name, how)
    with in_time():  # a resumed run may have to train again
        status, _, err = coterie(*words(command, run))
    assert "Traceback" not in err
    if status:
        # which may say that the certificate does not follow, or that a file is another one
        problem = name in ("privacy.json", "SHA256SUMS", MODEL) and command == "check"
        assert problem or [line[:7] for line in err.splitlines() if "error" in line] == ["error: "], err
        assert status == 1
        return
    _, charges = read_ledger(run / "ledger.jsonl")
    assert charges[: len(true)] == true
    if command == "resume":
        stated = json.loads((run / "privacy.json").read_text())
        assert stated["epsilon"] == pytest.approx(certificate(header, charges)["epsilon"])


def full_disk(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("full", ["checkpoint", "ledger"])
def test_a_full_disk_ends_the_run_in_one_line_and_it_resumes(coterie, tmp_path, monkeypatch, full):
    synced, fsync = [], os.fsync

    def fail_after(descriptor):
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        synced.append(name)
        if full in name and sum(full in other for other in synced) > 2:
            full_disk()
        fsync(descriptor)

    words = settings(rounds=ROUNDS, evaluate="off")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail_after)
        status, _, err = coterie("run", *words, "--out", "run")
    assert status == 1
    (line,) = err.splitlines()
    assert all(part in line for part in ("error:", f"{full}", "No space left on device", "--resume")), line
    charges = read_ledger(tmp_path / "run" / "ledger.jsonl")[1]
    status, out, err = coterie("run", "--resume", "--out", "run", "--json")
    assert status == 0, err
    assert document(out)["certified"] is True
    assert read_ledger(tmp_path / "run" / "ledger.jsonl")[1][: len(charges)] == charges


def is_writing(flags_or_mode):
    if isinstance(flags_or_mode, str):
        return any(letter in flags_or_mode for letter in "wax+")
    return bool(flags_or_mode & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def read_only(monkeypatch, folder, of=""):
    """Answer as a file system that is mounted read-only does, for a folder or for one file of it."""

    def hit(path):
        return os.path.abspath(os.fspath(path)).startswith(str(folder)) and str(path).endswith(of)

    def guarded(call, writes):
        def wrapped(path, *rest, **named):
            if not isinstance(path, int) and hit(path) and writes(*rest, **named):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
            return call(path, *rest, **named)

        return wrapped

    opened = guarded(open, lambda mode="r", *_, opener=None, **__: opener is None and is_writing(mode))
    for owner, name, instead in (
        (os, "open", guarded(os.open, lambda flags, *_, **__: is_writing(flags))),
        (os, "replace", guarded(os.replace, lambda *_, **__: True)),
        (os, "mkdir", guarded(os.mkdir, lambda *_, **__: True)),
        (os, "unlink", guarded(os.unlink, lambda *_, **__: True)),
        (io, "open", opened),
        (builtins, "open", opened),
    ):
        monkeypatch.setattr(owner, name, instead)


@pytest.mark.slow
@pytest.mark.parametrize("command", UNREAD)
@pytest.mark.parametrize("name", ["", *FILES])
def test_a_read_only_disk_or_file_ends_in_one_line_or_does_no_harm(coterie, run, monkeypatch, name, command):
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    true = read_ledger(run / "ledger.jsonl")[1]
    with monkeypatch.context() as patched:
        read_only(patched, run, name)
        with in_time():
            status, _, err = coterie(*words(command, run))
    assert "Traceback" not in err
    if command != "resume":
        assert status == 0, err  # the page goes elsewhere
    elif status:
        assert [line[:7] for line in err.splitlines() if "error" in line] == ["error: "], err
    else:
        assert name not in ("", "ledger.jsonl")
    assert read_ledger(run / "ledger.jsonl")[1][: len(true)] == true
    if not name:
        assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before


def test_a_ledger_that_cannot_be_written_is_one_line(coterie, run, monkeypatch):
    """As an immutable file answers."""
    real = os.open

    def denied(path, flags, *mode, **named):
        if str(path).endswith("ledger.jsonl") and flags & os.O_RDWR:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))
        return real(path, flags, *mode, **named)

    monkeypatch.setattr(os, "open", denied)
    assert_refused(coterie(*words("resume", run)), "ledger.jsonl cannot be written: Operation not permitted")
