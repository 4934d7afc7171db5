"""The ledger: on disk before the release, once, whole, and within the budget."""

import json
import math
import os
import subprocess
import sys

import pytest

from coterie.privacy import BudgetError, ClientLedger, Event, Ledger, LedgerError, calibrate, epsilon, read_ledger

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


def test_a_charge_is_synced_before_the_permit_exists(tmp_path, monkeypatch, open_ledger):
    path = tmp_path / "ledger.jsonl"
    ledger = open_ledger()
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(path.read_text().splitlines()[-1]), fsync(fd)))
    permit = ledger.round(7, EVENT, unit="client")
    assert [json.loads(text)["round"] for text in synced] == [7]
    (line,) = lines(path)
    assert (line["charge"], line["sampling_rate"], line["noise_multiplier"], line["unit"]) == (1, 0.2, 1.5, "client")
    assert permit.epsilon == line["epsilon"] == pytest.approx(epsilon([EVENT], DELTA))


def test_a_failing_disk_gives_no_permit(tmp_path, monkeypatch, open_ledger):
    ledger = open_ledger()

    def fail(fd):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        ledger.round(1, EVENT)


def test_reopening_knows_all_that_was_spent(open_ledger):
    ledger = open_ledger(9.0)
    for number in (1, 2, 2, 3):
        ledger.round(number, EVENT)
    spent = ledger.spent()
    ledger.close()
    again = open_ledger(9.0)
    assert again.events == {EVENT: 4}
    assert again.spent() == pytest.approx(spent, rel=1e-9)
    assert [c["round"] for c in again.charges] == [1, 2, 2, 3]


def test_a_torn_last_line_was_never_paid_for(tmp_path, open_ledger):
    path = tmp_path / "ledger.jsonl"
    ledger = open_ledger()
    ledger.round(1, EVENT)
    ledger.close()
    path.write_text(path.read_text() + '{"charge": 2, "rou')
    ledger = open_ledger()
    assert len(ledger.charges) == 1
    ledger.round(2, EVENT)
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
    ledger.round(1, EVENT)
    ledger.close()
    with pytest.raises(LedgerError, match="planned otherwise"):
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
        ledger.round(number, EVENT)
    assert ledger.spent("rdp") == pytest.approx(epsilon([EVENT] * 5, DELTA, "rdp"))
    assert ledger.spent() == ledger.spent("pld") < ledger.spent("rdp")
    paper = Ledger(DELTA, accountant="theorem-4.2")
    permit = paper.round(1, Event(0.1, 2.0, "fixed"))
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
    ledger.round(1, Event(0.2, noise))
    ledger.round(2, Event(0.2, noise))
    before = path.read_text()
    with pytest.raises(BudgetError, match=r"round 3 would raise epsilon to .* above the budget of 1; 2 charges"):
        ledger.round(3, Event(0.2, noise))
    assert path.read_text() == before
    assert ledger.spent() <= 1.0


def test_wasted_charges_are_made_up_for():
    noise = calibrate(4.0, DELTA, 0.2, 10)
    ledger = Ledger(DELTA, 4.0)
    for number in (1, 2, 3, 3, 4):  # round 3 was repeated after a crash
        ledger.round(number, Event(0.2, noise))
    more = calibrate(4.0, DELTA, 0.2, 6, spent=ledger.events)
    assert more > noise
    for number in range(5, 11):
        ledger.round(number, Event(0.2, more))
    assert ledger.spent() <= 4.0
    assert len(ledger.charges) == 11


def test_without_privacy_there_is_no_budget_and_json_has_no_infinity(tmp_path, open_ledger):
    path = tmp_path / "ledger.jsonl"
    permit = open_ledger().round(1, Event(0.5, 0.0))
    assert permit.epsilon == math.inf
    assert lines(path)[0]["epsilon"] is None


def test_a_client_s_budget_holds_over_all_rounds(tmp_path):
    event = Event(1.0, calibrate(2.0, DELTA, 1.0, 2))
    for number in (1, 2):  # every answer opens the ledger anew
        ledger = ClientLedger(DELTA, 2.0, tmp_path / "client-0.ledger.jsonl")
        assert ledger.spend(number, {event: 1}) == number
        ledger.close()
    ledger = ClientLedger(DELTA, 2.0, tmp_path / "client-0.ledger.jsonl")
    with pytest.raises(BudgetError, match="round 3"):
        ledger.spend(3, {event: 1})
    assert len(ledger.charges) == 2
    ledger.close()
