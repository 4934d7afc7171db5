"""Personalisation: exact maths, what stays as it was released, and what a client says of its own model: nothing."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, RecordDict
from torch import nn

from coterie import models as networks
from coterie.client import personal
from coterie.client.answer import handle
from coterie.client.identity import Client
from coterie.client.layers import Additive
from coterie.client.personal import Head, features_of, fit_head, personalised, prior_shift
from coterie.client.scores import accuracies
from coterie.client.sgd import LocalTrainingConfig
from coterie.datasets import Shard, TestSet
from coterie.fields import PERSONAL_METHODS
from coterie.models import ModelError
from coterie.server import ConfigError, RunConfig
from coterie.server.planning import about
from coterie.server.run import check_personal
from coterie.tasks import task_of
from coterie.wire.messages import Layout, pack_models

CONFIG = RunConfig({"clients": 20, "seed": 3, "groups": "1", "shift": "none", "label-skew": "classes:2"})
TRAINING = LocalTrainingConfig(1, 8, 0.2)


@pytest.fixture(autouse=True)
def _same_networks():
    torch.manual_seed(0)


def shard(x, y):
    return Shard(0, 0, np.asarray(x, np.float32), y, TestSet(x, y))


def fitted(network, released, shards, method):
    layout = Layout.of(dict(network.named_parameters()))
    rngs = [np.random.default_rng(i) for i in range(len(shards))]
    return personalised(network, layout, released, shards, method, TRAINING, rngs, lambda: released[0]).models


def vector_of(network):
    parameters = {name: value.detach().numpy() for name, value in network.named_parameters()}
    return Layout.of(parameters).flatten(parameters)


def test_the_prior_is_the_smoothed_share_over_an_equal_one():
    shift = prior_shift(np.array([0, 0, 1]), 3, smoothing=1)
    np.testing.assert_allclose(shift, np.log(np.array([3 / 6, 2 / 6, 1 / 6]) * 3))
    np.testing.assert_allclose(prior_shift(np.array([0, 1, 2]), 3), 0, atol=1e-12)
    np.testing.assert_allclose(prior_shift(np.array([1]), 2), np.log([2 / 5 * 2, 3 / 5 * 2]))


@pytest.mark.parametrize(
    "make",
    [
        lambda: networks.build("mlp-32", (4,), 3),
        lambda: Additive(networks.build("linear", (4,), 3), networks.build("linear", (4,), 3)),
    ],
    ids=["network", "sum of networks"],
)
def test_the_prior_moves_the_bias_of_the_last_layer_alone_and_once(make):
    network = make()
    x, y = np.zeros((9, 4), np.float32), np.array([1] * 8 + [2])
    released = 0 * vector_of(network)[None]
    released[0, -3:] = 0.3, 0.0, 0.0  # class 0 for all records
    moved = fitted(network, released, [shard(x, y)], "prior") - released
    np.testing.assert_allclose(moved[0, -3:], prior_shift(y, 3), atol=1e-6)
    assert not moved[0, :-3].any()


def test_the_released_model_stays_where_the_prior_makes_more_errors():
    # the model knows already that class 0 is rare, unless the first input is 1
    network = networks.build("linear", (2,), 2)
    released = np.array([[5.0, 0.0, -3.0, 0.0, 0.0, 1.5]], np.float32)
    x = np.array([[1, 0]] * 2 + [[0, 0]] * 8, np.float32)
    y = np.array([0] * 2 + [1] * 8)
    np.testing.assert_array_equal(fitted(network, released, [shard(x, y)], "prior"), released)


def head(weight, bias):
    return Head("", np.array(weight, np.float32), np.array(bias, np.float32))


@pytest.mark.parametrize("real", [False, True])
def test_the_gradient_of_the_penalised_loss_vanishes_at_a_fitted_head(real):
    rng = np.random.default_rng(1)
    outputs = 1 if real else 3
    x, offset = rng.normal(size=(40, 4)), rng.normal(size=(40, outputs))
    y = rng.normal(size=40).astype(np.float32) if real else rng.integers(3, size=40)
    released = head(rng.normal(size=(outputs, 4)), rng.normal(size=outputs))
    ours = head(released.weight, released.bias)
    fit_head(ours, x, offset, y, 2.0)
    weight, bias = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (ours.weight, ours.bias))
    out = torch.as_tensor(x) @ weight.T + bias + torch.as_tensor(offset)
    target = torch.as_tensor(y)
    loss = ((out[:, 0] - target) ** 2).sum() if real else nn.functional.cross_entropy(out, target, reduction="sum")
    far = sum(((a - torch.as_tensor(b)) ** 2).sum() for a, b in ((weight, released.weight), (bias, released.bias)))
    gradients = torch.autograd.grad(loss + far, (weight, bias))
    assert max(float(g.abs().max()) for g in gradients) < 1e-2
    assert far > 0.01


def test_the_features_are_what_the_last_layer_gets():
    network = networks.build("cnn-tiny", (1, 8, 8), 10)
    x = np.random.default_rng(0).normal(size=(5, 1, 8, 8)).astype(np.float32)
    parameters = {name: value.detach().numpy() for name, value in network.named_parameters()}
    features, offset = features_of(network, parameters, x, "output")
    outputs = features @ parameters["output.weight"].T + parameters["output.bias"] + offset
    np.testing.assert_allclose(outputs, network(torch.as_tensor(x)).detach().numpy(), atol=1e-5)


@pytest.mark.parametrize("method", ["last-layer", "all", "prior"])
def test_released_models_stay_as_they_are_and_clients_without_records_keep_them(method):
    network = networks.build("mlp-32", (4,), 3)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 4)).astype(np.float32), np.arange(30) % 2
    x[:, 0] += 4 * y
    released = np.tile(vector_of(network), (3, 1))
    before, parameters = released.copy(), vector_of(network)
    own = fitted(network, released, [shard(x, y), shard(x[:0], y[:0]), shard(x[:1], y[:1])], method)
    np.testing.assert_array_equal(released, before)
    np.testing.assert_array_equal(vector_of(network), parameters)
    np.testing.assert_array_equal(own[1:], before[1:])
    layout = Layout.of(dict(network.named_parameters()))
    first, last = accuracies(network, layout, np.stack([before[0], own[0]]), x, y)
    assert last >= first if method == "prior" else last > first


@pytest.mark.parametrize("method", ["last-layer", "all"])
def test_a_client_whose_records_say_nothing_new_keeps_the_released_model(method):
    network = nn.Sequential(nn.Linear(1, 2))
    released = np.array([[-9.0, 9.0, 0.0, 0.0]], np.float32)  # classifies by the sign, and so do the records
    x = np.linspace(-1, 1, 20, dtype=np.float32)[:, None]
    own = fitted(network, released, [shard(x, (x[:, 0] > 0).astype(np.int64))], method)
    np.testing.assert_array_equal(own, released)


def test_a_client_alone_has_the_model_that_it_has_among_others():
    network = networks.build("mlp-32", (4,), 3)
    rng = np.random.default_rng(0)
    shards = [shard(rng.normal(size=(n, 4)), rng.integers(2, size=n)) for n in (8, 25)]
    layout, released = Layout.of(dict(network.named_parameters())), np.tile(vector_of(network), (2, 1))

    def initial():
        return released[0]

    for method in PERSONAL_METHODS:
        both = personalised(
            network, layout, released, shards, method, TRAINING, [np.random.default_rng(i) for i in range(2)], initial
        )
        alone = personalised(
            network, layout, released[1:], shards[1:], method, TRAINING, [np.random.default_rng(1)], initial
        )
        np.testing.assert_allclose(both.models[1:], alone.models, atol=1e-5)


def problem(rows, classes=3, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 4)).astype(np.float32)
    y = x[:, :classes].argmax(axis=1)
    return shard(x, y)


def mixed(network, released, shards, initial):
    layout = Layout.of(dict(network.named_parameters()))
    rngs = [np.random.default_rng(i) for i in range(len(shards))]
    before = released.copy(), [s.x.copy() for s in shards]
    own = personalised(network, layout, released, shards, "mixture", TRAINING, rngs, lambda: initial)
    np.testing.assert_array_equal(released, before[0])
    assert own.models.dtype == np.float32
    assert own.models.shape == (len(shards), 2 * layout.size)
    return own


def hits(own, i, s):
    return accuracies(own.network, own.layout, own.models[i][None], s.x, s.y)[0]


def outputs_of(network, vector, x):
    layout = Layout.of(dict(network.named_parameters()))
    values = {name: torch.as_tensor(value) for name, value in layout.split(vector).items()}
    return torch.func.functional_call(network, values, (torch.as_tensor(x),)).detach().numpy()


@pytest.mark.parametrize("weight", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("model", ["mlp-32", "linear", "cnn-tiny", "bare"])
def test_the_logits_of_a_mixture_are_the_weighted_mean_of_both(model, weight):
    shape = (1, 8, 8) if model == "cnn-tiny" else (4,)
    network = nn.Linear(4, 3, bias=False) if model == "bare" else networks.build(model, shape, 3)
    layout = Layout.of(dict(network.named_parameters()))
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(2, layout.size)).astype(np.float32) / 3
    x = rng.normal(size=(5, *shape)).astype(np.float32)
    vector = personal._mixed(network, layout, first, second, weight)
    expected = weight * outputs_of(network, first, x) + (1 - weight) * outputs_of(network, second, x)
    np.testing.assert_allclose(outputs_of(personal.sum_of_two(network), vector, x), expected, atol=1e-4)


def test_a_mixture_learns_alone_what_the_released_model_does_not_know():
    network = networks.build("mlp-32", (4,), 3)
    initial = vector_of(network)
    own = mixed(network, np.zeros((1, len(initial)), np.float32), [problem(200)], initial)
    layout = Layout.of(dict(network.named_parameters()))
    trained = personal.trained_alone(network, layout, initial, [problem(200)], [np.random.default_rng(0)], TRAINING)
    test = problem(500, seed=1)
    (expected,) = accuracies(network, layout, trained, test.x, test.y)
    assert hits(own, 0, test) > max(0.9, expected - 0.03)


def test_a_mixture_keeps_a_released_model_without_errors():
    network = nn.Linear(4, 3, bias=False)
    released = 5000 * np.eye(3, 4, dtype=np.float32).reshape(1, -1)
    own = mixed(network, released, [problem(30)], np.zeros(12, np.float32))
    np.testing.assert_array_equal(own.models[0, :12], released[0])
    assert not own.models[0, 12:].any()


@pytest.mark.parametrize("rows", [0, 1])
def test_a_client_with_less_than_two_records_keeps_the_released_model_in_a_mixture(rows):
    network = networks.build("mlp-32", (4,), 3)
    own = mixed(network, vector_of(network)[None], [problem(rows)], vector_of(network))
    x = problem(9).x
    expected = outputs_of(network, vector_of(network), x)
    np.testing.assert_allclose(outputs_of(own.network, own.models[0], x), expected, atol=1e-6)


@pytest.mark.parametrize("broken", ["released", "initial"])
def test_a_mixture_of_a_broken_model_is_the_other_one(broken):
    network = networks.build("mlp-32", (4,), 3)
    released, initial = vector_of(network)[None].copy(), vector_of(network)
    (released if broken == "released" else initial)[...] = np.nan
    own = mixed(network, released, [problem(40)], initial)
    assert np.isfinite(outputs_of(own.network, own.models[0], problem(9).x)).all()


def test_a_mixture_averages_real_outputs():
    network = networks.build("regression", (1,), 0)
    x = np.linspace(-3, 3, 200, dtype=np.float32)[:, None]
    data = shard(x, (2 * x[:, 0] + 1).astype(np.float32))
    own = mixed(network, np.array([[0, 5]], np.float32), [data], np.zeros(2, np.float32))
    assert hits(own, 0, data) > 0.99


def test_a_sum_of_networks_is_not_mixed_again():
    network = Additive(networks.build("linear", (4,), 3), networks.build("linear", (4,), 3))
    with pytest.raises(ModelError, match="sums of two already; set personalize to last-layer"):
        mixed(network, vector_of(network)[None], [problem(9)], vector_of(network))
    config = RunConfig({"strategy": "fedcam", "personalize": "mixture", "privacy-unit": "none"})
    sent = Layout.of({"global.a": np.zeros(10_000), "cluster.a": np.zeros(10_000)})
    with pytest.raises(ConfigError, match="sums of two already"):
        check_personal(config, sent)


class _Softmax(nn.Module):
    def __init__(self):
        super().__init__()
        self.output = nn.Linear(4, 3)

    def forward(self, x):
        return self.output(x).tanh()


@pytest.mark.parametrize(
    ("network", "method", "classes", "text"),
    [
        (networks.build("regression", (2,), 0), "prior", 0, "the task is regression"),
        (nn.Sequential(nn.Conv2d(1, 3, 2), nn.Flatten()), "last-layer", 3, "is Conv2d"),
        (nn.Sequential(nn.Conv2d(1, 3, 2), nn.Flatten()), "mixture", 3, "is Conv2d"),
        (nn.Sequential(nn.Conv2d(1, 3, 2), nn.Flatten()), "prior", 3, "whose last layer is linear"),
        (nn.Sequential(nn.Linear(4, 3, bias=False)), "prior", 3, "moves the bias"),
    ],
)
def test_networks_that_cannot_be_personalised_are_refused_in_one_line(network, method, classes, text):
    with pytest.raises(ModelError, match=text) as raised:
        networks.check_personal(network, method, task_of(classes))
    assert "\n" not in str(raised.value)
    assert "set personalize to" in str(raised.value)


@pytest.mark.parametrize("method", ["last-layer", "prior", "mixture"])
def test_a_network_that_processes_the_outputs_of_its_last_layer_is_refused(method):
    network = _Softmax()
    with pytest.raises(ModelError, match="_Softmax processes it further"):
        fitted(network, vector_of(network)[None], [shard(np.ones((4, 4)), np.arange(4) % 3)], method)


@pytest.mark.parametrize(
    ("settings", "deployed", "text"),
    [
        ({"evaluate": "off"}, False, "no effect with evaluate = 'off'"),
        ({"strategy": "kfed"}, False, "clusters records"),
        ({"evaluate": "diagnostic"}, True, "only under noise"),
        ({"privacy-unit": "none"}, True, "node configurations"),
        ({"personalize": "head"}, False, "must be none, last-layer, all, prior, mixture"),
    ],
)
def test_settings_without_effect_are_refused(settings, deployed, text):
    with pytest.raises(ConfigError, match=text):
        RunConfig({"personalize": "all", **settings}, deployed=deployed)


@pytest.mark.parametrize("strategy", ["fedper", "local"])
def test_personal_layers_are_not_personalised_again(strategy):
    settings = {"strategy": strategy, "clusters": 1, "privacy-unit": "none", "personalize": "all"}
    sent = Layout.of({"hidden.weight": np.zeros((32, 64))}) if strategy == "fedper" else Layout((), ())
    with pytest.raises(ConfigError, match="are their own already"):
        check_personal(RunConfig(settings), sent)


def test_private_evaluation_of_deployed_clients_may_be_personalised():
    config = RunConfig({"personalize": "prior", "evaluate": "private"}, deployed=True)
    assert config.evaluation.personalize == "prior"


def test_the_certificate_lists_the_accuracies_of_own_models():
    listed = [about(RunConfig({"personalize": value}))["diagnostics"] for value in ("none", "prior")]
    assert len(set(listed[1]) - set(listed[0])) == 1


# ---- what clients send -------------------------------------------------------------------------------------------


def replies(message_type, clients, **request):
    drawn = [networks.initialise("mlp-32", (1, 8, 8), 10, seed) for seed in range(2)]
    layout = Layout.of(drawn[0])
    models = np.stack([layout.flatten(parameters) for parameters in drawn])
    record = ConfigRecord({**CONFIG.for_clients(), "round": 4, **request})
    content = RecordDict({"models": pack_models(models, layout), "config": record})
    return handle(message_type, content, clients)


def sent(answers):
    return [{name: dict(record) for name, record in answer.items()} for answer in answers]


def test_simulated_clients_report_both_accuracies():
    clients = [Client(i) for i in range(3)]
    plain = sent(replies("evaluate", clients, private=False))
    for method in PERSONAL_METHODS:
        both = sent(replies("evaluate", clients, private=False, personalize=method))
        own = [answer["diagnostics"].pop("personal-accuracy") for answer in both]
        assert both == plain
        assert np.mean(own) > 2 * np.mean([answer["diagnostics"]["accuracy"] for answer in plain])


@pytest.mark.parametrize("method", PERSONAL_METHODS)
def test_diagnostics_of_deployed_clients_say_nothing_of_their_own_models(method, tmp_path):
    clients = [Client(3, str(tmp_path), guarantee="trusted-server")]
    plain = sent(replies("evaluate", clients, private=False))
    assert sent(replies("evaluate", clients, private=False, personalize=method)) == plain


@pytest.mark.parametrize("folder", [None, "state"])
def test_a_private_mean_is_of_the_own_models(folder, tmp_path):
    clients = [Client(3, folder and str(tmp_path / folder), guarantee="trusted-server")]
    (simulated,) = sent(replies("evaluate", [Client(3)], private=False, personalize="all"))
    (plain,) = sent(replies("evaluate", clients, private=True))
    (own,) = sent(replies("evaluate", clients, private=True, personalize="all"))
    assert own["diagnostics"].pop("accuracy") == simulated["diagnostics"]["personal-accuracy"]
    assert plain["diagnostics"].pop("accuracy") == simulated["diagnostics"]["accuracy"]
    assert own == plain


def test_a_client_with_a_budget_of_its_own_reports_neither(tmp_path):
    clients = [Client(3, str(tmp_path), (1.0, 1e-5), guarantee="record-level")]
    (refusal,) = replies("evaluate", clients, private=True, personalize="all")
    assert "does not cover evaluation" in str(refusal)
    willing = [replace(clients[0], diagnostics=True)]
    plain, own = (sent(replies("evaluate", willing, private=True, **m)) for m in ({}, {"personalize": "all"}))
    assert own == plain
