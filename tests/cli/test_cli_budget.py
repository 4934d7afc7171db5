"""`coterie budget`."""

import json
from collections import Counter
from contextlib import closing

import pytest

from coterie.privacy import ClientLedger, Event


@pytest.fixture
def ledger(tmp_path):
    """A budget file with three charges, and its anchors."""
    path, anchors = tmp_path / "budget.jsonl", tmp_path / "client-0.anchors.jsonl"
    for number in (1, 2, 3):
        with closing(ClientLedger(1e-5, 8.0, path, anchors=anchors)) as own:
            own.spend(number, Counter({Event(0.05, 2.0): 10}))
    return path, anchors


def test_a_budget_is_shown_copied_restored_and_reconciled(coterie, ledger, tmp_path):
    path, anchors = ledger
    status, out, err = coterie("budget", "show", path)
    assert (status, err) == (0, "")
    assert {"file", "epsilon", "epsilon_budget", "delta", "charges"} <= {line.split()[0] for line in out.splitlines()}
    status, out, _ = coterie("budget", "show", path, "--json")
    shown = json.loads(out)
    assert (shown["charges"], shown["epsilon_budget"], shown["delta"]) == (3, 8.0, 1e-5)
    assert 0 < shown["epsilon"] < 8

    copy = tmp_path / "copies" / "budget.jsonl"
    assert coterie("budget", "backup", path, copy) == (0, f"{copy}: 3 charges\n", "")
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
    assert coterie("budget", "restore", copy, path) == (0, f"{path}: 3 charges\n", "")

    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
    status, out, err = coterie("budget", "reconcile", path, "--anchors", anchors, "--json")
    assert (status, err) == (0, "")
    assert json.loads(out)["epsilon"] == pytest.approx(shown["epsilon"], rel=1e-9)


def test_what_cannot_be_done_is_one_line(coterie, ledger, tmp_path):
    path, anchors = ledger
    copy = tmp_path / "copy.jsonl"
    coterie("budget", "backup", path, copy)
    with closing(ClientLedger(1e-5, 8.0, path, anchors=anchors)) as own:
        own.spend(4, Counter({Event(0.05, 2.0): 10}))
    for words, reason in (
        (("show", tmp_path / "none"), "cannot be read"),
        (("show", anchors), "is not a charge"),
        (("restore", copy, path), f"{path} has charges that {copy} lacks"),
        (("reconcile", path, "--anchors", tmp_path / "none"), "contains no anchors"),
        (("reconcile", path, "--anchors", path), "not an anchor"),
    ):
        status, _, err = coterie("budget", *words)
        assert status == 1
        (line,) = err.splitlines()
        assert line.startswith("error: ")
        assert reason in line
