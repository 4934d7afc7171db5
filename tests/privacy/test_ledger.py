"""The ledger: on disk before the release, once, whole, and within the budget."""

import contextlib
import errno
import hashlib
import json
import math
import os
import subprocess
import sys

import pytest

import coterie.audit.printed  # noqa: F401 - adds the mechanism of the paper
from coterie.privacy import (
    BudgetError,
    ClientLedger,
    Event,
    Ledger,
    LedgerError,
    SharedBudget,
    calibrate,
    epsilon,
    read_ledger,
)
from coterie.privacy import filter as filter_module
from coterie.privacy.accounting import delta_of
from coterie.privacy.filter import PINNED_SHARE
from coterie.privacy.ledger_lines import read_chained

DELTA = 1e-5
EVENT = Event(0.2, 1.5)


@pytest.fixture
def open_ledger(tmp_path):
    """Opens ledgers in a folder of the test, and closes them."""
    opened = []

    def make(epsilon=math.inf):
        opened.append(Ledger(DELTA, epsilon, tmp_path / "ledger.jsonl"))
        return opened[-1]

    yield make
    for ledger in opened:
        ledger.close()


def lines(path):
    """The charges; the first line says what the run is."""
    header, *charges = (json.loads(line) for line in path.read_text().splitlines())
    assert header["ledger"] == 1
    return charges


def test_a_client_refuses_hopeless_events_without_composing_their_pld(tmp_path, monkeypatch):
    """A server proposes the noise; PLD of noise multiplier 0.05 takes 7 s and 0.8 GB."""
    used = []

    def recorded(events, epsilon, accountant):
        used.append(accountant)
        return delta_of(events, epsilon, accountant)

    monkeypatch.setattr(filter_module, "delta_of", recorded)
    with contextlib.closing(ClientLedger(1e-5, 8.0, tmp_path / "ledger.jsonl", "pld")) as ledger:
        with pytest.raises(BudgetError, match="above the budget of 8"):
            ledger.spend(1, {Event(0.01, 0.05): 1000})
        assert used == ["rdp"]
        with pytest.raises(BudgetError, match="above the budget of 8"):
            ledger.spend(1, {Event(0.01, 0.6): 3000})
        assert used == ["rdp", "rdp", "pld"]  # near the budget, PLD may fit where RDP does not
    used.clear()
    with (
        contextlib.closing(ClientLedger(1e-5, 80.0, tmp_path / "large.jsonl", "pld")) as ledger,
        pytest.raises(BudgetError),
    ):
        ledger.spend(1, {Event(1.0, 0.2): 5})
    assert used == ["rdp", "pld"]  # 114 by RDP, but the budget is of this size


def test_a_charge_is_synced_before_the_permit_exists(tmp_path, monkeypatch, open_ledger):
    path = tmp_path / "ledger.jsonl"
    ledger = open_ledger()
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(path.read_text().splitlines()[-1]), fsync(fd)))
    permit = ledger.charge_round(7, EVENT, unit="client")
    assert [json.loads(text)["round"] for text in synced] == [7]
    (line,) = lines(path)
    assert (line["charge"], line["sampling_rate"], line["noise_multiplier"], line["unit"]) == (1, 0.2, 1.5, "client")
    assert permit.epsilon == line["epsilon"] == pytest.approx(epsilon([EVENT], DELTA))


def test_a_failing_disk_gives_no_permit_and_leaves_the_ledger_as_it_was(tmp_path, monkeypatch, open_ledger):
    path, ledger = tmp_path / "ledger.jsonl", open_ledger()
    ledger.charge_round(1, EVENT)
    before = path.read_bytes()

    def fail(fd):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(LedgerError, match=r"ledger\.jsonl cannot be written: No space left.*--resume"):
            ledger.charge_round(2, EVENT)
    assert path.read_bytes() == before
    with pytest.raises(LedgerError, match="was closed after a write error"):  # not even when there is space again
        ledger.charge_round(2, EVENT)
    ledger.close()
    assert len(open_ledger().charges) == 1


