"""Sums of a client's charges: those of the whole ledger, in time that does not grow with it."""

import json
import os
import shutil
import time
from collections import Counter
from contextlib import closing

import pytest

from coterie.privacy import ClientLedger, Event, LedgerError, charge_times, ledger_lines
from coterie.privacy.ledger_lines import count_events, read_ledger
from coterie.privacy.sums import DAY, REQUEST, RUN, Sums

DAY_OF_SECONDS = 86400
STEP, OTHER = Event(0.05, 2.0), Event(1.0, 30.0)


class Site:
    def __init__(self, path):
        self.ledger, self.sums = path / "ledger.jsonl", path / "sums.json"

    def spend(self, number, *, event=STEP, count=3, **details):
        with closing(ClientLedger(1e-5, 1e6, self.ledger)) as ledger:
            ledger.spend(number, Counter({event: count}), **details)

    def check(self):
        """Compare all sums with those of all charges."""
        sums, charges = Sums(self.sums, self.ledger), read_ledger(self.ledger)[1]
        for key in (RUN, REQUEST):
            for value in {charge.get(key) for charge in charges} | {"none"}:
                expected = count_events(charge for charge in charges if charge.get(key) == value)
                assert sums.of(key, value) == (expected if value else Counter())
        days = {id(charge): int(charge["elapsed"] // DAY_OF_SECONDS) for charge in charges}
        for day in {*days.values(), -1, 10**4}:
            assert sums.since(day * DAY_OF_SECONDS) == count_events(c for c in charges if days[id(c)] >= day)
            assert sums.of(DAY, str(day)) == count_events(c for c in charges if days[id(c)] == day)


@pytest.fixture
def site(tmp_path):
    site = Site(tmp_path)
    for number in range(1, 5):
        site.spend(number, run=str(number % 2), request="ab" * 16, event=OTHER if number == 3 else STEP)
        site.check()
    return site


def test_sums_follow_the_ledger(site, monkeypatch):
    now, up = time.time() + 3 * DAY_OF_SECONDS, charge_times.uptime() + 3 * DAY_OF_SECONDS
    monkeypatch.setattr(time, "time", lambda: now)
    monkeypatch.setattr(charge_times, "uptime", lambda: up)
    site.spend(5, run="0", request="cd" * 16)
    site.spend(6)
    site.check()
    site.check()


def shorter(site):
    lines = site.ledger.read_bytes().splitlines(keepends=True)
    site.ledger.write_bytes(b"".join(lines[:3]))


def another(site):
    site.ledger.unlink()
    for number in range(1, 7):
        site.spend(number, run="7")


def altered(**changes):
    def change(site):
        site.sums.write_text(json.dumps(json.loads(site.sums.read_text()) | changes))

    return change


DAMAGES = {
    "no file": lambda site: site.sums.unlink(),
    "an empty file": lambda site: site.sums.write_text(""),
    "half a file": lambda site: site.sums.write_bytes(site.sums.read_bytes()[:100]),
    "a list": lambda site: site.sums.write_text("[]"),
    "no mark": altered(mark=None),
    "a mark beyond the end": altered(mark=[10**9, 10**9 + 7, 4, "0" * 16]),
    "a mark below zero": altered(mark=[-5, 7, 4, "0" * 16]),
    "a mark of text": altered(mark=["1", "2", "3", "4"]),
    "sums of text": altered(run="x"),
    "negative sums": altered(run={"1": [[0.05, 2.0, "poisson", None, 0, -3]]}, mark=None),
    "a ledger that lost charges": shorter,
    "another ledger": another,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_sums_that_do_not_fit_are_computed_again(site, damage):
    damage(site)
    site.check()
    site.spend(9, run="1", request="ab" * 16)
    site.check()


def test_older_sums_go_on_from_where_they_were(site, tmp_path):
    shutil.copy(site.sums, tmp_path / "old.json")
    site.spend(5, run="0")
    site.check()
    shutil.copy(tmp_path / "old.json", site.sums)
    site.check()


def test_a_damaged_ledger_and_a_full_disk_are_errors(site, monkeypatch):
    site.spend(5, run="0")

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        with pytest.raises(LedgerError, match=r"sums.json cannot be written: No space left"):
            Sums(site.sums, site.ledger)
    site.check()
    site.ledger.write_bytes(site.ledger.read_bytes().replace(b'"round": 2', b'"round": 7'))
    site.sums.unlink()
    with pytest.raises(LedgerError, match="its chain does not match"):
        Sums(site.sums, site.ledger)
    with pytest.raises(LedgerError):
        Sums(site.sums, site.ledger.with_name("none"))


def test_a_check_reads_what_is_new_alone(site, monkeypatch):
    site.spend(5, run="1")
    monkeypatch.setattr(ledger_lines, "read_bytes", lambda path: pytest.fail("the whole ledger was read"))
    assert Sums(site.sums, site.ledger).of(RUN, "1") == Counter({STEP: 6, OTHER: 3})
