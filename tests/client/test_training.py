"""Local training: hand-computed steps, and the plain version as the oracle of the batched one."""

import numpy as np
import pytest
import torch
from kit.tables import for_rows
from torch import nn

from coterie import models as networks
from coterie.client import backend, penalties
from coterie.client.backend import Backend, Examples, train
from coterie.client.chains import chain_kind
from coterie.client.penalties import Penalty
from coterie.client.scores import accuracies, losses
from coterie.client.sgd import LocalTrainingConfig
from coterie.datasets import Shard, TestSet
from coterie.wire.messages import Layout

PENALTIES = [Penalty(), *(Penalty(name, 0.5) for name in penalties.PENALTIES)]


def shard(size, shape=(1, 8, 8), classes=3, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((size, *shape)).astype(np.float32)
    y = rng.integers(classes, size=size)
    return Shard(seed, 0, x, y, TestSet(x, y))


def setup(name, shards, shape=(1, 8, 8), classes=3):
    layout = Layout.of(networks.initialise(name, shape, classes, 0))
    start = np.stack([layout.flatten(networks.initialise(name, shape, classes, i)) for i in range(len(shards))])
    rngs = [np.random.default_rng(i) for i in range(len(shards))]
    return networks.build(name, shape, classes), layout, start, shards, rngs


@for_rows("penalty", PENALTIES)
@for_rows("name", ["linear", "mlp-32", "cnn-tiny"])
def test_batched_training_equals_one_client_after_the_other(name, penalty):
    shards = [shard(size, seed=i) for i, size in enumerate([1, 5, 7, 12])]  # sizes and last batches differ
    hyper = LocalTrainingConfig(local_epochs=3, batch_size=5, lr=0.1, penalty=penalty)
    plain = train(*setup(name, shards), hyper, batched=False)
    fast = train(*setup(name, shards), hyper, batched=True)
    assert np.abs(plain).max() > 0.01
    np.testing.assert_allclose(fast, plain, atol=2e-6)


class Viewed(nn.Sequential):
    """A network whose activations must be contiguous."""

    def forward(self, x):
        images, output = self[0](x), self[1]
        return output(torch.relu(images).view(len(images), -1))


@pytest.mark.parametrize(
    ("network", "form"),
    [
        (
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)),
            "channels_last",
        ),
        (Viewed(nn.Conv2d(3, 4, 3), nn.Linear(144, 3)), "contiguous_format"),
        (nn.Sequential(nn.Flatten(), nn.Linear(192, 3)), "contiguous_format"),
    ],
)
def test_the_memory_format_changes_no_update(network, form, monkeypatch):
    shards = [shard(size, (3, 8, 8), seed=i) for i, size in enumerate([6, 9])]
    layout = Layout.of(dict(network.named_parameters()))
    start = np.random.default_rng(0).normal(0, 0.1, (2, layout.size)).astype(np.float32)
    config = LocalTrainingConfig(local_epochs=2, batch_size=4, lr=0.1)

    def updates():
        chosen = Backend(network, Examples((3, 8, 8), torch.float32, torch.int64, "cpu"))
        rngs = [np.random.default_rng(i) for i in range(2)]
        return chosen.form, chosen.updates(layout, start, shards, rngs, config, batched=False)

    chosen, fast = updates()
    assert chosen is getattr(torch, form)
    monkeypatch.setattr(backend, "fast_network", lambda model, *given: (model, torch.contiguous_format))
    _, plain = updates()
    assert np.abs(plain).max() > 0.01
    np.testing.assert_allclose(fast, plain, atol=1e-6)


@pytest.mark.parametrize("at_once", [0, 1, 2, 3, 4, 5])
def test_training_in_parts_equals_training_at_once(at_once, monkeypatch):
    shards = [shard(size, seed=i) for i, size in enumerate([1, 5, 7, 12, 5])]
    hyper, arguments = LocalTrainingConfig(local_epochs=2, batch_size=5, lr=0.1), setup("mlp-32", shards)
    whole = train(*arguments, hyper, batched=True)
    together, real = [], Backend._together

    def watched(self, step, layout, start, *others):
        together.append(len(start))
        return real(self, step, layout, start, *others)

    monkeypatch.setattr(Backend, "_together", watched)
    monkeypatch.setattr(backend, "_CACHE", at_once * 4 * arguments[1].size)
    *first, _ = setup("mlp-32", shards)
    parts = train(*first, [np.random.default_rng(i) for i in range(5)], hyper, batched=True)
    np.testing.assert_allclose(parts, whole, atol=1e-6)
    expected = {0: [1] * 5, 1: [1] * 5, 2: [2, 2, 1], 3: [3, 2], 4: [3, 2], 5: [5]}
    assert together == expected[at_once]


