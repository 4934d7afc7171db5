"""A ledger that lost charges is refused, and opened in time that does not grow with its length."""

import errno
import json
import os
from collections import Counter
from contextlib import closing

import pytest

from coterie.files import FileError
from coterie.privacy import BudgetError, ClientLedger, Event, LedgerError, epsilon
from coterie.privacy.anchors import Anchors
from coterie.privacy.budget_files import backup, reconcile, restore, spending
from coterie.privacy.ledger_lines import count_events, read_ledger

DELTA, EPSILON = 1e-5, 8.0
STEP, OTHER = Event(0.05, 2.0), Event(1.0, 30.0)
PLANNED = Counter({STEP: 400})


class Site:
    """Data and state folders of one client."""

    def __init__(self, path, budget=None):
        self.ledger = budget or path / "data" / "budget.jsonl"
        self.anchors = path / "state" / "client-0.anchors.jsonl"
        for file in (self.ledger, self.anchors):
            file.parent.mkdir(parents=True, exist_ok=True)

    def open(self):
        return ClientLedger(DELTA, EPSILON, self.ledger, anchors=self.anchors)

    def spend(self, *numbers, event=STEP, count=10):
        for number in numbers:
            with closing(self.open()) as ledger:
                ledger.spend(number, Counter({event: count}), planned=PLANNED)

    @property
    def events(self):
        return count_events(read_ledger(self.ledger)[1])


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path)


def lines(path):
    return path.read_bytes().splitlines(keepends=True)


def keep(path, number):
    path.write_bytes(b"".join(lines(path)[: 1 + number]))


def test_a_ledger_goes_on_from_the_last_anchor(site):
    plain = Site(site.ledger.parents[1] / "plain")
    site.spend(1, 2, 3)
    with closing(ClientLedger(DELTA, EPSILON, plain.ledger)) as ledger:
        for number in (1, 2, 3):
            ledger.spend(number, Counter({STEP: 10}), planned=PLANNED)
    with closing(site.open()) as ledger:
        assert (ledger.charges, ledger.events) == ([], Counter({STEP: 30}))
        assert ledger.spend(4, Counter({STEP: 10, OTHER: 1}), planned=PLANNED) == 4
        assert ledger.spent() == pytest.approx(epsilon(ledger.events, DELTA), rel=1e-9)
    assert site.events == Counter({STEP: 40, OTHER: 1})
    times = dict.fromkeys(("time", "uptime", "elapsed"))
    timeless = [[{**charge, **times} for charge in read_ledger(each.ledger)[1][:3]] for each in (site, plain)]
    assert timeless[0] == timeless[1]


def test_charges_of_other_clients_with_the_same_data_are_read_after_the_anchor(tmp_path):
    site, other = Site(tmp_path), Site(tmp_path / "other", tmp_path / "data" / "budget.jsonl")
    site.spend(1)
    other.spend(1, 2)
    with closing(site.open()) as ledger:
        assert (len(ledger.charges), ledger.events) == (2, Counter({STEP: 30}))
    site.spend(2)
    other.spend(3)
    assert [charge["charge"] for charge in read_ledger(site.ledger)[1]] == [1, 2, 3, 4, 5]


def test_the_budget_ends_where_it_ends_without_anchors(tmp_path):
    spent = []
    for anchored in (True, False):
        site, rounds = Site(tmp_path / str(anchored)), 0
        try:
            for number in range(1, 1000):
                with closing(ClientLedger(DELTA, 1.0, site.ledger, anchors=site.anchors if anchored else None)) as own:
                    own.spend(number, Counter({STEP: 10}), planned=Counter({STEP: 20}))
                rounds = number
        except BudgetError:
            spent.append(rounds)
    assert spent[0] == spent[1] > 2


