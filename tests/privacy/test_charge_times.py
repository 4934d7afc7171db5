"""The elapsed time of charges: no more than has passed, whatever the clock shows, and after any number of restarts."""

import json
import time
from collections import Counter
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest

from coterie.privacy import ClientLedger, Event, charge_times
from coterie.privacy.anchors import Anchors
from coterie.privacy.charge_times import elapsed_of, times_after
from coterie.privacy.ledger_lines import read_ledger

DAY = 86400
STEP = Event(0.05, 2.0)


@pytest.fixture
def machine(monkeypatch):
    machine = SimpleNamespace(time=1.8e9, uptime=1000.0)
    monkeypatch.setattr(time, "time", lambda: machine.time)
    monkeypatch.setattr(charge_times, "uptime", lambda: machine.uptime)

    def advance(seconds, jump=0.0, restart=None):
        """Let time pass; the clock jumps, and the machine restarts so many seconds before the end."""
        machine.time += seconds + jump
        machine.uptime = machine.uptime + seconds if restart is None else restart

    machine.advance = advance
    return machine


def elapsed(steps, machine):
    """Elapsed time after each step, from 0."""
    charge, found = times_after({}), []
    for step in steps:
        machine.advance(*step)
        charge = times_after(json.loads(json.dumps(charge)))
        found.append(elapsed_of(charge))
    return found


def test_it_is_the_time_that_has_passed(machine):
    assert elapsed([(0.5,), (DAY,), (0.0,), (40 * DAY,)], machine) == pytest.approx(
        [0.5, DAY + 0.5, DAY + 0.5, 41 * DAY + 0.5], abs=0.01
    )


@pytest.mark.parametrize("jump", [400 * DAY, -400 * DAY])
def test_a_jump_counts_for_nothing(machine, jump):
    back, there, again = elapsed([(60, jump), (60,), (60, -jump)], machine)
    assert back <= 60
    assert there == pytest.approx(back + 60)
    assert again <= there + 60


def test_a_restart_loses_what_was_before_it(machine):
    machine.uptime = 3 * DAY
    assert elapsed([(9 * DAY, 0.0, 2 * DAY), (DAY,)], machine) == pytest.approx([2 * DAY, 3 * DAY])
    assert elapsed([(9 * DAY, 0.0, 5 * DAY)], machine) == pytest.approx([2 * DAY])  # 3 days of uptime were counted


@pytest.mark.parametrize("seed", range(50))
def test_it_never_runs_ahead_or_back(machine, seed):
    rng, steps = np.random.default_rng(seed), []
    for _ in range(30):
        seconds = float(rng.exponential(5 * DAY))
        jump = float(rng.choice([0.0, rng.normal(0, 100 * DAY)]))
        restart = float(rng.uniform(0, seconds)) if rng.random() < 0.3 else None
        steps.append((seconds, jump, restart))
    found = elapsed(steps, machine)
    passed = np.diff(found, prepend=0.0)
    assert (passed >= 0).all()
    assert (passed <= [seconds + 0.01 for seconds, *_ in steps]).all()


def test_charges_of_older_versions_count_as_made_with_the_first_that_states_it(machine):
    old = {"time": "2020-01-01T00:00:00Z"}
    assert elapsed_of(old) == elapsed_of(times_after(old)) == 0
    for damaged in ({"uptime": "x"}, {"time": "yesterday"}, {"elapsed": -1.0}, {"elapsed": None}, {"uptime": None}):
        assert elapsed_of(times_after({**times_after({}), **damaged})) == 0


@pytest.mark.parametrize("anchored", [False, True])
def test_a_ledger_continues_it(machine, tmp_path, anchored):
    anchors = tmp_path / "anchors.jsonl" if anchored else None
    for _ in range(3):
        with closing(ClientLedger(1e-5, 1e6, tmp_path / "ledger.jsonl", anchors=anchors)) as ledger:
            ledger.spend(1, Counter({STEP: 1}))
            machine.advance(DAY)
            ledger.spend(1, Counter({STEP: 1, Event(1.0, 30.0): 1}))
            assert ledger.elapsed == elapsed_of(read_ledger(tmp_path / "ledger.jsonl")[1][-1])
        machine.advance(2 * DAY)
    charges = [elapsed_of(charge) / DAY for charge in read_ledger(tmp_path / "ledger.jsonl")[1]]
    assert charges == pytest.approx([0, 1, 1, 3, 4, 4, 6, 7, 7], abs=1e-6)
    assert anchors is None or Anchors(anchors).last().charges == 9


def test_the_uptime_of_this_machine_runs():
    before = charge_times.uptime()
    time.sleep(0.01)
    assert 0.009 < charge_times.uptime() - before < 5
