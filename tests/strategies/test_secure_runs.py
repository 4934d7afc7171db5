"""Runs under the secure mechanism: rounds with too few clients, methods that it supports, and what it refuses."""

import math

import numpy as np
import pytest
from kit.toy_grids import Kept
from test_base import CLIENTS, UP, Stub, start

from coterie.fields.settings import ConfigError
from coterie.privacy import PrivacyError, Secure
from coterie.server import RunConfig
from coterie.strategies import FedAvg, StrategyError


def secure(rounds=2, noise=0.0501, k=1, **numbers):
    shape = {"clients": CLIENTS, "num_clusters": k, "sampling_rate": 1.0, "rounds": rounds, "clip_norm": 0.5}
    privacy = {"epsilon": math.inf, "delta": 1e-5, "noise_multiplier": noise, "dropout": 0.25}
    return Secure(**shape | privacy | numbers)


def test_a_mean_does_not_depend_on_how_many_stay():
    def silent(client, content):
        return [] if client < 2 else [content]

    whole, strategy = start(Stub(), secure(rounds=1), rounds=1)
    part, other = start(Stub(silent), secure(rounds=1), rounds=1)
    np.testing.assert_allclose(whole, np.sign(UP) * 0.25, atol=0.1)  # clipped: norm 0.5, four coordinates
    np.testing.assert_allclose(part, np.sign(UP) * 0.25, atol=0.1)
    assert strategy.ledger.spent() == other.ledger.spent()


def test_a_round_with_too_few_clients_is_charged_and_skipped(caplog):
    def silent(client, content):
        number = content["reply"]["round"]
        return [] if number == 2 and client < 3 else [content]

    kept = Kept()
    moved, strategy = start(Stub(silent), secure(rounds=3), rounds=3, recorder=kept)
    np.testing.assert_allclose(moved, 2 * np.sign(UP) * 0.25, atol=0.2)
    np.testing.assert_array_equal(kept.states[0].models, kept.states[1].models)
    assert len(strategy.ledger.charges) == 3
    assert kept.lines[1]["notes"]["skipped"] == "5 clients are left of the 6 that mechanism secure requires"
    assert "round 2 is skipped: 5 clients are left" in caplog.text
    assert "notes" not in kept.lines[2]


def test_a_private_evaluation_with_too_few_clients_is_charged_and_skipped():
    class Half(Stub):
        def send_and_receive(self, messages, **options):
            kept = [m for m in messages if m.metadata.message_type == "train" or m.metadata.dst_node_id > CLIENTS / 2]
            return super().send_and_receive(kept, **options)

    plan = secure(rounds=1, evaluations=1, evaluation_noise=0.1)
    kept = Kept()
    _, strategy = start(Half(), plan, rounds=1, recorder=kept, evaluate="private", evaluate_every=1)
    assert "accuracy" not in kept.lines[0]
    assert len(strategy.ledger.charges) == 2


@pytest.mark.parametrize("strategy", ["fedavg", "fedprox", "fedper", "ifca", "rr-cluster", "fesem", "fedcam"])
def test_methods_with_sums_have_plans(strategy):
    plan = RunConfig({"strategy": strategy, "mechanism": "secure"}).plan
    assert (plan.mechanism, plan.rate, plan.accountant) == ("secure", 1.0, "pld")
    assert plan.cost() <= 8


def test_the_number_of_clusters_may_be_searched_and_the_norm_adapts():
    config = RunConfig({"mechanism": "secure", "clusters": 0, "max-clusters": 8, "clip-norm": "adaptive"})
    assert config.plan.clip_share > 0
    assert config.plan.identifier_share == 0.1


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"strategy": "lcfl"}, "lcfl"),
        ({"strategy": "cfl"}, "cfl"),
        ({"aggregator": "median"}, "median"),
        ({"clients": 4, "corrupt": 3}, "a cohort of 4 clients"),
        ({"mechanism": "joint", "dropout": 0.1}, "only with secure"),
        ({"dropout": 0.4}, "dropout"),
        ({"sampling-rate": 0.005, "rounds": 80}, "exceeds the number of rounds"),
    ],
)
def test_what_it_does_not_support_is_refused_before_the_run(settings, problem):
    def prepare():
        config = RunConfig({"mechanism": "secure", **settings})
        config.strategy(config.plan)

    with pytest.raises((ConfigError, PrivacyError, StrategyError), match=problem):
        prepare()


def test_deployed_runs_evaluate_in_private():
    assert RunConfig({"mechanism": "secure"}, deployed=True).evaluation.evaluate == "private"


def test_single_updates_are_not_released():
    with pytest.raises(PrivacyError, match="noisy sums only"):
        secure().collected(4, np.arange(3))
    assert FedAvg(secure()).plan.mechanism == "secure"
