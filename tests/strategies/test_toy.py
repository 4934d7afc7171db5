"""Every strategy x rebalancing x mechanism on a toy with a known answer, through the local engine."""

import math
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import ConfigRecord
from kit.toys import UP, strategy_of

import coterie.audit.printed  # noqa: F401 - adds the mechanism of the paper
from coterie.client.handlers import _assign
from coterie.client.state import KeptStates, StateFile
from coterie.datasets import assign_groups
from coterie.datasets.settings import DataSettings
from coterie.engine.in_process import LocalGrid
from coterie.models.settings import TrainingSettings
from coterie.privacy import PLANS, NoPrivacy, Streams
from coterie.server.metrics import summarise
from coterie.strategies import IFCA, Aggregator, FedAvg, FedCAM, FedPer, FedProx, FeSEM, Local, Reseeding, StrategyError
from coterie.strategies.registry import STRATEGIES
from coterie.wire import ClientConfig
from coterie.wire.messages import Layout, pack_models, read_reply, unpack_models

LAYOUT = Layout(("output.weight", "output.bias"), ((2, 1), (2,)))
LR, CLIENTS = 0.2, 8
CONFIG = ClientConfig(
    data=DataSettings(dataset="kit.toys:pixels", clients=CLIENTS, shift="label-shift", samples_per_client=5),
    training=TrainingSettings(model="linear", local_epochs=1, batch_size=5, lr=LR, device="cpu"),
    seed=0,
).to_record()
APART = np.stack([UP, -UP]).astype(np.float32)  # cluster 0 suits group 0, cluster 1 group 1


def plan(mechanism, k, rounds=1, noise=0.049, **numbers):
    """Noise so small that it costs infinity: nothing is composed."""
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


def train(method, plan, start, groups="4:4", rounds=1, layout=LAYOUT, config=CONFIG, **options):
    options = {"evaluate_metrics_aggr_fn": summarise, "streams": Streams(0), "registration_timeout": 0.0} | options
    strategy = strategy_of(method, plan, **options)
    grid = Watched(CLIENTS)
    config = ConfigRecord({**config, "groups": groups})
    result = strategy.start(grid, pack_models(np.asarray(start, np.float32), layout), rounds, train_config=config)
    return unpack_models(result.arrays)[0], result, grid, strategy


def towards(confidence):
    """One step of a client of group 0 whose model already gives its label this probability."""
    return 2 * LR * (1 - confidence) * UP


def tolerance(plan, k):
    """Five standard deviations of the noise in one coordinate of a model; exact without privacy."""
    sensitivity = {"none": 0.0, "joint": 1.0, "banded": 1.0, "secure": math.sqrt(8 / 5)}.get(plan.mechanism, 2.0)
    noise = plan.noise_multiplier_updates * sensitivity * (plan.clip_norm if plan.private else 0.0)
    return 5 * noise / (CLIENTS / k) + 1e-6


def clipped(plan, update):
    bound = 0.1 * (1 - 1e-6) if plan.private else math.inf
    return update * min(1.0, bound / np.linalg.norm(update))


def one_model(plan):
    """As many clients pull up as down; FedProx's term vanishes at the start."""
    return LAYOUT, np.zeros((1, 4)), np.zeros((1, 4)), 0.5


def own_heads(plan):
    """The heads move apart; the body, which they multiply, has no gradient while they are zero."""
    return Layout(("body.weight",), ((1, 1),)), np.ones((1, 1)), np.ones((1, 1)), 1.0


def alone(plan):
    """Each network moves its client's way, and nothing travels."""
    return Layout((), ()), np.zeros((1, 0)), np.zeros((1, 0)), 1.0


def least_loss(plan):
    """Logits differ by 2 (weight and bias), so a client's own label has probability sigmoid(2)."""
    step = clipped(plan, towards(1 / (1 + math.exp(-2))))
    return LAYOUT, APART, np.stack([UP + step, -UP - step]), 1.0


def nearest_centre(plan):
    """All centres are equal: everyone stays where the first coin put it."""
    labels = np.array([np.random.default_rng([0, 1, i]).integers(2) for i in range(CLIENTS)])
    signs = np.where(np.arange(CLIENTS) % 2 == 0, 1, -1)
    step = clipped(plan, towards(0.5))
    exact = plan.mechanism in ("none", "paper")
    expected = [signs[labels == j].sum() / ((labels == j).sum() if exact else CLIENTS / 2) * step for j in (0, 1)]
    return LAYOUT, np.zeros((2, 4)), np.stack(expected), None


