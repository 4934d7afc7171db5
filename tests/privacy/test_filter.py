"""The privacy filter: what a ledger accepts when a server chooses each request by earlier replies."""

import contextlib
import json
import math
from bisect import bisect_left

import numpy as np
import pytest
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism
from kit.tables import for_rows

from coterie.audit import adaptive
from coterie.audit.adaptive import FIRST_REQUESTS, Budget, random_strategy, two_continuations, worst_strategy
from coterie.privacy import BudgetError, ClientLedger, Event, LedgerError, PrivacyError, RecordPlan, calibrate, epsilon
from coterie.privacy.accountants import renyi_divergence
from coterie.privacy.accounting import delta_of
from coterie.privacy.discrete_gaussians import gaussian_delta
from coterie.privacy.filter import PINNED_SHARE, Filter, is_within

DELTA = 1e-5
BUDGET = Budget(2.0, DELTA)
FULL, SAMPLED, SMALL = Event(1.0, 20.0), Event(0.1, 1.5), Event(0.002, 0.6)


def ledger(path=None, budget=2.0, delta=DELTA):
    return contextlib.closing(ClientLedger(delta, budget, path))


# ---- adaptive servers -------------------------------------------------------------------------------------


def test_a_sum_of_losses_does_not_bound_a_server_that_chooses_by_the_first_reply():
    """Both continuations fit the budget; chosen by the loss of the first reply, they cost delta(2) = 1.6e-5."""
    assert two_continuations(BUDGET) > 1.6 * DELTA


def test_the_ledger_refuses_one_of_the_two_continuations():
    first = {FULL: 60}
    assert sum(BUDGET.accepts([first], each) for each in ({FULL: 40}, {SMALL: 199})) <= 1


@pytest.mark.parametrize("first", FIRST_REQUESTS)
def test_servers_that_choose_the_worst_request_at_every_loss(first):
    found = worst_strategy(BUDGET, [first])
    assert 0.3 * DELTA < found <= DELTA  # the attack uses most of what the ledger allows


def test_random_adaptive_servers():
    rng = np.random.default_rng(0)
    assert 0 < max(random_strategy(BUDGET, rng) for _ in range(5)) <= DELTA


@pytest.mark.slow
@pytest.mark.parametrize("first", FIRST_REQUESTS)
def test_servers_that_choose_twice(first):
    assert worst_strategy(BUDGET, [first], stages=2) <= DELTA


def test_the_exact_computation_agrees_with_the_closed_form_and_with_pld():
    excess = adaptive._excess(2.0)
    for request, expected in (
        ({Event(1.0, 2.0): 1}, float(gaussian_delta(0.5, 2.0))),
        ({Event(1.0, 4.0): 4}, float(gaussian_delta(0.5, 2.0))),
        ({Event(0.1, 1.0): 30}, delta_of({Event(0.1, 1.0): 30}, 2.0)),
        ({Event(0.01, 0.5): 100}, delta_of({Event(0.01, 0.5): 100}, 2.0)),
    ):
        found = max(adaptive._at_start(excess, [request], each) for each in ("add", "remove"))
        assert found == pytest.approx(expected, rel=3e-3)


@pytest.mark.parametrize(("event", "count"), [(Event(0.15, 7.0), 550), (Event(0.02, 2.7), 3300)])
def test_the_sum_of_hundreds_of_events_agrees_with_pld_on_a_fine_grid(event, count):
    excess = adaptive._excess(2.0)
    found = max(adaptive._at_start(excess, [{event: count}], each) for each in ("add", "remove"))
    one = from_gaussian_mechanism(
        event.noise_multiplier, sampling_prob=event.sampling_rate, value_discretization_interval=1e-4
    )
    assert found == pytest.approx(one.self_compose(count).get_delta_for_epsilon(2.0), rel=5e-4)


# ---- what is accepted -------------------------------------------------------------------------------------