LOSSES = {
    "deleted": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "no charge": lambda path: keep(path, 0),
    "an older copy": lambda path: keep(path, 2),
    "a cut line": lambda path: path.write_bytes(path.read_bytes()[:-3]),
    "another end": lambda path: path.write_bytes(path.read_bytes()[:-7] + b'0000"}\n'),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_ledger_that_lost_a_charge_is_refused_until_it_is_reconciled(site, loss):
    site.spend(1, 2, 3, 4)
    events = site.events
    LOSSES[loss](site.ledger)
    with pytest.raises(LedgerError, match=f"lacks charge 4, .*coterie budget reconcile {site.ledger} --anchors"):
        site.spend(5)
    if loss == "another end":
        keep(site.ledger, 3)  # a damaged line is refused by its chain
    assert reconcile(site.ledger, site.anchors).charges == len(read_ledger(site.ledger)[1])
    assert site.events == events
    site.spend(5)
    assert site.events == events + Counter({STEP: 10})


def test_a_ledger_that_went_on_elsewhere_costs_both_branches(tmp_path):
    site, other = Site(tmp_path), Site(tmp_path / "other", tmp_path / "data" / "budget.jsonl")
    site.spend(1, 2, 3, 4)
    keep(site.ledger, 2)
    other.spend(1)  # knows nothing of the loss
    with pytest.raises(LedgerError, match="lacks charge 4"):
        site.spend(5)
    reconcile(site.ledger, site.anchors)
    assert site.events == Counter({STEP: 50})
    site.spend(5)
    other.spend(2)
    reconcile(site.ledger, site.anchors)  # nothing is lost: nothing is charged
    assert site.events == Counter({STEP: 70})


def test_reconciling_may_exceed_the_budget_and_ends_it(site):
    site.spend(1, event=OTHER, count=1)
    with closing(site.open()) as ledger:
        ledger.record(2, Counter({Event(1.0, 0.5): 9}))
        ledger._add_anchor()
    keep(site.ledger, 0)
    assert reconcile(site.ledger, site.anchors).epsilon > EPSILON
    with pytest.raises(BudgetError):
        site.spend(3)


def test_an_anchor_follows_its_charge(site, monkeypatch):
    """A crash between the two leaves a ledger that is ahead of its anchor."""
    site.spend(1)
    monkeypatch.setattr(Anchors, "append", lambda *_: (_ for _ in ()).throw(FileError("the disk is full")))
    with pytest.raises(FileError):
        site.spend(2)
    monkeypatch.undo()
    assert site.events == Counter({STEP: 20})
    site.spend(3)
    assert [anchor.charges for anchor in Anchors(site.anchors).all()] == [1, 3]


def test_a_request_without_a_cost_leaves_no_anchor(site):
    site.spend(1)
    with closing(site.open()) as ledger:
        ledger.spend(2, Counter(), planned=PLANNED)
    site.spend(3)
    assert [anchor.charges for anchor in Anchors(site.anchors).all()] == [1, 2]


def test_an_incomplete_line_of_anchors_is_dropped(site):
    site.spend(1, 2)
    whole = site.anchors.read_bytes()
    site.anchors.write_bytes(whole + whole[:50])
    assert Anchors(site.anchors).last().charges == 2
    site.spend(3)
    assert [anchor.charges for anchor in Anchors(site.anchors).all()] == [1, 2, 3]


@pytest.mark.parametrize("change", [{"charges": 0}, {"start": -1}, {"chain": 3}, {"more": 1}, {"events": [[0.1, 1.0]]}])
def test_a_line_that_is_not_an_anchor_is_refused(site, change):
    site.spend(1)
    values = json.loads(site.anchors.read_text())
    site.anchors.write_text(json.dumps({**values, **change}) + "\n")
    with pytest.raises(FileError, match="not an anchor"):
        site.spend(2)


def test_another_budget_is_refused_with_anchors_too(site):
    site.spend(1)
    with pytest.raises(LedgerError, match="another plan"), closing(ClientLedger(DELTA, 9.0, site.ledger)):
        pass
    with (
        pytest.raises(LedgerError, match="another plan"),
        closing(ClientLedger(DELTA, 9.0, site.ledger, anchors=site.anchors)),
    ):
        pass


def test_opening_reads_what_is_after_the_anchor_alone(site, monkeypatch):
    site.spend(1)
    with closing(site.open()) as ledger:
        for number in range(2000):
            ledger.record(number, Counter({STEP: 1}))
        ledger._add_anchor()
    read = []
    parse = json.loads
    monkeypatch.setattr("coterie.privacy.ledger_lines.json.loads", lambda text, **_: read.append(text) or parse(text))
    site.spend(2)
    assert len(read) < 10


def test_backups_and_restores(site, tmp_path):
    copy, elsewhere = tmp_path / "copy.jsonl", Site(tmp_path / "elsewhere")
    site.spend(1, 2)
    assert backup(site.ledger, copy) == 2
    site.spend(3)
    with pytest.raises(LedgerError, match=f"{site.ledger} has charges that {copy} lacks"):
        restore(copy, site.ledger)
    assert backup(site.ledger, copy) == 3
    keep(site.ledger, 1)
    assert restore(copy, site.ledger) == 3
    site.spend(4)
    site.ledger.unlink()
    with pytest.raises(LedgerError, match="lacks charge 4"):
        site.spend(5)  # leaves an empty file
    assert restore(copy, site.ledger) == 3
    with pytest.raises(LedgerError, match="lacks charge 4"):
        site.spend(5)  # the copy is older than the last charge
    reconcile(site.ledger, site.anchors)
    site.spend(5)
    assert site.events == Counter({STEP: 50})
    elsewhere.spend(1)
    with pytest.raises(LedgerError, match="of another client"):
        backup(elsewhere.ledger, copy)


def test_spending_states_what_the_filter_counts(site):
    site.spend(1, 2)
    stated = spending(site.ledger)
    assert (stated.charges, stated.epsilon_budget, stated.delta) == (2, EPSILON, DELTA)
    assert 0 < stated.epsilon < EPSILON
    assert f"epsilon {stated.epsilon:.4g} of 8 spent" in str(stated)
    site.spend(3, event=OTHER, count=1)
    assert stated.epsilon < spending(site.ledger).epsilon <= EPSILON * (1 + 1e-9)
    site.ledger.write_text('{"ledger": 1, "plan": {}}\n')
    with pytest.raises(LedgerError, match="is not the budget file of a client"):
        spending(site.ledger)


def test_a_full_disk_is_explained_to_a_client_s_owner(site, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    site.spend(1)
    with closing(site.open()) as ledger, monkeypatch.context() as patched:
        patched.setattr("coterie.privacy.ledger_lines.os.fsync", full)
        with pytest.raises(LedgerError, match="No space left on device; nothing was released") as caught:
            ledger.spend(2, Counter({STEP: 10}), planned=PLANNED)
    assert "--resume" not in str(caught.value)
    site.spend(2)
    assert site.events == Counter({STEP: 20})
