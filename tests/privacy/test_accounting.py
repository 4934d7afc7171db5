"""Costs and noise against a reference table, closed forms, and each other."""

import csv
import math
from pathlib import Path

import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from coterie.privacy import NO_PRIVACY, Event, LiveAccountant, PrivacyError, calibrate, epsilon

TABLE = Path(__file__).resolve().parents[3] / "shared" / "reference" / "noise_multipliers.csv"


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_noise_multipliers_of_the_reference_table(accountant):
    if not TABLE.exists():
        pytest.skip(f"no reference table at {TABLE}")
    with TABLE.open() as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    assert len(rows) == 36
    for row in rows:
        target, delta, rounds = float(row["epsilon"]), float(row["delta"]), int(row["T"])
        noise = calibrate(target, delta, 0.1, rounds, accountant=accountant)
        assert noise == pytest.approx(float(row[f"{accountant}_poisson"]), rel=0.01), row


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


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_calibration_lands_on_the_private_side(accountant):
    noise = calibrate(3.0, 1e-5, 0.2, 40, accountant=accountant)
    assert epsilon([Event(0.2, noise)] * 40, 1e-5, accountant) <= 3.0
    assert epsilon([Event(0.2, 0.99 * noise)] * 40, 1e-5, accountant) > 3.0


def test_more_noise_costs_less_and_more_rounds_or_clients_cost_more():
    base = epsilon([Event(0.1, 1.0)] * 20, 1e-5)
    assert epsilon([Event(0.1, 1.1)] * 20, 1e-5) < base
    assert epsilon([Event(0.11, 1.0)] * 20, 1e-5) > base
    assert epsilon([Event(0.1, 1.0)] * 21, 1e-5) > base
    assert epsilon([Event(0.1, 1.0)] * 20, 1e-4) < base


def test_what_was_spent_raises_the_noise_of_what_remains():
    spent = [Event(0.2, 1.3)] * 15  # 3.75 of 4
    noise = calibrate(4.0, 1e-5, 0.2, 20, spent=spent)
    assert noise > calibrate(4.0, 1e-5, 0.2, 35)
    assert epsilon([*spent, *[Event(0.2, noise)] * 20], 1e-5) <= 4.0
    with pytest.raises(PrivacyError, match="after what was already spent"):
        calibrate(1.0, 1e-5, 0.2, 1, spent=spent)


def test_round_by_round_is_all_at_once_in_any_order():
    events = [Event(0.1, 1.0), Event(0.2, 2.0)] * 5
    live = LiveAccountant()
    assert live.epsilon(1e-5) == 0.0
    for event in reversed(events):
        live.compose(event)
    assert live.epsilon(1e-5) == pytest.approx(epsilon(events, 1e-5), rel=1e-6)


def test_looking_ahead_changes_nothing():
    live = LiveAccountant([Event(0.1, 1.0)] * 3)
    before = live.epsilon(1e-5)
    assert live.with_rounds(Event(0.1, 1.0), 5).epsilon(1e-5) > before
    assert live.epsilon(1e-5) == before


def test_a_round_without_noise_is_infinite_for_good():
    for accountant in ("pld", "rdp"):
        assert epsilon([Event(0.1, 1.0), NO_PRIVACY, Event(0.1, 50.0)], 1e-5, accountant) == math.inf


@pytest.mark.parametrize("target", [0.0, -1.0, math.nan, math.inf])
def test_epsilon_must_be_positive_and_finite(target):
    with pytest.raises(PrivacyError, match="epsilon must be positive"):
        calibrate(target, 1e-5, 0.1, 10)


@pytest.mark.parametrize("delta", [0.0, 1.0, -0.1, math.nan])
def test_delta_must_lie_inside(delta):
    with pytest.raises(PrivacyError, match="delta must lie strictly between"):
        epsilon([Event(0.1, 1.0)], delta)
    with pytest.raises(PrivacyError, match="delta must lie strictly between"):
        calibrate(1.0, delta, 0.1, 10)


@pytest.mark.parametrize("rate", [0.0, 1.1, -0.5, math.nan])
def test_the_sampling_rate_is_a_probability(rate):
    with pytest.raises(PrivacyError, match="sampling rate"):
        Event(rate, 1.0)


@pytest.mark.parametrize("noise", [-1.0, math.nan, math.inf])
def test_noise_is_finite_and_not_negative(noise):
    with pytest.raises(PrivacyError, match="noise multiplier"):
        Event(0.1, noise)


def test_other_errors():
    with pytest.raises(PrivacyError, match="rounds must be at least 1"):
        calibrate(1.0, 1e-5, 0.1, 0)
    with pytest.raises(PrivacyError, match="unknown accountant 'moments'; there are pld, rdp"):
        epsilon([Event(0.1, 1.0)], 1e-5, "moments")