def test_a_short_write_is_completed(tmp_path, monkeypatch, open_ledger):
    ledger = open_ledger()

    class Slow:
        """Takes ten bytes at a time, as a nearly full disk may."""

        closed = False

        def __init__(self, file):
            self.file = file

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, content):
            return self.file.write(content[:10])

    ledger._file = Slow(ledger._file)
    ledger.charge_round(1, EVENT)
    assert len(read_ledger(tmp_path / "ledger.jsonl")[1]) == 1


# ---- the chain --------------------------------------------------------------------------------------------


def chained(path, charges=3):
    ledger = Ledger(DELTA, path=path)
    for number in range(1, charges + 1):
        ledger.charge_round(number, EVENT)
    ledger.close()
    return path.read_bytes().splitlines(keepends=True)


def test_an_expected_charge_costs_the_same_and_is_not_made_before_it_is_due(tmp_path):
    event, other = Event(0.1, 1.0), Event(0.1, 2.0)
    with (
        contextlib.closing(Ledger(1e-5, 10.0, tmp_path / "plain")) as plain,
        contextlib.closing(Ledger(1e-5, 10.0, tmp_path / "ahead")) as ahead,
    ):
        for number, (expected, charged) in enumerate(
            [(event, event), (other, event), (event, event), (None, other)], 1
        ):
            size = (tmp_path / "ahead").stat().st_size
            if expected is not None:
                ahead.expect(expected)
            assert ((tmp_path / "ahead").stat().st_size, len(ahead.charges)) == (size, number - 1)
            assert ahead.charge_round(number, charged).epsilon == plain.charge_round(number, charged).epsilon
        ahead.expect(event)
        ahead.charge_round(5, other)  # what was expected before this charge is not used after it
        plain.charge_round(5, other)
        assert ahead.charge_round(6, event).epsilon == plain.charge_round(6, event).epsilon
        assert ahead.spent() == plain.spent()


def test_every_charge_is_chained_to_all_bytes_before_it(tmp_path):
    header, *charges = chained(tmp_path / "ledger.jsonl")
    chain = hashlib.sha256(header).hexdigest()[:16]
    for line in charges:
        content = {key: value for key, value in json.loads(line).items() if key != "chain"}
        chain = hashlib.sha256(chain.encode() + json.dumps(content).encode()).hexdigest()[:16]
        assert json.loads(line)["chain"] == chain
    assert read_chained(tmp_path / "ledger.jsonl")[2][-1] == chain
    assert all("chain" not in charge for charge in read_ledger(tmp_path / "ledger.jsonl")[1])


def test_every_flipped_bit_of_a_chained_line_is_found(tmp_path):
    path = tmp_path / "ledger.jsonl"
    content = b"".join(chained(path))
    inside = content.index(b"\n") + 1
    end = content.rstrip(b"\n").rindex(b"\n")
    for place in range(inside, end):  # the last line can only be checked against a checkpoint
        damaged = bytearray(content)
        damaged[place] ^= 1 << (place % 8)
        path.write_bytes(damaged)
        with pytest.raises(LedgerError) as refused:
            read_ledger(path)
        assert "ledger.jsonl" in str(refused.value)


def test_a_line_that_is_lost_in_the_middle_breaks_the_chain(tmp_path):
    path = tmp_path / "ledger.jsonl"
    header, first, second, third = chained(path)
    path.write_bytes(header + first + third.replace(b'"charge": 3', b'"charge": 2'))
    with pytest.raises(LedgerError, match=r"line 3: its chain does not match .*restore the ledger"):
        read_ledger(path)
    with pytest.raises(LedgerError, match="chain does not match"):
        Ledger(DELTA, path=path)
    path.write_bytes(header + first + second.split(b', "chain"')[0] + b"}\n")
    with pytest.raises(LedgerError, match="chain does not match"):
        read_ledger(path)


@pytest.mark.parametrize("kind", [ClientLedger, Ledger])
def test_a_ledger_is_a_regular_file(tmp_path, kind):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    for name, what in (("fifo", "a FIFO, not a regular file"), ("folder", "Is a directory")):
        with pytest.raises(LedgerError, match=what):
            kind(DELTA, path=tmp_path / name)
    with pytest.raises(LedgerError, match="a FIFO"):
        read_ledger(tmp_path / "fifo")