def sum_of_two(plan):
    """Both parts have the same gradient and are clipped together; the global pulls cancel."""
    step = clipped(plan, np.tile(towards(1 / (1 + math.exp(-2))), 2))
    layout = Layout(tuple(f"{part}.{n}" for part in ("global", "cluster") for n in LAYOUT.names), LAYOUT.shapes * 2)
    start = np.hstack([np.zeros((2, 4)), APART])
    return layout, start, start + np.stack([step, -step]) * np.repeat([0, 1], 4), 1.0


BY_HAND = {
    "fedavg": one_model,
    "fedprox": one_model,
    "fedper": own_heads,
    "ifca": least_loss,
    "rr-cluster": least_loss,
    "fesem": nearest_centre,
    "fedcam": sum_of_two,
    "local": alone,
}
OTHERS = [
    name
    for name, method in STRATEGIES.items()
    if ("record" in method.units and "client" not in method.units) or method.produces == "labels"
]
TOYS = [
    (name, mechanism, minimum)
    for name in STRATEGIES
    if name not in OTHERS  # test_records.py, test_one_shot.py
    for mechanism in PLANS
    if mechanism != "paper-uncharged"
    for minimum in (0, 2)
]


@pytest.mark.parametrize(("name", "mechanism", "minimum"), TOYS)
def test_one_round_by_hand(name, mechanism, minimum, tmp_path):
    method = STRATEGIES[name]
    k = 2 if method.clustered else 1
    setting = plan(mechanism, k, rebalance_min=minimum)
    refusal = (
        "supports privacy-unit none"
        if setting.unit not in method.units
        else "requires rebalance-min"
        if method.rebalances and not minimum
        else "use mechanism joint"
        if method.memory and mechanism == "rr-slot"
        else "to rebalance|support rebalancing"
        if minimum and not method.clustered
        else None
    )
    if refusal:
        with pytest.raises(StrategyError, match=refusal):
            method(setting)
        return
    layout, start, expected, right = BY_HAND[name](setting)
    config = {**CONFIG, "clients-dir": str(tmp_path)}
    if name in ("fedper", "local"):
        config["model"] = "kit.toys:chain"
    models, result, grid, _ = train(method, setting, start, layout=layout, config=config)
    np.testing.assert_allclose(models, expected, atol=tolerance(setting, k))
    accuracy = result.evaluate_metrics_clientapp[1]
    if right is not None:
        assert accuracy["accuracy"] == right
    if k == 2 and right:
        assert accuracy["groups_found"] == 2
        assert accuracy["clustering_accuracy"] == 1.0
        assert accuracy["confusion"] == [4, 0, 0, 4]
    if mechanism not in ("joint", "banded", "secure") and k == 2 and right:  # exact, or noise that flips no label
        assert result.train_metrics_clientapp[1]["histogram"] == [4.0, 4.0]
    if mechanism in ("joint", "banded", "secure"):
        assert all("redraw" not in m.content["config"] for m in grid.sent)  # there is no histogram yet


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedper", "ifca", "rr-cluster", "fedcam"])
@pytest.mark.parametrize("aggregator", ["median", "trimmed-mean"])
def test_where_a_cluster_s_clients_agree_every_aggregator_moves_models_as_the_mean_does(name, aggregator, tmp_path):
    """Members of a cluster are alike, and over all clients the opposite pulls cancel."""
    method = STRATEGIES[name]
    k = 2 if method.clustered else 1
    setting = plan("none", k, rebalance_min=1 if method.clustered else 0)
    layout, start, expected, right = BY_HAND[name](setting)
    config = {**CONFIG, "clients-dir": str(tmp_path), "model": "kit.toys:chain" if name == "fedper" else "linear"}
    robust = Aggregator(aggregator)
    models, result, _, _ = train(method, setting, start, layout=layout, config=config, aggregator=robust)
    np.testing.assert_allclose(models, expected, atol=1e-6)
    assert result.evaluate_metrics_clientapp[1]["accuracy"] == right
    assert result.train_metrics_clientapp[1]["histogram"] == [CLIENTS / k] * k


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


def test_fedprox_draws_every_step_but_the_first_towards_the_start():
    config = {**CONFIG, "local-epochs": 2}
    models, *_ = train(FedProx, plan("none", 1), np.zeros((1, 4)), groups="1", config=config, proximal_mu=0.5)
    first = towards(0.5)
    second = towards(1 / (1 + math.exp(-2 * LR))) - LR * 0.5 * first
    np.testing.assert_allclose(models[0], first + second, atol=1e-6)
    free, *_ = train(FedProx, plan("none", 1), np.zeros((1, 4)), groups="1", config=config, proximal_mu=0.0)
    average, *_ = train(FedAvg, plan("none", 1), np.zeros((1, 4)), groups="1", config=config)
    np.testing.assert_array_equal(free, average)
    with pytest.raises(ValueError, match=r"fedprox\.proximal-mu = nan: must be a finite number at least 0"):
        strategy_of(FedProx, plan("none", 1), proximal_mu=math.nan)


