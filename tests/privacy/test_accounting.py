"""Costs and noise against a reference table, closed forms, and each other."""

import csv
import math
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from kit.tables import for_rows
from scipy.optimize import brentq
from scipy.stats import binom, norm

from coterie.audit.comparisons import TheoremAccountant
from coterie.privacy import NO_PRIVACY, Banded, Event, Joint, PrivacyError, calibrate, certificate, composed, epsilon
from coterie.privacy.accountants import MIN_NOISE, VisibleAccountant, _symmetrised_pld
from coterie.privacy.accounting import min_noise
from coterie.privacy.discrete_gaussians import gaussian_delta

TABLE = Path(__file__).resolve().parents[3] / "shared" / "reference" / "noise_multipliers.csv"


COLUMNS = {
    "paper_thm42": ("theorem-4.2", "fixed"),
    "paper_thm42_canonne": ("theorem-4.2-canonne", "fixed"),
    "rdp_wor": ("rdp", "fixed"),
    "pld_wor_replace": ("pld", "fixed"),
    "rdp_poisson": ("rdp", "poisson"),
    "pld_poisson": ("pld", "poisson"),
}


def table():
    if not TABLE.exists():
        pytest.skip(f"no reference table at {TABLE}")
    with TABLE.open() as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    assert len(rows) == 36
    for row in rows:
        yield float(row["epsilon"]), float(row["delta"]), int(row["T"]), row


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.slow
def test_noise_multipliers_of_the_reference_table(column):
    """The least noise lies within 1 % of every value: 1 % more is enough, 1 % less is not."""
    accountant, sampler = COLUMNS[column]
    for target, delta, rounds, row in table():
        reference = float(row[column])
        if reference == 40:  # the table's word for unreachable
            with pytest.raises(PrivacyError, match=r"is at least \d+\.\d+ however large the noise"):
                calibrate(target, delta, 0.1, rounds, sampler=sampler, accountant=accountant)
            continue
        enough, short = (
            epsilon({Event(0.1, factor * reference, sampler): rounds}, delta, accountant) for factor in (1.01, 0.99)
        )
        assert enough <= target < short, row


@pytest.mark.parametrize("column", COLUMNS)
def test_calibration_finds_a_value_of_the_table(column):
    accountant, sampler = COLUMNS[column]
    noise = calibrate(4.0, 1e-3, 0.1, 100, sampler=sampler, accountant=accountant)
    reference = next(row[column] for *key, row in table() if key == [4.0, 1e-3, 100])
    assert noise == pytest.approx(float(reference), rel=0.01)


@pytest.mark.parametrize(("rounds", "floor"), [(50, 1.77), (100, 2.23), (200, 2.77), (300, 3.12)])
def test_theorem_4_2_has_a_floor_at_any_noise(rounds, floor):
    assert TheoremAccountant.floor(0.1, rounds, 1e-3) == pytest.approx(floor, abs=0.006)
    assert epsilon({Event(0.1, 1e4, "fixed"): rounds}, 1e-3, "theorem-4.2") == pytest.approx(floor, abs=0.006)


def test_the_symmetrised_pld_is_the_replace_one_closed_form_for_one_round():
    """delta of one round is q delta_Gauss(log(1 + (e^eps - 1) / q)); the grid may only add to epsilon."""
    for q, noise in ((0.1, 0.8), (0.5, 2.0), (1.0, 1.0)):
        event = Event(q, noise, "fixed")
        for delta in (1e-3, 1e-6):

            def excess(eps, q=q, noise=noise, delta=delta):
                return q * gaussian_delta(1 / noise, math.log1p(math.expm1(eps) / q)) - delta

            exact = brentq(excess, 0, 100)
            assert exact - 1e-9 <= epsilon([event], delta) <= exact + 2e-3


def test_fixed_size_costs_more_than_poisson_since_it_covers_more():
    for rounds in (1, 100):
        poisson, fixed = (epsilon({Event(0.1, 1.2, sampler): rounds}, 1e-5) for sampler in ("poisson", "fixed"))
        assert fixed >= poisson - 1e-3


def gaussian_epsilon(mu, delta):
    """Epsilon of the Gaussian mechanism with mean shift mu (Balle and Wang 2018, theorem 8)."""

    def excess(eps):
        return norm.cdf(mu / 2 - eps / mu) - math.exp(eps) * norm.cdf(-mu / 2 - eps / mu) - delta

    return brentq(excess, 0, 200)


@pytest.mark.parametrize(("noise", "rounds"), [(1.0, 1), (2.0, 10), (8.0, 100)])
def test_full_participation_is_the_closed_form(noise, rounds):
    exact = gaussian_epsilon(math.sqrt(rounds) / noise, 1e-5)
    assert exact <= epsilon([Event(1.0, noise)] * rounds, 1e-5) <= exact + 0.01
    assert epsilon([Event(1.0, noise)] * rounds, 1e-5, "rdp") >= exact


