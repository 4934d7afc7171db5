"""Every strategy x rebalancing x mechanism on a toy with a known answer, through the local engine."""

import math

import numpy as np
import pytest
from flwr.app import ConfigRecord
from toys import UP

from coterie.engine import LocalGrid
from coterie.messages import Layout, pack_models, read_reply, unpack_models
from coterie.privacy import PLANS, NoPrivacy, Streams
from coterie.server.metrics import summarise
from coterie.strategies import IFCA, STRATEGIES, FedAvg, Reseeding, StrategyError

LAYOUT = Layout(("output.weight", "output.bias"), ((2, 1), (2,)))
LR, CLIENTS = 0.2, 8
CONFIG = {
    "dataset": "toys:pixels",
    "data-dir": "",
    "features": "none",
    "model": "linear",
    "shift": "label-shift",
    "clients": CLIENTS,
    "samples-per-client": 5,
    "partition-seed": 0,
    "local-epochs": 1,
    "batch-size": 5,
    "lr": LR,
    "device": "cpu",
    "seed": 0,
}
APART = np.stack([UP, -UP]).astype(np.float32)  # cluster 0 suits group 0, cluster 1 group 1


def plan(mechanism, k, rounds=1, noise=0.05, **numbers):
    shape = {"clients": CLIENTS, "num_clusters": k, "sampling_rate": 1.0, "rounds": rounds}
    if mechanism == "none":
        return NoPrivacy(**shape, **numbers)
    privacy = {"clip_norm": 0.1, "epsilon": math.inf, "delta": 1e-5, "noise_multiplier": noise, "identifier_share": 0.5}
    return PLANS[mechanism](**shape, **privacy, **numbers)


class Watched(LocalGrid):
    """Keeps the training messages that went by."""

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        replies = list(super().send_and_receive(messages, timeout=timeout))
        if messages and messages[0].metadata.message_type == "train":
            self.sent, self.replies = messages, replies
        return replies


def train(method, plan, start, groups="4:4", rounds=1, **options):
    options = {"evaluate_metrics_aggr_fn": summarise, "streams": Streams(0), "wait": 0.0} | options
    strategy = method(plan, **options)
    grid = Watched(CLIENTS)
    config = ConfigRecord({**CONFIG, "groups": groups})
    result = strategy.start(grid, pack_models(np.asarray(start, np.float32), LAYOUT), rounds, train_config=config)
    models, _ = unpack_models(result.arrays)
    return models, result, grid, strategy


def towards(confidence):
    """One step of a client of group 0 whose model already gives its label this probability."""
    return 2 * LR * (1 - confidence) * UP


def tolerance(plan, k):
    """Five standard deviations of the noise in one coordinate of a model; exact without privacy."""
    sensitivity = {"none": 0.0, "joint": 1.0}.get(plan.mechanism, 2.0)
    noise = plan.noise_multiplier_updates * sensitivity * (plan.clip_norm if plan.private else 0.0)
    return 5 * noise / (CLIENTS / k) + 1e-6


TOYS = [(name, mechanism, minimum) for name in STRATEGIES for mechanism in PLANS for minimum in (0, 2)]


@pytest.mark.parametrize(("name", "mechanism", "minimum"), TOYS)
def test_one_round_by_hand(name, mechanism, minimum):
    method = STRATEGIES[name]
    k = 2 if method.clustered else 1
    setting = plan(mechanism, k, rebalance_min=minimum)
    if minimum and not method.clustered:
        with pytest.raises(StrategyError, match="no clusters to rebalance"):
            method(setting)
        return
    start = APART if k == 2 else np.zeros((1, 4))
    models, result, _, _ = train(method, setting, start)
    if k == 1:  # as many clients pull up as down
        expected = np.zeros((1, 4))
    else:
        # Logits differ by 2 (weight and bias), so a client's own label has probability sigmoid(2).
        step = towards(1 / (1 + math.exp(-2)))
        if setting.private:
            step = step * min(1.0, 0.1 * (1 - 1e-6) / np.linalg.norm(step))
        expected = np.stack([UP + step, -UP - step])
    np.testing.assert_allclose(models, expected, atol=tolerance(setting, k))
    accuracy = result.evaluate_metrics_clientapp[1]
    if k == 2:
        assert accuracy["accuracy"] == 1.0
        assert accuracy["groups_found"] == 2
        assert accuracy["clustering_accuracy"] == 1.0
    else:
        assert accuracy["accuracy"] == 0.5
    if mechanism != "joint" and k == 2:  # exact, or noise that flips no label
        assert result.train_metrics_clientapp[1]["histogram"] == [4.0, 4.0]


@pytest.mark.parametrize("mechanism", ["rr-slot", "paper"])
def test_the_server_moves_members_from_large_to_small_clusters(mechanism):
    start = 0.1 * APART  # a step does not overshoot
    setting = plan(mechanism, 2, noise=0.01, rebalance_min=4)
    models, result, grid, _ = train(IFCA, setting, start, groups="6:2")
    assert result.train_metrics_clientapp[1]["histogram"] == [6.0, 2.0]
    assert "redraw" not in grid.sent[0].content["config"]
    # Two of the six pull cluster 1 their way: 4 x up / 4, and (2 x down + 2 x up) / 4 = 0; all clipped alike.
    step = 0.1 * (1 - 1e-6) * UP
    np.testing.assert_allclose(models - start, np.stack([step, 0 * step]), atol=tolerance(setting, 2))