def test_a_batch_that_exceeds_the_memory_of_the_device_is_split(monkeypatch):
    shards = [shard(size, seed=i) for i, size in enumerate([4, 5, 7, 12, 5])]
    hyper, arguments = LocalTrainingConfig(local_epochs=2, batch_size=5, lr=0.1), setup("mlp-32", shards)
    whole, real = train(*arguments, hyper, batched=True), Backend._together
    sizes, freed = [], []
    monkeypatch.setattr(backend, "free_device", lambda: freed.append(1))

    def small(self, step, layout, start, *others):
        sizes.append(len(start))
        if len(start) > 2:
            raise torch.OutOfMemoryError
        return real(self, step, layout, start, *others)

    monkeypatch.setattr(Backend, "_together", small)
    parts = train(*setup("mlp-32", shards), hyper, batched=True)
    np.testing.assert_allclose(parts, whole, atol=1e-6)
    assert sizes == [5, 3, 2, 1, 2]
    assert freed
    monkeypatch.setattr(Backend, "_together", lambda *given: (_ for _ in ()).throw(torch.OutOfMemoryError))
    with pytest.raises(torch.OutOfMemoryError):
        train(*setup("mlp-32", shards), hyper, batched=True)


@pytest.mark.parametrize("layer", [nn.ReLU, nn.Tanh])
def test_a_step_of_a_group_contains_clients_with_steps_left_only(layer, monkeypatch):
    """The network with ReLU is trained by hand, the other one by vmap."""
    network, clients, real = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), layer(), nn.Linear(5, 3)), [], Backend._step

    def counting(self, config):
        step = real(self, config)

        def counted(model, parameters, anchors, batch, config):
            clients.append({len(values) for values in (*parameters.values(), *anchors.values(), *batch)})
            step(model, parameters, anchors, batch, config)

        return counted

    monkeypatch.setattr(Backend, "_step", counting)
    shards = [shard(size, seed=i) for i, size in enumerate([1, 12, 5, 2])]
    start = np.tile(Layout.of(network.state_dict()).flatten(network.state_dict()), (4, 1))
    rngs = [np.random.default_rng(i) for i in range(4)]
    train(network, Layout.of(network.state_dict()), start, shards, rngs, LocalTrainingConfig(1, 4, 0.1), batched=True)
    assert clients == [{4}, {2}, {1}]


@pytest.mark.parametrize(("name", "threads"), [("mlp-32", 1), ("cnn-tiny", 2)])
def test_a_group_of_linear_chains_trains_on_one_thread(name, threads, monkeypatch):
    seen, before = [], torch.get_num_threads()
    monkeypatch.setattr(Backend, "_together", lambda self, *given: seen.append(torch.get_num_threads()) or given[2])
    torch.set_num_threads(2)
    try:
        train(*setup(name, [shard(4), shard(5)]), LocalTrainingConfig(1, 4, 0.1), batched=True)
        assert (seen, torch.get_num_threads()) == ([threads], 2)
    finally:
        torch.set_num_threads(before)


def test_the_backend_of_a_network_is_chosen_once(monkeypatch):
    asked, shards = [], [shard(5)]
    monkeypatch.setattr(backend, "chain_kind", lambda *given: asked.append(given) or chain_kind(*given))
    model, layout, start, _, rngs = setup("mlp-32", shards)
    for _ in range(2):
        train(model, layout, start, shards, rngs, LocalTrainingConfig(1, 5, 0.1))
        losses(model, layout, start, shards)
    assert len(asked) == 1


def convolutions(*head, flat, **options):
    return nn.Sequential(nn.Conv2d(2, 4, 3, **options), *head, nn.Flatten(), nn.Linear(flat, 3))