def test_all_events_of_a_plan_that_fills_the_budget_are_accepted_and_nothing_else():
    plan = RecordPlan.calibrated(num_examples=130, batch_size=13, rounds=7, local_epochs=3, epsilon=3.0, delta=1e-4)
    part, planned = plan.part(), plan.planned()
    with ledger(budget=3.0, delta=1e-4) as own:
        for number in range(1, 8):
            own.spend(number, part, planned=planned)
        for more in (part, {SMALL: 1}, {FULL: 1}):
            with pytest.raises(BudgetError, match="not one of the events that the first request pinned"):
                own.spend(8, more, planned=planned)
        assert own.events == planned


def test_the_first_request_pins_and_later_ones_cannot_change_that(tmp_path):
    path = tmp_path / "ledger.jsonl"
    with ledger(path) as own:
        own.spend(1, {SAMPLED: 8})
    lines = path.read_text().splitlines()
    with ledger(path) as own:
        own.spend(2, {SAMPLED: 4}, planned={SAMPLED: 4, SMALL: 100})
    later = path.read_text().splitlines()
    assert later[: len(lines)] == lines
    assert ["pinned" in json.loads(line) for line in later] == [False, True, False]


def test_a_request_of_several_events_states_what_is_pinned_once(tmp_path):
    path = tmp_path / "ledger.jsonl"
    with ledger(path) as own:
        own.spend(1, {SAMPLED: 2, SMALL: 3})
    assert ["pinned" in json.loads(line) for line in path.read_text().splitlines()] == [False, True, False]


@pytest.mark.parametrize("kind", [SAMPLED, SMALL, Event(0.03, 1.0)])
def test_repeated_requests_of_one_kind_cost_at_most_two_percent_of_epsilon(kind):
    first = {kind: 2}
    most = 2 + BUDGET.most([first], kind)
    exact = most + bisect_left(range(most, 2 * most), True, key=lambda n: epsilon({kind: n}, DELTA) > 2.0) - 1
    assert epsilon({kind: most}, DELTA) > 0.98 * 2.0 or most >= exact - 1


def test_requests_of_other_kinds_are_accepted_by_their_divergence_at_one_order():
    found = Filter.pin({SAMPLED: 8}, 2.0, DELTA)
    other = Event(0.3, 4.0)
    most = max(n for n in range(200) if found.accepts({SAMPLED: 8, other: n}))
    assert most > 3
    rho = 8 * renyi_divergence(SAMPLED, found.order) + (most + 1) * renyi_divergence(other, found.order)
    left = DELTA - found.pinned_delta
    cost = rho + math.log1p(-1 / found.order) - math.log(left * found.order) / (found.order - 1)
    assert cost > 2.0
    assert found.epsilon_of({SAMPLED: 8, other: most + 1}) == pytest.approx(cost)


def test_what_is_pinned_fits_its_share_of_delta_and_both_parts_add_up_to_delta():
    found = Filter.pin({SAMPLED: 8}, 2.0, DELTA)
    assert found.pinned_delta == pytest.approx(delta_of(found.pinned, 2.0), rel=1e-6)
    assert 0.5 * DELTA < found.pinned_delta <= PINNED_SHARE * DELTA
    event = Event(0.1, calibrate(2.0, DELTA, 0.1, 30))
    whole = Filter.pin({event: 8}, 2.0, DELTA, planned={event: 30})
    assert (whole.pinned, whole.accepts({event: 31})) == ({event: 30}, False)
    assert PINNED_SHARE * DELTA < whole.pinned_delta <= DELTA


def test_a_plan_beyond_the_budget_or_without_the_request_pins_the_request_alone():
    found = Filter.pin({SAMPLED: 8}, 2.0, DELTA, planned={SAMPLED: 800})
    assert found == Filter.pin({SAMPLED: 8}, 2.0, DELTA)
    assert found == Filter.pin({SAMPLED: 8}, 2.0, DELTA, planned={SMALL: 9})
    assert Filter.pin({SAMPLED: 800}, 2.0, DELTA) is None


