"""Charges of long runs: their costs are bounds, no budget is wasted, and few of them are composed."""

from itertools import pairwise

import pytest
from kit.tables import for_rows

from coterie.privacy import Event, Joint, Ledger, accounting, calibrate, epsilon
from coterie.privacy.check import check
from coterie.privacy.ledger import BudgetError

EVERY, DELTA = accounting._EVERY_COUNT, 1e-5


def costs_of(charges, epsilon=1e6, accountant="pld"):
    """The cost that a ledger states after each charge."""
    ledger = Ledger(DELTA, epsilon, accountant=accountant)
    return [ledger.charge_round(number, event, count).epsilon for number, (event, count) in enumerate(charges, 1)]


@for_rows("accountant", ["pld", "rdp"])
@for_rows("count", [1, 3, 97])
def test_the_cost_of_many_charges_is_that_of_at_most_a_sixtieth_more(accountant, count):
    """Every charge is accounted for again, which takes seconds."""
    event, number = Event(0.3, 4.0), 2 * EVERY // count + 2
    stated = costs_of([(event, count)] * number, accountant=accountant)
    assert stated == sorted(stated)
    for charges in {1, EVERY // count, EVERY // count + 1, number // 2, number - 1, number}:
        charged = charges * count
        exact = epsilon({event: charged}, DELTA, accountant)
        most = epsilon({event: charged if charged <= EVERY else charged + charged // 60}, DELTA, accountant)
        assert exact * (1 - 1e-9) <= stated[charges - 1] <= most * (1 + 1e-9)


def test_of_two_kinds_of_events_each_counts_at_least_itself():
    first, later = Event(1.0, 9.0), Event(0.3, 4.0)
    stated = costs_of([(first, 1), *[(later, 1)] * (EVERY + 70), (first, 1)])
    exact = epsilon({first: 2, later: EVERY + 70}, DELTA)
    assert exact <= stated[-1] <= 1.02 * exact
    assert stated[-2] < stated[-1]


@pytest.mark.parametrize("slots", [0, 7])
def test_a_calibrated_budget_pays_for_all_its_rounds_and_no_more(slots):
    rounds = EVERY + 45
    noise = calibrate(2.0, DELTA, 0.3, rounds)
    turns = [Event(0.3, noise)] if not slots else [Event(0.3, noise, slot=i, slots=slots) for i in range(slots)]
    charges = [(turns[i % len(turns)], 1) for i in range(rounds * len(turns))]
    stated = costs_of(charges, epsilon=2.0)
    assert stated[-1] == pytest.approx(epsilon({Event(0.3, noise): rounds}, DELTA), rel=1e-9)
    with pytest.raises(BudgetError):
        costs_of([*charges, *[(turns[0], 1)] * 3], epsilon=2.0)


def test_the_number_of_compositions_grows_with_the_logarithm_of_the_charges(monkeypatch):
    calls, real = [], accounting.composed
    monkeypatch.setattr(accounting, "composed", lambda *given: calls.append(1) or real(*given))
    numbers = []
    for rounds in (2 * EVERY, 4 * EVERY, 8 * EVERY):
        accounting._composed_before.cache_clear()
        calls.clear()
        costs_of([(Event(1.0, 20.0), 1)] * rounds, accountant="rdp")
        numbers.append(len(calls))
    by_rdp_and_pld = 2
    assert [after - before for before, after in pairwise(numbers)] == [64 * by_rdp_and_pld] * 2


@pytest.mark.slow
@pytest.mark.parametrize("every", [EVERY, 10**9], ids=["now", "by a version that composed every charge"])
def test_a_ledger_of_many_charges_is_checked(monkeypatch, every, tmp_path):
    rounds = EVERY + 14
    plan = Joint.calibrated(
        clients=100, num_clusters=1, sampling_rate=0.2, rounds=rounds, clip_norm=0.5, epsilon=4.0, delta=DELTA
    )
    with monkeypatch.context() as patched:
        patched.setattr(accounting, "_EVERY_COUNT", every)
        ledger = Ledger(DELTA, 4.0, about={"plan": plan.terms()})
        for number, event in enumerate(plan.planned().elements(), 1):
            ledger.charge_round(number, event)
    assert check(ledger.header, ledger.charges, None) == []
    ledger.charges[EVERY + 4]["epsilon"] *= 0.97
    assert [problem for problem in check(ledger.header, ledger.charges, None) if "records epsilon" in problem]