CHAINS = {
    "linear layers": nn.Sequential(
        nn.Flatten(), nn.Linear(128, 5), nn.ReLU(), nn.Linear(5, 4, bias=False), nn.Linear(4, 3)
    ),
    "pooling": convolutions(nn.ReLU(), nn.MaxPool2d(2), flat=36),
    "overlapping pooling": convolutions(nn.MaxPool2d(3, 2, 1, ceil_mode=True), nn.ReLU(inplace=True), flat=64),
    "strides": convolutions(nn.ReLU(), nn.Conv2d(4, 6, (2, 3), stride=(1, 2)), flat=36, stride=2, padding=(1, 2)),
    "groups": convolutions(nn.Conv2d(4, 6, 3, groups=2, bias=False), nn.ReLU(), flat=24, groups=2, dilation=2),
    "hidden layers": nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5), nn.ReLU(), nn.Linear(5, 3)
    ),
}


@pytest.mark.parametrize("penalty", PENALTIES[:2])
@pytest.mark.parametrize("name", CHAINS)
def test_gradients_by_hand_equal_autograd(name, penalty, monkeypatch):
    shape, network = (2, 8, 8), CHAINS[name]
    shards = [shard(size, shape, seed=i) for i, size in enumerate([4, 9])]
    layout = Layout.of(dict(network.named_parameters()))
    start = np.random.default_rng(0).normal(0, 0.2, (2, layout.size)).astype(np.float32)
    hyper = LocalTrainingConfig(local_epochs=2, batch_size=4, lr=0.1, penalty=penalty)

    def updates(batched):
        rngs = [np.random.default_rng(i) for i in range(2)]
        return train(network, layout, start, shards, rngs, hyper, batched=batched)

    plain = updates(batched=False)
    with monkeypatch.context() as patch:
        patch.delattr(backend, "_step_by_vmap")  # unused
        by_hand = updates(batched=True)
    assert np.abs(plain).max() > 0.01
    np.testing.assert_allclose(by_hand, plain, atol=2e-6)


@for_rows("name", ["mlp-32", "cnn-tiny"])
@for_rows("sizes", [[0, 0], [0, 5, 0, 6]])
def test_clients_without_examples_return_no_update(sizes, name):
    shards = [shard(size, seed=i) for i, size in enumerate(sizes)]
    hyper = LocalTrainingConfig(local_epochs=2, batch_size=4, lr=0.1)
    plain, fast = (train(*setup(name, shards), hyper, batched=batched) for batched in (False, True))
    np.testing.assert_allclose(fast, plain, atol=2e-6)
    assert [bool(np.any(update)) for update in fast] == [size > 0 for size in sizes]


@pytest.mark.parametrize(("batch_size", "together"), [(4, [4]), (64, [4]), (100, [2, 2]), (200, []), (256, [])])
def test_the_images_of_a_step_are_bounded(batch_size, together, monkeypatch):
    shards = [shard(200, seed=i) for i in range(4)]
    sizes, real = [], Backend._together

    def watched(self, step, layout, start, *others):
        sizes.append(len(start))
        return real(self, step, layout, start, *others)

    monkeypatch.setattr(Backend, "_together", watched)
    train(*setup("cnn-tiny", shards), LocalTrainingConfig(1, batch_size, 0.1))
    assert sizes == together


@pytest.mark.parametrize(("clients", "together"), [(1, []), (3, []), (4, [4]), (6, [6])])
def test_a_few_clients_do_not_train_by_vmap(clients, together, monkeypatch):
    network, sizes = nn.Sequential(nn.Flatten(), nn.Linear(100, 5), nn.Tanh(), nn.Linear(5, 3)), []
    monkeypatch.setattr(Backend, "_together", lambda self, step, layout, start, *_: sizes.append(len(start)) or start)
    _, _, _, shards, rngs = setup("mlp-32", [shard(5, (100,), seed=i) for i in range(clients)])
    layout = Layout.of(dict(network.named_parameters()))
    train(network, layout, np.zeros((clients, layout.size), np.float32), shards, rngs, LocalTrainingConfig(1, 5, 0.1))
    assert sizes == together


