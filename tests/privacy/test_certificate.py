"""The certificate says what is true, and no when it is not."""

import json

import pytest

from coterie.privacy import Event, Plan, certificate


@pytest.fixture(scope="module")
def plan():
    return Plan.joint(clients=100, num_clusters=2, sampling_rate=0.2, rounds=20, clip_norm=0.5, epsilon=4.0, delta=1e-4)


def certify(plan, events=None, seed=None):
    events = [plan.event()] * plan.rounds if events is None else events
    document = certificate(plan, events, seed=seed, diagnostics=["exact accuracies"], public={"rebalance-min": 3})
    json.dumps(document, allow_nan=False)
    return document


def test_a_run_as_planned_is_certified(plan):
    document = certify(plan)
    assert document["certified"] is True
    assert document["reasons"] == []
    assert 3.9 < document["epsilon"] <= 4.0
    assert document["epsilon_participation_visible"] > 2 * document["epsilon"]
    assert document["epsilon_rdp"] >= document["epsilon"]
    assert "exact accuracies" in document["outside"]
    assert document["public_inputs"] == {"clients": 100, "clusters": 2, "rebalance-min": 3}
    assert document["charged"] == [{"sampling_rate": 0.2, "noise_multiplier": plan.noise_multiplier, "charges": 20}]


def test_a_seed_is_for_simulation_only(plan):
    document = certify(plan, seed=0)
    assert document["certified"] is False
    assert "seed 0" in document["reasons"][0]
    assert "simulation only" in document["reasons"][0]


def test_no_privacy_says_so():
    plan = Plan.no_privacy(clients=10, num_clusters=1, sampling_rate=0.5, rounds=2)
    document = certify(plan)
    assert document["certified"] is False
    assert document["epsilon"] is None
    assert "no privacy was asked for" in document["reasons"][0]


def test_a_run_that_ended_early_is_certified_at_its_planned_rounds(plan):
    assert certify(plan, [plan.event()] * 5)["epsilon"] == pytest.approx(certify(plan)["epsilon"])


def test_charges_above_the_budget_are_not_certified(plan):
    document = certify(plan, [plan.event()] * 30)
    assert document["certified"] is False
    assert "above the budget of 4" in document["reasons"][0]


def test_wasted_and_recalibrated_charges_count(plan):
    events = [plan.event()] * 11 + [Event(0.2, 1.2 * plan.noise_multiplier)] * 10
    document = certify(plan, events)
    assert document["certified"] is True
    assert document["charges"] == 21
    assert len(document["charged"]) == 2