@pytest.mark.parametrize("sampler", ["poisson", "fixed"])
@pytest.mark.parametrize(
    ("noise", "rounds", "delta"),
    [(100, 1, 1e-5), (300, 2, 1e-6), (1000, 100, 1e-5), (3000, 1000, 1e-6), (1e4, 10_000, 1e-5), (30, 9, 0.01)],
)
def test_small_costs_at_full_participation_are_within_one_percent_of_the_closed_form(noise, rounds, delta, sampler):
    exact = gaussian_epsilon(math.sqrt(rounds) / noise, delta)
    assert exact >= 0.01
    assert exact <= epsilon({Event(1.0, noise, sampler): rounds}, delta) <= 1.01 * exact


@pytest.mark.parametrize(
    ("rate", "noise", "rounds", "delta"),
    [(1e-3, 1.0, 1000, 1e-6), (0.01, 5.0, 100, 1e-5), (1e-4, 1.0, 10_000, 1e-5), (0.2, 20.0, 10, 1e-5)],
)
@pytest.mark.slow
def test_small_rates_are_within_one_percent_of_a_much_finer_grid(rate, noise, rounds, delta):
    poisson = epsilon({Event(rate, noise): rounds}, delta)
    fine = {"sampling_prob": rate, "value_discretization_interval": rate / noise / 32}
    exact = pld.from_gaussian_mechanism(noise, **fine).self_compose(rounds).get_epsilon_for_delta(delta)
    assert exact >= 0.01
    assert exact * (1 - 1e-4) <= poisson <= 1.01 * exact


@pytest.mark.parametrize(("rate", "noise", "rounds"), [(0.01, 5.0, 100), (1e-3, 2.0, 1000), (0.2, 20.0, 10)])
def test_small_fixed_cohorts_are_within_one_percent_of_a_much_finer_grid(rate, noise, rounds):
    event = Event(rate, noise, "fixed")
    exact = _symmetrised_pld(event, rate / noise / 32).self_compose(rounds).get_epsilon_for_delta(1e-5)
    assert exact >= 0.01
    assert exact * (1 - 1e-4) <= epsilon({event: rounds}, 1e-5) <= 1.01 * exact


@pytest.mark.parametrize("accountant", ["pld", "rdp", "theorem-4.2"])
def test_a_cost_is_that_of_all_events_so_far(accountant):
    event, delta = Event(0.3, 2.0, "fixed"), 1e-5
    live = composed({event: 1}, accountant)
    assert live.epsilon(delta) == epsilon({event: 1}, delta, accountant)
    further = live.with_rounds(event, 2)
    assert further.epsilon(delta) == pytest.approx(epsilon({event: 3}, delta, accountant), rel=1e-9)
    assert further.epsilon(1e-3) < further.epsilon(delta)
    assert live.epsilon(delta) == epsilon({event: 1}, delta, accountant)


@pytest.mark.parametrize("order", [1, -1])
def test_events_of_different_grids_compose_on_the_one_that_suits_all_of_them(order):
    """Gaussian shifts add up in squares, so the closed form knows the truth of every mixture."""
    for mixture in ({10.0: 1, 1000.0: 1000}, {2.0: 5, 2000.0: 20_000}, {50.0: 3, 500.0: 100, 5000.0: 1000}):
        live, shift = composed([]), 0.0
        for noise, rounds in sorted(mixture.items(), reverse=order < 0):
            live.compose(Event(1.0, noise), rounds)
            shift += rounds / noise**2
        exact = gaussian_epsilon(math.sqrt(shift), 1e-5)
        assert exact <= live.epsilon(1e-5) <= 1.01 * exact
        assert live.epsilon(1e-5) == pytest.approx(epsilon({Event(1.0, z): n for z, n in mixture.items()}, 1e-5), 1e-9)


@pytest.mark.parametrize(
    ("noise", "rounds", "deltas"),
    [(0.3, 90, (1e-5,)), (0.3, 100, (1e-3, 1e-5, 1e-8)), (0.3, 110, (1e-5,)), (0.1, 30, (1e-5,))],
    ids=str,
)
def test_costs_above_600_are_the_closed_form(noise, rounds, deltas):
    """A double holds exp(-loss) up to a loss of 745, of which digits are lost from 708.

    Each search for epsilon evaluates a distribution of a million losses 33 times.
    """
    secret, visible = composed({Event(1.0, noise): rounds}), VisibleAccountant()
    visible.compose(Event(1.0, noise), rounds)
    for delta in deltas:
        exact = brentq(lambda eps, delta=delta: gaussian_delta(math.sqrt(rounds) / noise, eps) - delta, 0, 1e5)
        assert 590 < exact < 2000
        assert exact <= secret.epsilon(delta) <= exact * (1 + 1e-7)
        assert visible.epsilon(delta) == pytest.approx(exact, rel=1e-7)