@for_rows(
    "network",
    [
        nn.Sequential(nn.Conv2d(2, 4, 3, padding_mode="circular", padding=1), nn.Flatten(), nn.Linear(256, 3)),
        nn.Sequential(nn.Conv2d(2, 4, 3, padding="same"), nn.Flatten(), nn.Linear(256, 3)),
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(2), nn.Flatten(), nn.Linear(144, 3)),
        nn.Sequential(nn.Conv2d(2, 3, 8), nn.Flatten()),
        nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32, 3)),
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 3)),
    ],
)
def test_other_networks_are_no_image_chains(network):
    assert chain_kind(network, 3) != "image"
    assert network(torch.zeros(1, 2, 8, 8)).shape == (1, 3)


def test_pooling_before_relu_changes_no_bit():
    pooled = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3))
    swapped, _ = backend.fast_network(pooled, (1, 8, 8), "cpu")
    assert [type(layer) for layer in swapped[1:3]] == [nn.MaxPool2d, nn.ReLU]
    assert [type(layer) for layer in pooled[1:3]] == [nn.ReLU, nn.MaxPool2d]  # the original is unchanged
    assert [name for name, _ in swapped.named_parameters()] == [name for name, _ in pooled.named_parameters()]
    swapped.to(memory_format=torch.contiguous_format)
    x = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    outputs = [network(x) for network in (pooled, swapped)]
    assert torch.equal(*outputs)
    gradients = [
        torch.autograd.grad(output.square().sum(), list(network.parameters()))
        for output, network in zip(outputs, (pooled, swapped), strict=True)
    ]
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("batched", [False, True])
def test_every_example_is_seen_once_an_epoch_and_short_batches_average_over_themselves(batched):
    # Five examples with label 1 in batches of 2, 2, 1: three steps, each the mean over its own batch.
    x = np.zeros((5, 1, 1, 1), np.float32)
    shards = [Shard(0, 0, x, np.ones(5, np.int64), TestSet(x, np.ones(5, np.int64)))]
    network, layout, _, _, rngs = setup("linear", shards, (1, 1, 1), 2)
    update = train(
        network, layout, np.zeros((1, 4), np.float32), shards, rngs, LocalTrainingConfig(1, 2, 1.0), batched=batched
    )
    bias = 0.0
    for _ in range(3):
        bias += 1 - 1 / (1 + np.exp(-2 * bias))
    np.testing.assert_allclose(update, [[0, 0, -bias, bias]], atol=1e-6)


def test_losses_and_accuracies_by_hand():
    x = np.ones((3, 1, 1, 1), np.float32)
    shards = [
        Shard(0, 0, x, np.array([0, 0, 1]), TestSet(x, np.zeros(3, np.int64))),
        Shard(1, 0, x[:1], np.array([1]), TestSet(x, np.zeros(3, np.int64))),
    ]
    network, layout, *_ = setup("linear", shards, (1, 1, 1), 2)
    models = np.array([[0, 0, 0, 0], [0, 1, 0, 1]], np.float32)  # undecided; class 1 by a margin of 2
    sure, unsure = np.log1p(np.exp(-2)), np.log1p(np.exp(2))
    expected = [[np.log(2), (2 * unsure + sure) / 3], [np.log(2), sure]]
    np.testing.assert_allclose(losses(network, layout, models, shards), expected, rtol=1e-6)
    np.testing.assert_allclose(accuracies(network, layout, models[1:], x, np.array([0, 1, 1])), [2 / 3])


def test_a_model_that_diverged_is_never_chosen():
    shards = [shard(4)]
    network, layout, start, *_ = setup("mlp-32", shards)
    models = np.stack([np.full_like(start[0], np.nan), start[0]])
    each = losses(network, layout, models, shards)[0]
    assert each[0] == np.inf
    assert np.isfinite(each[1])


def test_training_leaves_global_randomness_and_data_alone():
    shards = [shard(6)]
    arguments = setup("mlp-32", shards)
    before, state = shards[0].x.copy(), torch.random.get_rng_state()
    train(*arguments, LocalTrainingConfig(2, 2, 0.1), batched=True)
    np.testing.assert_array_equal(shards[0].x, before)
    assert torch.equal(torch.random.get_rng_state(), state)