def test_fedper_s_heads_stay_with_their_clients_and_survive_a_restart(tmp_path):
    config = {**CONFIG, "model": "kit.toys:chain", "clients-dir": str(tmp_path)}
    layout, start, *_ = own_heads(None)
    first, *_ = train(FedPer, plan("none", 1), start, layout=layout, config=config)
    models, result, grid, _ = train(FedPer, plan("none", 1), first, layout=layout, config=config)  # a new process
    for message in grid.sent:
        assert list(message.content["models"]) == ["0/body.weight"]
    for reply in grid.replies:
        assert list(reply.content["update"]) == ["body.weight"]
        assert set(reply.content["reply"]) == {"client-id", "round", "label", "redrawn-label"}
    # The head is (-LR/2, LR/2) or its opposite: in both groups dL/dbody = -LR (1 - p).
    body = 1 + LR * LR * (1 - 1 / (1 + math.exp(-LR)))
    np.testing.assert_allclose(models, [[body]], atol=1e-6)
    assert result.evaluate_metrics_clientapp[1]["accuracy"] == 1.0
    assert all(KeptStates(tmp_path).of(client).read() for client in range(CLIENTS))
    strategy = FedPer(plan("none", 1))
    assert strategy.initial_parameters(lambda: {"a.weight": 1, "a.bias": 2, "b.weight": 3}) == {
        "a.weight": 1,
        "a.bias": 2,
    }
    with pytest.raises(StrategyError, match="the network has only output"):
        strategy.initial_parameters(lambda: {"output.weight": 1, "output.bias": 2})


def test_local_clients_train_alone_from_one_start_and_go_on_after_a_restart(tmp_path):
    """Six clients of one group have no weight against two of the other, since nobody meets."""
    config = {**CONFIG, "model": "kit.toys:chain", "clients-dir": str(tmp_path)}
    nothing = np.zeros((1, 0))

    def networks():
        return np.stack([KeptStates(tmp_path).of(i).read()["own"] for i in range(CLIENTS)])

    signs = 1 - 2 * assign_groups(CLIENTS, (6, 2))[:, None]
    settings = {"groups": "6:2", "layout": Layout((), ()), "config": config}
    _, result, _, strategy = train(Local, plan("none", 1), nothing, **settings)
    # One step from body 1 and head 0: each logit of the head moves by LR / 2; the body has no gradient yet.
    np.testing.assert_allclose(networks(), np.hstack([np.ones((8, 1)), signs * [[-LR / 2, LR / 2]]]), atol=1e-6)
    assert result.evaluate_metrics_clientapp[1]["accuracy"] == 1.0
    assert strategy.statistics.accepted == CLIENTS
    _, _, grid, _ = train(Local, plan("none", 1), nothing, **settings)  # a new process
    wrong = 1 - 1 / (1 + math.exp(-LR))  # probability of the other label
    body, head = 1 + LR * LR * wrong, LR / 2 + LR * wrong
    np.testing.assert_allclose(networks(), np.hstack([np.full((8, 1), body), signs * [[-head, head]]]), atol=1e-6)
    for message, answer in zip(grid.sent, grid.replies, strict=True):
        assert list(message.content["models"]) == list(answer.content["update"]) == []


def test_a_local_client_that_never_took_part_has_the_public_first_network(tmp_path):
    """The chain's head is zero at first: it calls everything 0, which is right for group 1."""
    config = {**CONFIG, "model": "kit.toys:chain", "clients-dir": str(tmp_path)}
    setting = NoPrivacy(clients=CLIENTS, num_clusters=1, sampling_rate=1e-9, rounds=1)
    _, result, *_ = train(Local, setting, np.zeros((1, 0)), layout=Layout((), ()), config=config)
    assert result.evaluate_metrics_clientapp[1]["group_accuracy"] == [0.0, 1.0]
    assert list(tmp_path.iterdir()) == []


