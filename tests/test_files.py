"""Atomic writes: content, mode, what is synced, and what a failure leaves."""

import os
import stat

import pytest
from kit.tables import for_rows

from coterie.files import spreadsheet_cell, write_atomic, write_new


@pytest.fixture
def synced(monkeypatch):
    """Names of what is synced to disk."""
    names, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (names.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd))[1])
    return names


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("sync", [True, False])
def test_a_file_is_replaced_and_synced_with_its_folder(tmp_path, synced, sync):
    path = tmp_path / "state"
    path.write_text("old")
    path.chmod(0o644)
    write_atomic(path, b"new", sync=sync)
    assert (path.read_bytes(), mode_of(path), os.listdir(tmp_path)) == (b"new", 0o600, ["state"])
    assert [os.path.dirname(name) for name in synced] == ([str(tmp_path), str(tmp_path.parent)] if sync else [])
    assert synced[1:] == [str(tmp_path)] * sync


@pytest.mark.parametrize("fails", ["os.replace", "os.fsync"])
def test_a_failure_leaves_the_old_content_alone(tmp_path, monkeypatch, fails):
    path = tmp_path / "state"
    path.write_text("old")

    def full(*_):
        raise OSError("no room")

    monkeypatch.setattr(fails, full)
    with pytest.raises(OSError, match="no room"):
        write_atomic(path, b"new")
    assert (path.read_text(), os.listdir(tmp_path)) == ("old", ["state"])


def test_a_leftover_of_a_crash_is_no_obstacle(tmp_path):
    (tmp_path / f"state.{os.getpid()}.tmp").write_text("part")
    write_atomic(tmp_path / "state", b"new")
    assert os.listdir(tmp_path) == ["state"]


def test_a_new_file_has_its_mode_and_is_never_overwritten(tmp_path):
    write_new(tmp_path / "public", b"key", mode=0o644)
    assert mode_of(tmp_path / "public") == 0o644
    with pytest.raises(FileExistsError):
        write_new(tmp_path / "public", b"key")


@for_rows(
    ("value", "cell"),
    [
        ("=cmd|' /C calc'!A0", "'=cmd|' /C calc'!A0"),
        ("+1+1", "'+1+1"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("-a", "'-a"),
        ("\t=1", "'\t=1"),
        ("\r=1", "'\r=1"),
        ("-1.5", "-1.5"),
        ("+3", "+3"),
        ("a=b", "a=b"),
        ("", ""),
        (-2, -2),
        (None, None),
    ],
)
def test_a_spreadsheet_runs_no_cell(value, cell):
    assert spreadsheet_cell(value) == cell