def test_a_small_request_is_pinned_hundreds_of_thousands_of_times_without_a_composition_by_pld(monkeypatch):
    compositions = []
    monkeypatch.setattr("coterie.privacy.accountants.PldAccountant._compose", lambda *args: compositions.append(args))
    event = Event(0.002, 2.5)
    found = Filter.pin({event: 64}, 2.0, DELTA)
    assert found.pinned[event] > 200_000
    assert found.pinned_delta <= PINNED_SHARE * DELTA
    assert not compositions


@for_rows(
    ("events", "within"),
    [
        ({SAMPLED: 5}, True),
        ({SAMPLED: 6}, False),
        ({Event(0.1, 1.6): 1}, False),
        ({Event(1.0, 10.0): 3}, True),  # squared shifts: 3 / 100 = 12 / 400
        ({Event(1.0, 10.0): 2, FULL: 4}, True),
        ({Event(1.0, 10.0): 2, FULL: 5}, False),
        ({Event(1.0, 20.0, "fixed"): 1}, False),
        ({Event(1.0, 20.0, "poisson", 0, 2): 1}, False),
        ({}, True),
    ],
)
def test_gaussians_without_sampling_are_interchangeable(events, within):
    assert is_within(events, {SAMPLED: 5, FULL: 12}) is within


def test_slots_of_other_clients_cost_a_client_nothing():
    slots = {Event(1.0, 8.0, "poisson", slot, 3): 2 for slot in range(3)}
    found = Filter.pin(slots, 2.0, DELTA)
    one = Filter.pin({Event(1.0, 8.0): 2}, 2.0, DELTA)
    assert found.pinned_delta == pytest.approx(one.pinned_delta)


def test_a_budget_without_bound_pins_nothing():
    with ledger(budget=math.inf) as own:
        own.spend(1, {Event(1.0, 0.01): 10**6})
        assert "pinned" not in own.charges[0]


@pytest.mark.parametrize(
    "entry",
    [
        {},
        {"events": [], "delta": 2.0, "order": 2.0},
        {"events": [], "delta": 0.0, "order": 2.01},
        {"events": [[0.1, 1.5, "poisson", None, 0, 0]], "delta": 0.0, "order": 2.0},
        {"events": [[0.1, 1.5, "poisson", None, 0, 1.5]], "delta": 0.0, "order": 2.0},
        {"events": [[7, 1.5, "poisson", None, 0, 1]], "delta": 0.0, "order": 2.0},
        {"events": [[0.1]], "delta": 0.0, "order": 2.0},
        {"events": 3, "delta": 0.0, "order": 2.0},
    ],
)
def test_a_malformed_entry_is_refused(entry, tmp_path):
    with pytest.raises(PrivacyError, match="pinned"):
        Filter.parse(entry, 2.0, DELTA)
    path = tmp_path / "ledger.jsonl"
    with ledger(path) as own:
        own.record(1, {SAMPLED: 1}, pinned=entry)
    with ledger(path) as own, pytest.raises(LedgerError, match="restore the ledger"):
        own.spend(2, {SAMPLED: 1})


def test_an_entry_is_what_was_pinned():
    found = Filter.pin({SAMPLED: 8, Event(1.0, 30.0, "poisson", 1, 3): 1}, 2.0, DELTA)
    assert Filter.parse(json.loads(json.dumps(found.entry())), 2.0, DELTA) == found


@for_rows("count", [1, 999, 1001, 50_000])
def test_every_event_counts_at_the_order_of_the_filter(count):
    """In closed form: the divergence of a Gaussian at order a is a / (2 z^2), and counts add up."""
    order, delta = 6.0, 1e-5
    spent = Filter(8.0, delta, {}, 0.0, order).epsilon_of({Event(1.0, 300.0): count})
    converted = math.log1p(-1 / order) - math.log(delta * order) / (order - 1)
    assert spent == pytest.approx(count * order / (2 * 300.0**2) + converted)
