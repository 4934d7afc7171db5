"""Adaptive clipping: one more coordinate of a round's event, and a clipping norm that follows released shares only."""

import math

import numpy as np
import pytest
from kit.toy_grids import Kept
from test_base import CLIENTS, LAYOUT, UP, Stub, start

from coterie.privacy import MAX_CLIP_NORM, MIN_CLIP_NORM, Banded, Joint, PrivacyError, RRSlot, Streams, certificate
from coterie.strategies import FedAvg
from coterie.strategies.adaptive_clipping import next_norm


def adaptive(kind=Joint, rounds=1, noise=0.6, **numbers):
    shape = {"clients": CLIENTS, "num_clusters": 1, "sampling_rate": 1.0, "rounds": rounds, "clip_norm": 0.5}
    privacy = {"epsilon": math.inf, "delta": 1e-5, "noise_multiplier": noise, "clip_share": 0.5}
    return kind(**shape | privacy | numbers)


def released(plan, updates, seed=0):
    contributions = plan.contributions(2)
    for slot, update in enumerate(updates):
        contributions.add(slot, 0, 0, np.array(update))
    return plan.release(plan.ledger().charge_round(1, plan.round_event(1)), contributions, Streams(seed), 1)


def test_the_norm_moves_towards_the_quantile():
    assert next_norm(1.0, 0.5) == 1.0
    assert next_norm(1.0, 1.0) == pytest.approx(math.exp(-0.1))
    assert next_norm(2.0, 0.0) == pytest.approx(2 * math.exp(0.1))


@pytest.mark.parametrize("below", [-1e9, 1e9])
def test_noise_moves_it_no_further_than_a_true_share_could(below):
    assert next_norm(1.0, below) == next_norm(1.0, float(below > 0))
    assert next_norm(MAX_CLIP_NORM, below) <= MAX_CLIP_NORM
    assert next_norm(MIN_CLIP_NORM, below) >= MIN_CLIP_NORM


@pytest.mark.parametrize("kind", [Joint, Banded])
def test_the_released_share_counts_updates_below_the_threshold(kind):
    plan = adaptive(kind, noise=1e-6, clip_factor=0.5)  # the threshold is 1
    updates = [[0.3, 0.4], [0.6, 0.7], [0.9, 0.9], [3.0, 4.0], [math.nan, 0.0], [math.inf, 0.0]]
    assert released(plan, updates).below == pytest.approx(0.5 + (2 * 0.5 - 4 * 0.5) / CLIENTS, abs=1e-4)
    assert released(plan, []).below == pytest.approx(0.5, abs=1e-4)  # absent clients move nothing


def test_a_client_moves_the_whole_release_by_at_most_the_claim():
    """With common noise: sums, sizes and norms together, for updates below and above both bounds."""
    plan = adaptive(noise=1.5, identifier_share=0.2, clip_share=0.3, clip_factor=0.25)
    none = released(plan, [])
    for scale in (0.4, 0.6, 1.9, 2.1, 1e30):
        one = released(plan, [np.array([0.6, 0.8]) * scale])
        moved = np.linalg.norm(one.sums - none.sums) / (plan.clip_norm * plan.noise_multiplier_updates)
        counted = abs(one.histogram[0] - none.histogram[0]) / plan.noise_multiplier_counts
        short = abs(one.below - none.below) * CLIENTS / plan.split.norms
        shift = math.sqrt(moved**2 + counted**2 + short**2)
        assert shift <= 1 / plan.noise_multiplier * (1 + 1e-9)
        assert short == pytest.approx(0.5 / plan.split.norms)
    assert shift == pytest.approx(1 / plan.noise_multiplier, rel=1e-5)


@pytest.mark.slow
def test_its_noise_is_the_planned_one():
    plan = adaptive(noise=2.0)
    shares = [released(plan, [], seed).below for seed in range(2000)]
    assert np.std(shares) == pytest.approx(plan.split.norms / CLIENTS, rel=4 / math.sqrt(2 * 2000))


def test_the_cost_of_a_round_does_not_depend_on_it():
    assert adaptive().event() == adaptive(clip_share=0.0).event()
    assert adaptive().noise_multiplier_updates == pytest.approx(0.6 / math.sqrt(0.5))


@pytest.mark.parametrize("kind", [Joint, Banded])
def test_a_run_clips_by_the_norm_of_the_round_before(kind):
    recorder = Kept()
    plan = adaptive(kind, rounds=6, noise=1e-6)
    moved, strategy = start(Stub(), plan, rounds=6, recorder=recorder)
    length = float(np.linalg.norm(UP))
    expected, norms = 0.5, []
    for _ in range(6):
        norms.append(expected)
        expected *= math.exp(-0.2 * ((length < expected) - 0.5))
    assert [line["clip_norm"] for line in recorder.lines] == pytest.approx(norms, rel=1e-3)
    np.testing.assert_allclose(moved, UP / length * sum(min(length, norm) for norm in norms), rtol=1e-3)
    assert strategy.plan.clip_norm == pytest.approx(expected, rel=1e-3)


def test_sums_of_workers_count_as_replies_do():
    plan = adaptive(noise=1e-6, clip_factor=0.5)
    rows = np.random.default_rng(0).standard_normal((20, 3)).astype(np.float32)
    one, other = plan.contributions(3), plan.contributions(3)
    for slot, row in enumerate(rows):
        one.add(slot, 0, 0, row)
    part = other.partial()
    part.add_rows(np.zeros(20, np.int64), np.zeros(20, np.int64), rows)
    other.merge(part)
    assert one.below.tolist() == other.below.tolist() != [0.0]


@pytest.mark.parametrize(
    ("numbers", "complaint"),
    [
        ({"clip_share": -0.1}, "clip share must be at least 0"),
        ({"clip_share": math.nan}, "clip share must be at least 0"),
        ({"clip_share": 0.9, "identifier_share": 0.2}, "below 1 - identifier share = 0.8"),
        ({"kind": RRSlot, "identifier_share": 0.2}, "mechanism rr-slot does not support an adaptive clipping norm"),
    ],
)
def test_what_cannot_work_is_refused(numbers, complaint):
    with pytest.raises(PrivacyError, match=complaint):
        adaptive(**numbers)


def test_the_certificate_names_the_norms():
    document = certificate({"plan": adaptive(noise=2.0).terms(), "seed": None}, [])
    assert any("clipping norms" in line for line in document["covers"])
    assert document["public_inputs"]["clip_share"] == 0.5


def test_a_method_without_adaptive_clipping_keeps_its_norm():
    recorder = Kept()
    _, strategy = start(Stub(), adaptive(rounds=2, clip_share=0.0), FedAvg, rounds=2, recorder=recorder)
    assert "clip_norm" not in recorder.lines[0]
    assert strategy.plan.clip_norm == 0.5
    assert strategy.layout == LAYOUT