def test_fedavg_takes_the_mean_and_no_weights():
    models, result, _, _ = train(FedAvg, plan("none", 1), np.zeros((1, 4)), groups="6:2")
    np.testing.assert_allclose(models[0], (6 - 2) / 8 * LR * UP, atol=1e-6)
    assert result.evaluate_metrics_clientapp[1]["accuracy"] == 6 / 8


def test_the_fixed_divisor_is_public_and_the_exact_one_is_the_number_of_members():
    step = towards(1 / (1 + math.exp(-2)))
    fixed, *_ = train(IFCA, plan("none", 2, divisor="fixed"), APART, groups="6:2")
    np.testing.assert_allclose(fixed, np.stack([UP + 6 / 4 * step, -UP - 2 / 4 * step]), atol=1e-6)
    exact, *_ = train(IFCA, plan("none", 2), APART, groups="6:2")
    np.testing.assert_allclose(exact, np.stack([UP + step, -UP - step]), atol=1e-6)


def test_rebalancing_redraws_surplus_by_the_released_histogram():
    models, result, grid, _ = train(IFCA, plan("none", 2, rounds=2, rebalance_min=4), APART, groups="6:2", rounds=2)
    # Round 1 released (6, 2); the mean is 4 = B, so cluster 0 gives 2 of its 6 to cluster 1.
    sent = grid.sent[0].content["config"]["redraw"]
    np.testing.assert_allclose(sent, [2 / 3, 1 / 3, 0, 1], atol=1e-12)
    replies = [
        read_reply(r.content, client_id=i, round=2, num_clusters=2, layout=LAYOUT) for i, r in enumerate(grid.replies)
    ]
    moved = [r for r in replies if r.label != r.redrawn_label]
    assert 0 < len(moved) < 6
    assert all((r.label, r.redrawn_label) == (0, 1) for r in moved)
    # A moved update is computed at its own model and added to the new cluster; divisors are max(B, 1, h R) = 4.
    before, _ = unpack_models(grid.sent[0].content["models"])
    expected = before.astype(float)
    for reply in replies:
        expected[reply.redrawn_label] += reply.update / 4
    np.testing.assert_allclose(models, expected, atol=1e-6)
    assert result.train_metrics_clientapp[2]["histogram"] == [6.0, 2.0]


@pytest.mark.parametrize(("reseeding", "accuracy", "found"), [(None, 0.5, 0), (Reseeding(every=1), 1.0, 2)])
def test_reseeding_ends_a_collapse(reseeding, accuracy, found):
    # Two equal, undecided models: everyone picks the first, and its pulls up and down cancel for ever.
    _, result, *_ = train(IFCA, plan("none", 2, rounds=4), [[1, 1, 0, 0]] * 2, rounds=4, reseeding=reseeding)
    last = result.evaluate_metrics_clientapp[4]
    assert (last["accuracy"], last["groups_found"]) == (accuracy, found)


def test_one_initial_model_becomes_k_different_ones():
    strategy = IFCA(plan("none", 3), streams=Streams(0))
    models = strategy.initial_models(np.arange(6, dtype=np.float32).reshape(1, 6))
    assert models.shape == (3, 6)
    np.testing.assert_array_equal(models[0], np.arange(6))
    assert len(np.unique(models, axis=0)) == 3
    with pytest.raises(StrategyError, match="2 initial models for 3 clusters"):
        strategy.initial_models(np.zeros((2, 6), np.float32))


def test_more_rounds_than_planned_are_refused():
    with pytest.raises(StrategyError, match="5 rounds asked for"):
        train(FedAvg, plan("none", 1, rounds=2), np.zeros((1, 4)), rounds=5)


def test_an_absent_client_changes_neither_divisor_nor_noise():
    """A client that is not there is a null: the update of the others is divided by the configured number."""

    class Smaller(Watched):
        def get_node_ids(self):
            return range(1, CLIENTS)

    p = plan("joint", 1, noise=0.051)
    strategy = FedAvg(p, streams=Streams(0), wait=0.0, evaluate_every=0)
    config = ConfigRecord({**CONFIG, "groups": "1"})
    models, _ = unpack_models(
        strategy.start(
            Smaller(CLIENTS), pack_models(np.zeros((1, 4), np.float32), LAYOUT), 1, train_config=config
        ).arrays
    )
    clipped = 0.1 * (1 - 1e-6)
    noise = p.noise_multiplier_updates * 0.1 / CLIENTS  # in the direction of UP, whose norm is 1
    # 7/8 and 7/7 lie 14 standard deviations apart.
    assert models[0] @ UP == pytest.approx(7 / 8 * clipped, abs=5 * noise)