def test_fesem_joins_the_nearest_centre_and_remembers(tmp_path):
    config = {**CONFIG, "clients-dir": str(tmp_path), "local-epochs": 3}
    centres = 0.1 * APART
    for client in range(CLIENTS):  # everyone was assigned to the other group's centre
        StateFile(tmp_path, client).write({"label": np.array([1 - client % 2])})

    class FromHere(FeSEM):
        def initial_models(self, models):
            return models

    models, result, grid, _ = train(FromHere, plan("none", 2), centres, config=config)
    # From -0.1 UP three steps of almost 0.1 UP each lead across the middle; there the new centres are.
    at = -0.1
    for _ in range(3):
        at += towards(1 / (1 + math.exp(-2 * at))) @ UP / (UP @ UP)
    assert at > 0.1
    np.testing.assert_allclose(models, np.stack([at * UP, -at * UP]), atol=1e-6)
    assert [r.content["reply"]["label"] for r in grid.replies] == [0, 1] * 4
    assert result.evaluate_metrics_clientapp[1]["clustering_accuracy"] == 1.0
    assert [int(KeptStates(tmp_path).of(i).read()["label"][0]) for i in range(CLIENTS)] == [0, 1] * 4


def test_under_clipping_fesem_s_way_to_the_nearest_centre_is_within_the_clip():
    centres = np.array([[0.0], [10.0]], np.float32)
    labels, ways = _assign(centres, np.array([0, 0, 1]), np.array([[6.0], [4.0], [-7.0]], np.float32), math.inf)
    np.testing.assert_array_equal(labels, [1, 0, 0])
    np.testing.assert_allclose(ways, [[-4], [4], [3]])
    labels, ways = _assign(centres, np.array([0, 0, 1]), np.array([[60.0], [4.0], [-7.0]], np.float32), 4.5)
    np.testing.assert_array_equal(labels, [0, 0, 1])  # 4.5 is nearer to 0, 5.5 to 10
    np.testing.assert_allclose(ways, [[4.5], [4], [-4.5]], rtol=1e-5)


def test_fedcam_s_global_part_is_one_sum_over_all(tmp_path):
    layout, start, *_ = sum_of_two(plan("none", 2))
    models, *_ = train(FedCAM, plan("none", 2), start, groups="6:2", layout=layout)
    step = towards(1 / (1 + math.exp(-2)))
    pull = (6 - 2) / 8 * step
    expected = np.stack([np.hstack([pull, UP + step]), np.hstack([pull, -UP - step])])
    np.testing.assert_allclose(models, expected, atol=1e-6)
    noisy, *_ = train(FedCAM, plan("joint", 2, noise=5.0), start, layout=layout)
    np.testing.assert_array_equal(noisy[0, :4], noisy[1, :4])  # noised once
    assert abs(noisy[0, :4]).max() > 0.01
    different = FedCAM(plan("none", 2), streams=Streams(0))
    different.run.state = replace(different.run.state, layout=layout)
    initial = different.initial_models(np.arange(16, dtype=np.float32).reshape(2, 8))
    np.testing.assert_array_equal(initial, [[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 12, 13, 14, 15]])
    reseeded, _, moves = Reseeding()(initial, np.array([8.0, 0.0]), np.random.default_rng(0), shared=4)
    assert moves == [(0, 1)]
    np.testing.assert_array_equal(reseeded[:, :4], initial[:, :4])
    np.testing.assert_allclose(reseeded[:, 4:].mean(axis=0), initial[0, 4:])


def test_a_moved_client_trains_the_model_that_it_is_assigned_to():
    setting = plan("none", 2, rounds=2, rebalance_min=4)
    _, _, grid, _ = train(IFCA, setting, APART, groups="6:2", rounds=2, rebalance_train="assigned")
    before, _ = unpack_models(grid.sent[0].content["models"])
    moved, redraw = 0, np.reshape(grid.sent[0].content["config"]["redraw"], (2, 2))
    for i, answer in enumerate(grid.replies):
        reply = read_reply(answer.content, client_id=i, round=2, num_clusters=2, layout=LAYOUT, redraw=redraw)
        confidence = 1 / (1 + math.exp(-2 * (before[reply.redrawn_label] @ UP)))
        sign = 1 if reply.label == 0 else -1
        np.testing.assert_allclose(reply.update, sign * towards(confidence if sign > 0 else 1 - confidence), atol=1e-6)
        moved += reply.label != reply.redrawn_label
    assert 0 < moved < 6
    for method, mechanism in ((IFCA, "rr-slot"), (FeSEM, "joint")):
        with pytest.raises(StrategyError, match="before training"):
            method(plan(mechanism, 2, rebalance_min=2), rebalance_train="assigned")


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
        read_reply(r.content, client_id=i, round=2, num_clusters=2, layout=LAYOUT, redraw=np.reshape(sent, (2, 2)))
        for i, r in enumerate(grid.replies)
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
    with pytest.raises(StrategyError, match="num_rounds = 5 exceeds the 2 rounds"):
        train(FedAvg, plan("none", 1, rounds=2), np.zeros((1, 4)), rounds=5)