@pytest.mark.parametrize(("rounds", "delta"), [(100_000, 1e-8), (1_000_000, 1e-10)])
def test_the_rounding_of_very_many_rounds_never_makes_them_cheaper(rounds, delta):
    exact = gaussian_epsilon(math.sqrt(rounds) / 1e4, delta)
    assert epsilon({Event(1.0, 1e4): rounds}, delta) >= exact


@pytest.mark.parametrize(
    ("q", "z", "rounds", "delta"),
    [
        (1.0, 1e4, 100_000, 0.9e-11),  # a Fourier transform may lose 1e-16 of the mass of every event
        (0.00033, 4.0, 10_000, 1.13e-18),
        pytest.param(1e-6, 1e4, 10_000_000, 1e-9, marks=pytest.mark.slow),  # losses below the finest grid
        (0.01, 1.0, 10_000, 1e-12),
        (0.1, 0.7, 100, 1e-30),
        (0.5, 3.0, 1, 1e-17),
    ],
)
def test_at_a_tiny_delta_the_smaller_bound_counts(q, z, rounds, delta):
    events = {Event(q, z): rounds}
    assert epsilon(events, delta) == epsilon(events, delta, "rdp") < math.inf


@pytest.mark.parametrize("delta", [1e-14, 1e-12, 1e-10, 1e-8, 1e-6, 1e-3])
@pytest.mark.parametrize("sampler", ["poisson", "fixed"])
def test_no_valid_bound_is_smaller_than_that_of_pld(sampler, delta):
    for q, z, rounds in ((1.0, 5.0, 50), (0.1, 1.0, 1000), (0.01, 0.6, 5000)):
        events = {Event(q, z, sampler): rounds}
        assert epsilon(events, delta) <= epsilon(events, delta, "rdp")


def test_at_a_tiny_delta_visible_participation_is_never_cheaper_than_secret():
    visible = VisibleAccountant()
    visible.compose(Event(0.1, 4.0), 10_000)
    assert visible.epsilon(1e-18) >= epsilon({Event(0.1, 4.0): 10_000}, 1e-18)


@pytest.mark.parametrize("delta", [1e-18, 1e-30])
def test_noise_is_calibrated_at_a_tiny_delta(delta):
    noise = calibrate(8.0, delta, 0.1, 100)
    assert epsilon({Event(0.1, noise): 100}, delta) <= 8.0 < epsilon({Event(0.1, noise / 1.01): 100}, delta)


def test_the_certificate_names_the_bound_that_counts():
    plan = Joint.calibrated(
        clients=100, num_clusters=2, sampling_rate=0.1, rounds=20, clip_norm=1.0, epsilon=8.0, delta=1e-18
    )
    assert certificate(plan.ledger().header, [])["accountant"].endswith(", RDP")
    assert certificate(replace(plan, delta=1e-5).ledger().header, [])["accountant"].endswith(", PLD")


@pytest.mark.parametrize("mechanism", [Joint, Banded])
def test_events_of_many_rounds_are_counted_at_once(mechanism):
    numbers = {"clients": 50, "num_clusters": 2, "sampling_rate": 0.25, "rounds": 9, "clip_norm": 1.0}
    plan = mechanism(**numbers, epsilon=1.0, delta=1e-4, noise_multiplier=1.0)
    for first, last in ((1, 9), (3, 8), (9, 9), (5, 4)):
        one_by_one = Counter(plan.round_event(number) for number in range(first, last + 1))
        assert plan.events_of(first, last) == one_by_one


def bisected(cost, target, low, high, tolerance):
    """The plain search within a factor of two."""
    while high / low > 1 + tolerance:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if cost(middle) <= target else (middle, high)
    return high


COSTS = {
    "a power": lambda z: 3 / z**1.7,
    "an exponential": lambda z: math.expm1(1 / z**2) if z > 0.1 else math.inf,
    "steps": lambda z: math.floor(40 / z),
    "infinite below 0.9": lambda z: 2 / z if z >= 0.9 else math.inf,
    "flat, then zero": lambda z: 5.0 if z < 0.8 else 0.0,
}


@pytest.mark.parametrize("tolerance", [1e-3, 1e-6, 0.2])
@pytest.mark.parametrize("target", [0.02, 0.9, 1.0, 4.999, 5.0, 30.0])
@pytest.mark.parametrize("name", COSTS)
def test_interpolation_finds_what_bisection_finds(name, target, tolerance):
    asked = []

    def cost(noise):
        asked.append(noise)
        return COSTS[name](noise)

    found = min_noise(cost, target, tolerance)
    assert COSTS[name](found) <= target
    if found > MIN_NOISE * 2:
        high = 2.0 ** math.ceil(math.log2(found))
        assert found == bisected(COSTS[name], target, high / 2, high, tolerance)
    assert len(asked) == len(set(asked))