def test_reopening_knows_all_that_was_spent(open_ledger):
    ledger = open_ledger(9.0)
    for number in (1, 2, 2, 3):
        ledger.charge_round(number, EVENT)
    spent = ledger.spent()
    ledger.close()
    again = open_ledger(9.0)
    assert again.events == {EVENT: 4}
    assert again.spent() == pytest.approx(spent, rel=1e-9)
    assert [c["round"] for c in again.charges] == [1, 2, 2, 3]


def test_a_torn_last_line_was_never_paid_for(tmp_path, open_ledger):
    path = tmp_path / "ledger.jsonl"
    ledger = open_ledger()
    ledger.charge_round(1, EVENT)
    ledger.close()
    path.write_text(path.read_text() + '{"charge": 2, "rou')
    ledger = open_ledger()
    assert len(ledger.charges) == 1
    ledger.charge_round(2, EVENT)
    assert [line["charge"] for line in lines(path)] == [1, 2]


@pytest.mark.parametrize(
    "damage",
    [
        "nonsense",
        "{}",
        "[]",
        '{"charge": 5, "round": 1, "sampling_rate": 0.2, "noise_multiplier": 1, "sampler": "poisson"}',
        '{"charge": 1, "round": 1, "sampling_rate": 7, "noise_multiplier": 1, "sampler": "poisson"}',
        '{"charge": 1, "round": 1, "sampling_rate": 0.2, "noise_multiplier": 1}',
    ],
)
def test_a_damaged_ledger_is_refused(tmp_path, damage, open_ledger):
    path = tmp_path / "ledger.jsonl"
    open_ledger().close()
    written = path.read_text() + damage + "\n"
    path.write_text(written)
    with pytest.raises(LedgerError, match="line 2 is not a charge"):
        open_ledger()
    assert path.read_text() == written
    path.write_text(damage + "\n")
    with pytest.raises(LedgerError, match="line 1 is not the beginning"):
        open_ledger()


def test_the_ledger_of_another_run_is_refused_once_it_has_charges(tmp_path, open_ledger):
    open_ledger(5.0).close()
    ledger = open_ledger(9.0)  # killed before its first charge: nothing was paid for
    ledger.charge_round(1, EVENT)
    ledger.close()
    with pytest.raises(LedgerError, match="with another plan"):
        open_ledger(12.0)
    header, charges = read_ledger(tmp_path / "ledger.jsonl")
    assert (header["epsilon"], header["delta"], header["accountant"]) == (9.0, DELTA, "pld")
    assert len(charges) == 1


