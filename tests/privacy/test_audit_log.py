"""Audit logs: appended to by several processes, and every change is found."""

import json
import multiprocessing
import os

import pytest
from kit.commands import document

from coterie.cli.audit_log import read_audit_log
from coterie.privacy.audit_log import AuditLog
from coterie.privacy.ledger_lines import LedgerError


@pytest.fixture
def log(tmp_path):
    made = AuditLog(tmp_path / "state" / "client-0.audit.jsonl")
    for number in range(1, 6):
        made.append("request", run="17", round=number, reason=None, decision="answered")
    return made


def test_entries_are_numbered_timed_and_chained(log):
    entries, summary = read_audit_log(log.path)
    assert [entry["round"] for entry in entries] == [entry["entry"] for entry in entries] == [1, 2, 3, 4, 5]
    assert all(entry["run"] == "17" and "reason" not in entry for entry in entries)
    assert (summary.entries, summary.events, summary.first) == (5, "request: 5", entries[0]["time"])
    assert json.loads(log.path.read_text().splitlines()[-1])["chain"] == summary.chain
    assert log.path.stat().st_mode & 0o777 == 0o600
    assert log.path.parent.stat().st_mode & 0o777 == 0o700


def lines(log):
    return log.path.read_text().splitlines(keepends=True)


CHANGES = {
    "a round": lambda lines: [lines[0].replace('"round": 1', '"round": 2'), *lines[1:]],
    "a decision": lambda lines: [*lines[:4], lines[4].replace("answered", "refused!")],
    "the first line lost": lambda lines: lines[1:],
    "a line lost": lambda lines: lines[:2] + lines[3:],
    "a line twice": lambda lines: lines[:3] + lines[2:],
    "two exchanged": lambda lines: [lines[1], lines[0], *lines[2:]],
    "a line inserted": lambda lines: [*lines[:2], '{"entry": 3, "chain": "0123456789abcdef"}\n', *lines[2:]],
    "no JSON": lambda lines: [*lines[:2], "{\n", *lines[2:]],
    "an empty line": lambda lines: [*lines[:2], "\n", *lines[2:]],
    "no chain": lambda lines: [*lines[:4], lines[4].split(', "chain"')[0] + "}\n"],
    "a number as text": lambda lines: [lines[0].replace('"entry": 1', '"entry": "1"'), *lines[1:]],
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_is_found(log, change):
    before = lines(log)
    log.path.write_text("".join(change(before)))
    with pytest.raises(LedgerError, match=r"client-0.audit.jsonl, line \d"):
        read_audit_log(log.path)
    log.path.write_text("".join(before))
    assert read_audit_log(log.path)[1].entries == 5


def test_what_follows_a_change_does_not_hide_it(log):
    log.path.write_text("".join(lines(log)[:3]).replace('"round": 2', '"round": 3'))
    log.append("request", run="18")
    with pytest.raises(LedgerError, match="line 2"):
        read_audit_log(log.path)


def test_a_line_that_a_crash_left_is_replaced(log):
    content = log.path.read_bytes()
    for torn in (b"{", content.splitlines(keepends=True)[-1][:-1], b'{"entry": 6, "time"'):
        log.path.write_bytes(content + torn)
        assert read_audit_log(log.path)[1].entries == 5
        log.append("request", run="18")
        assert read_audit_log(log.path)[1].entries == 6
    log.path.write_bytes(b"torn")
    log.append("request", run="18")
    assert read_audit_log(log.path)[1].entries == 1


def test_a_file_of_something_else_is_not_continued(tmp_path):
    path = tmp_path / "log.jsonl"
    for content in (b"text\n", b'{"entry": 1}\n', b"\xff\xfe\n", b'{"a": 1, "chain": "0123456789abcdef"}\n'):
        path.write_bytes(content)
        with pytest.raises(LedgerError, match="not an entry of an audit log"):
            AuditLog(path).append("request")
        assert path.read_bytes() == content


def test_a_full_disk_leaves_the_log_as_it_was(log, monkeypatch):
    before = log.path.read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(LedgerError, match=r"cannot be written.*No space left"):
            log.append("request")
    log.path.write_bytes(log.path.read_bytes()[: len(before)])
    log.append("request")
    assert read_audit_log(log.path)[1].entries == 6


def _append(path, count):
    for _ in range(count):
        AuditLog(path).append("request", by=os.getpid())


def test_processes_append_one_after_another(tmp_path):
    path = tmp_path / "audit.jsonl"
    processes = [multiprocessing.get_context("fork").Process(target=_append, args=(path, 20)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    entries, _ = read_audit_log(path)
    assert len(entries) == 60
    assert len({entry["by"] for entry in entries}) == 3


def test_the_command(coterie, log):
    status, out, err = coterie("audit-log", log.path)
    assert (status, err) == (0, "")
    assert "request: 5" in out
    status, out, _ = coterie("audit-log", log.path, "--json")
    assert document(out)["chain"] == read_audit_log(log.path)[1].chain
    status, out, _ = coterie("audit-log", log.path, "--entries")
    assert out.splitlines()[2].startswith("3 ")
    assert out.splitlines()[2].endswith("request run=17 round=3 decision=answered")
    assert len(document(coterie("audit-log", log.path, "--entries", "--json")[1])["entries"]) == 5
    log.path.write_text("".join(lines(log)[1:]))
    status, out, err = coterie("audit-log", log.path)
    assert (status, out) == (1, "")
    assert err.startswith("error: ")
    assert "line 1" in err
    assert coterie("audit-log", log.path.with_name("none"))[0] == 1