def test_what_was_spent_raises_the_noise_of_what_remains():
    spent = [Event(0.2, 1.3)] * 15  # 3.75 of 4
    noise = calibrate(4.0, 1e-5, 0.2, 20, spent=spent)
    assert noise > calibrate(4.0, 1e-5, 0.2, 35)
    assert epsilon([*spent, *[Event(0.2, noise)] * 20], 1e-5) <= 4.0
    with pytest.raises(PrivacyError, match="after what was already spent"):
        calibrate(1.0, 1e-5, 0.2, 1, spent=spent)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_fixed_cohorts_cost_more_as_they_grow_up_to_everybody(accountant):
    costs = [epsilon({Event(q, 2.0, "fixed"): 30}, 1e-5, accountant) for q in (0.1, 0.4, 0.5, 0.9, 1.0)]
    assert costs == sorted(costs)


@pytest.mark.parametrize("sampler", ["poisson", "fixed"])
def test_who_sees_participation_learns_what_a_binomial_number_of_whole_releases_tells(sampler):
    visible = VisibleAccountant()
    visible.compose(Event(0.1, 1.1002, sampler), 100)
    times = np.arange(1, 101)

    def excess(eps):
        return sum(binom.pmf(n, 100, 0.1) * gaussian_delta(math.sqrt(n) / 1.1002, eps) for n in times) - 1e-3

    assert visible.epsilon(1e-3) == pytest.approx(brentq(excess, 1, 60), abs=0.01)
    assert visible.epsilon(1e-3) == pytest.approx(14.6, abs=0.05)


@pytest.mark.parametrize("sampler", ["poisson", "fixed"])
def test_small_costs_with_participation_visible_are_within_one_percent_of_the_binomial_mixture(sampler):
    visible = VisibleAccountant()
    visible.compose(Event(0.1, 200.0, sampler), 60)
    visible.compose(Event(0.2, 200.0, sampler), 40)
    chances = np.convolve(binom.pmf(np.arange(61), 60, 0.1), binom.pmf(np.arange(41), 40, 0.2))

    def excess(eps):
        return sum(p * gaussian_delta(math.sqrt(n) / 200, eps) for n, p in enumerate(chances) if n) - 1e-5

    exact = brentq(excess, 0.01, 1)
    assert exact <= visible.epsilon(1e-5) <= 1.01 * exact


@for_rows("accountant", ["pld", "rdp"])
def test_nothing_costs_nothing_and_a_round_without_noise_is_infinite_for_good(accountant):
    assert epsilon([], 1e-5, accountant) == 0.0
    assert epsilon([Event(0.1, 1.0), NO_PRIVACY, Event(0.1, 50.0)], 1e-5, accountant) == math.inf
    assert min_noise(lambda noise: 2.0, 1.0) is None


EVENT = Event(0.1, 1.0)


@for_rows(
    ("call", "complaint"),
    [
        *((partial(calibrate, wrong, 1e-5, 0.1, 10), "epsilon must be") for wrong in (0.0, -1.0, math.nan, math.inf)),
        *((partial(epsilon, [EVENT], wrong), "delta must lie strictly") for wrong in (0.0, 1.0, -0.1, math.nan)),
        *((partial(calibrate, 1.0, wrong, 0.1, 10), "delta must lie strictly") for wrong in (0.0, 1.0, -0.1, math.nan)),
        *((partial(Event, wrong, 1.0), "sampling rate") for wrong in (0.0, 1.1, -0.5, math.nan)),
        *((partial(Event, 0.1, wrong), "noise multiplier") for wrong in (-1.0, math.nan, math.inf)),
        *((partial(Event, 1.0, 1.0, "poisson", slot, 5), "slot must lie in") for slot in (-1, 5)),
        (partial(Event, 0.1, 1.0, "shuffled"), "sampler must be poisson or fixed"),
        (partial(calibrate, 1.0, 1e-5, 0.1, 0), "rounds must be at least 1"),
        (partial(epsilon, {EVENT: -3}, 1e-5), "count must be at least 0, not -3"),
        (partial(epsilon, [EVENT], 1e-5, "moments"), "unknown accountant 'moments'; available: pld, rdp"),
        (partial(epsilon, [EVENT], 1e-5, "theorem-4.2"), "supports fixed sampling, not poisson"),
        (partial(epsilon, [EVENT, Event(0.1, 1.2, "fixed")], 1e-5), "different adjacencies"),
    ],
)
def test_what_has_no_cost_is_refused(call, complaint):
    with pytest.raises(PrivacyError, match=complaint):
        call()
