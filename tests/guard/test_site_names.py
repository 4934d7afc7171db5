"""The names of a site by run: the same as in the whole ledger, at a cost that does not grow with it."""

import json
import random
from collections import Counter
from contextlib import closing

import pytest

from coterie.guard import site_names
from coterie.guard.site_names import RUNS, names_of_run
from coterie.privacy import ClientLedger, Event, LedgerError, read_ledger

EVENT = Event(0.05, 2.0)


@pytest.fixture
def files(tmp_path):
    return tmp_path / "ledger.jsonl", tmp_path / "client-0.names.json"


def charge(ledger, *entries):
    with closing(ClientLedger(1e-5, 1e6, ledger)) as own:
        for number, entry in enumerate(entries, 1):
            own.record(number, Counter({EVENT: 1}), **({} if entry is None else {"guard": entry}))


def in_whole_ledger(ledger, run):
    entries = [charge.get("guard", {}) for charge in read_ledger(ledger)[1]]
    return list(dict.fromkeys(e["site"] for e in entries if e.get("run") == run and "site" in e))


def test_without_a_ledger_nothing_is_charged_or_written(files):
    assert names_of_run("1", *files) == []
    files[0].touch()
    assert names_of_run("1", *files) == []
    assert not files[1].exists()


def test_random_charges_give_the_names_of_the_whole_ledger(files):
    draw = random.Random(4)
    for _ in range(30):
        entries = [
            draw.choice([None, {"run": draw.choice("123")}, {"run": draw.choice("123"), "site": draw.choice("ab")}])
            for _ in range(draw.randint(1, 3))
        ]
        charge(files[0], *entries)
        run = draw.choice("123")
        assert names_of_run(run, *files) == in_whole_ledger(files[0], run)


def test_another_ledger_is_read_as_a_whole(files, tmp_path):
    charge(files[0], {"run": "1", "site": "a"}, {"run": "1", "site": "a"})
    old = files[0].read_bytes()
    charge(files[0], {"run": "1", "site": "b"})
    assert names_of_run("1", *files) == ["a", "b"]
    files[0].write_bytes(old)  # restored: the names are those of what is there
    assert names_of_run("1", *files) == ["a"]
    files[0].unlink()
    charge(files[0], *[{"run": "1", "site": "c"}] * 5)
    assert names_of_run("1", *files) == ["c"]


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"names": 1, "end": 3, "tail": ""}', b'{"names": {"1": []}, "end": 0, "tail": ""}']
)
def test_a_damaged_file_of_names_is_written_again(files, content):
    charge(files[0], {"run": "1", "site": "a"})
    files[1].write_bytes(content)
    assert names_of_run("1", *files) == ["a"]
    assert json.loads(files[1].read_text())["names"] == {"1": ["a"]}
    assert files[1].stat().st_mode & 0o777 == 0o600


def test_an_incomplete_last_line_does_not_count(files):
    charge(files[0], {"run": "1", "site": "a"})
    assert names_of_run("1", *files) == ["a"]
    with files[0].open("ab") as stream:
        stream.write(b'{"charge": 2, "guard": {"run": "1", "si')
    assert names_of_run("1", *files) == ["a"]
    charge(files[0], {"run": "1", "site": "b"})  # which removes it
    assert names_of_run("1", *files) == ["a", "b"]


def test_a_damaged_ledger_is_an_error(files):
    charge(files[0], {"run": "1", "site": "a"}, {"run": "1", "site": "a"})
    files[0].write_bytes(files[0].read_bytes().replace(b'"charge": 1', b'"charge": 7'))
    with pytest.raises(LedgerError):
        names_of_run("1", *files)


def test_only_the_latest_runs_are_kept(files):
    charge(files[0], *({"run": str(run), "site": "a"} for run in range(RUNS + 20)))
    assert names_of_run("0", *files) == ["a"]
    kept = json.loads(files[1].read_text())["names"]
    assert len(kept) == RUNS + 1
    assert {"0", str(RUNS + 19)} <= kept.keys()
    charge(files[0], {"run": "3", "site": "b"})
    assert names_of_run("3", *files) == ["a", "b"]


def test_a_message_of_a_known_run_does_not_read_the_whole_ledger(files, monkeypatch):
    charge(files[0], *[{"run": "1", "site": "a"}] * 100)
    names_of_run("1", *files)
    monkeypatch.setattr(site_names, "read_ledger", lambda _: pytest.fail("reads the whole ledger"))
    monkeypatch.setattr(site_names, "read_bytes", lambda _: pytest.fail("reads the whole ledger"))
    charge(files[0], {"run": "1", "site": "a"})
    assert names_of_run("1", *files) == ["a"]