def test_reading_needs_something_to_read(tmp_path):
    with pytest.raises(LedgerError, match="cannot be read"):
        read_ledger(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(LedgerError, match="is empty"):
        read_ledger(tmp_path / "empty.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LedgerError, match="it is not text"):
        read_ledger(tmp_path / "binary.jsonl")
    with pytest.raises(LedgerError, match="it is not text"):
        Ledger(DELTA, path=tmp_path / "binary.jsonl")


def test_rdp_is_tracked_beside_pld():
    ledger = Ledger(DELTA)
    for number in range(1, 6):
        ledger.charge_round(number, EVENT)
    assert ledger.spent("rdp") == pytest.approx(epsilon([EVENT] * 5, DELTA, "rdp"))
    assert ledger.spent() == ledger.spent("pld") < ledger.spent("rdp")
    paper = Ledger(DELTA, accountant="theorem-4.2")
    permit = paper.charge_round(1, Event(0.1, 2.0, "fixed"))
    assert permit.epsilon == paper.spent() == pytest.approx(epsilon([Event(0.1, 2.0, "fixed")], DELTA, "theorem-4.2"))


def test_two_cannot_share_it(tmp_path, open_ledger):
    path = tmp_path / "ledger.jsonl"
    ledger = open_ledger()
    with pytest.raises(LedgerError, match="in use by another process"):
        open_ledger()
    other = f"from coterie.privacy import Ledger; from pathlib import Path; Ledger(1e-5, path=Path({str(path)!r}))"
    refused = subprocess.run([sys.executable, "-c", other], capture_output=True, text=True)
    assert "in use by another process" in refused.stderr
    ledger.close()
    open_ledger()


def test_nothing_is_written_when_the_budget_is_spent(tmp_path, open_ledger):
    path = tmp_path / "ledger.jsonl"
    noise = calibrate(1.0, DELTA, 0.2, 2)
    ledger = open_ledger(1.0)
    ledger.charge_round(1, Event(0.2, noise))
    ledger.charge_round(2, Event(0.2, noise))
    before = path.read_text()
    with pytest.raises(BudgetError, match=r"round 3 would raise epsilon to .* above the budget of 1; 2 charges"):
        ledger.charge_round(3, Event(0.2, noise))
    assert path.read_text() == before
    assert ledger.spent() <= 1.0


@pytest.mark.parametrize(
    ("event", "rounds", "delta"),
    [
        (Event(1.0, 0.1), 12, 1e-5),  # epsilon 750
        (Event(0.1, 3.0), 200, 1e-12),  # 0.2 % more in the sum of all rounds one by one
        (Event(1.0, 30.0), 200, 1e-10),
        (Event(1.0, 30.0, "fixed"), 200, 1e-10),
    ],
)
def test_all_rounds_of_a_calibration_fit_its_budget(event, rounds, delta):
    budget = epsilon({event: rounds}, delta)
    ledger = Ledger(delta, budget)
    ledger.expect(event)
    for number in range(1, rounds + 1):
        permit = ledger.charge_round(number, event)
        ledger.expect(event)
    assert permit.epsilon == ledger.spent() == pytest.approx(budget, rel=1e-9)
    with pytest.raises(BudgetError, match=f"{rounds} charges were made"):
        ledger.charge_round(rounds + 1, event)


def test_wasted_charges_are_made_up_for():
    noise = calibrate(4.0, DELTA, 0.2, 10)
    ledger = Ledger(DELTA, 4.0)
    for number in (1, 2, 3, 3, 4):  # round 3 was repeated after a crash
        ledger.charge_round(number, Event(0.2, noise))
    more = calibrate(4.0, DELTA, 0.2, 6, spent=ledger.events)
    assert more > noise
    for number in range(5, 11):
        ledger.charge_round(number, Event(0.2, more))
    assert ledger.spent() <= 4.0
    assert len(ledger.charges) == 11


def test_without_privacy_there_is_no_budget_and_json_has_no_infinity(tmp_path, open_ledger):
    path = tmp_path / "ledger.jsonl"
    permit = open_ledger().charge_round(1, Event(0.5, 0.0))
    assert permit.epsilon == math.inf
    assert lines(path)[0]["epsilon"] is None


# ---- a budget that several runs share ---------------------------------------------------------------------


@pytest.fixture
def open_run(tmp_path):
    """Opens the ledgers of runs, each with the shared budget, and closes them."""
    opened = []

    def make(name, budget=8.0, file="budget.jsonl", **numbers):
        ledger = Ledger(DELTA, budget, tmp_path / name)
        opened.append(ledger)
        numbers = {"clients": 50, "sampler": "poisson", "epsilon": 3.0, "delta": DELTA} | numbers
        try:
            ledger.share(SharedBudget(tmp_path / file, **numbers))
        except LedgerError:
            ledger.close()
            raise
        return ledger

    yield make
    for ledger in opened:
        ledger.close()


def test_runs_that_share_a_budget_spend_it_together(tmp_path, open_run):
    first = open_run("a")
    for number in (1, 2):
        first.charge_round(number, EVENT)
    first.close()
    second = open_run("b", epsilon=100.0)  # the file keeps the budget with which it was created
    permit = second.charge_round(1, EVENT)
    assert permit.epsilon == pytest.approx(epsilon([EVENT], DELTA))
    (line,) = lines(tmp_path / "b")
    together = pytest.approx(epsilon([EVENT] * 3, DELTA), rel=1e-6)
    assert line["shared"] == {"charge": 3, "epsilon": together, "delta": DELTA, "epsilon_budget": 3.0}
    fit = next(n for n in range(3, 100) if delta_of({EVENT: n + 1}, 3.0) > PINNED_SHARE * DELTA)
    for number in range(2, fit - 1):
        second.charge_round(number, EVENT)
    with pytest.raises(BudgetError, match=r"budget\.jsonl: round .* would raise epsilon to .* above the budget of 3 "):
        second.charge_round(fit, EVENT)
    own = lines(tmp_path / "b")
    assert second.spent() < 3.0 < second.budget
    assert len(lines(tmp_path / "budget.jsonl")) == 2 + len(own)
    header, charges = read_ledger(tmp_path / "budget.jsonl")
    assert (header["epsilon"], header["clients"], header["sampler"]) == (3.0, 50, "poisson")
    assert 2.5 < charges[-1]["epsilon"] <= 3.0


def test_a_crash_between_the_two_writes_counts_too_much_and_never_too_little(tmp_path, open_run, monkeypatch):
    ledger = open_run("a")
    ledger.charge_round(1, EVENT)

    def power_cut(*words, **named):
        raise OSError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(ledger, "_write", power_cut)
        with pytest.raises(OSError, match="power cut"):
            ledger.charge_round(2, EVENT)
    ledger.close()
    assert len(lines(tmp_path / "a")) == 1
    assert len(lines(tmp_path / "budget.jsonl")) == 2
    again = open_run("a")
    again.charge_round(2, EVENT)
    assert lines(tmp_path / "a")[-1]["shared"]["charge"] == 3


def test_the_shared_budget_is_synced_before_the_run_s_own_ledger(tmp_path, open_run, monkeypatch):
    ledger, synced, fsync = open_run("a"), [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    ledger.charge_round(1, EVENT)
    assert [os.path.basename(name) for name in synced] == ["budget.jsonl", "a"]


def test_nothing_is_written_anywhere_when_either_budget_is_spent(tmp_path, open_run):
    ledger = open_run("a", budget=0.1)
    with pytest.raises(BudgetError, match=r"above the budget of 0\.1"):
        ledger.charge_round(1, EVENT)
    assert lines(tmp_path / "a") == lines(tmp_path / "budget.jsonl") == []


def test_one_run_at_a_time_charges_a_shared_budget(tmp_path, open_run):
    open_run("a")
    with pytest.raises(LedgerError, match=r"budget\.jsonl is in use by another process"):
        open_run("b")


@pytest.mark.parametrize("numbers", [{"clients": 51}, {"sampler": "fixed"}], ids=str)
def test_a_shared_budget_is_for_the_same_clients_and_sampler(open_run, numbers):
    open_run("a").close()
    with pytest.raises(LedgerError, match=r"budget\.jsonl is for 50 clients and poisson sampling; this run has"):
        open_run("b", **numbers)


def test_the_ledger_of_a_run_is_no_shared_budget(open_run):
    ledger = open_run("a")
    ledger.charge_round(1, EVENT)
    ledger.close()
    with pytest.raises(LedgerError, match="a is not a budget file"):
        open_run("b", file="a")


def test_a_run_keeps_the_budget_file_with_which_it_began(tmp_path, open_run):
    ledger = open_run("a")
    ledger.charge_round(1, EVENT)
    ledger.close()
    with pytest.raises(LedgerError, match=r"other\.jsonl does not contain charge 1 of this run"):
        open_run("a", file="other.jsonl")
    (tmp_path / "budget.jsonl").rename(tmp_path / "moved.jsonl")
    open_run("a", file="moved.jsonl").charge_round(2, EVENT)
    alone = Ledger(DELTA, 8.0, tmp_path / "c")
    alone.charge_round(1, EVENT)
    alone.close()
    with pytest.raises(LedgerError, match="does not contain charge 1"):
        open_run("c", file="third.jsonl")


def test_a_client_s_budget_holds_over_all_rounds(tmp_path):
    event = Event(1.0, calibrate(2.0, DELTA, 1.0, 2))
    for number in (1, 2):  # every answer opens the ledger anew
        ledger = ClientLedger(DELTA, 2.0, tmp_path / "client-0.ledger.jsonl")
        assert ledger.spend(number, {event: 1}, planned={event: 2}) == number
        ledger.close()
    ledger = ClientLedger(DELTA, 2.0, tmp_path / "client-0.ledger.jsonl")
    with pytest.raises(BudgetError, match="round 3"):
        ledger.spend(3, {event: 1}, planned={event: 3})
    assert len(ledger.charges) == 2
    ledger.close()
