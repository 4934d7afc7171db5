"""What runs on a GPU, compared with the CPU; without a GPU, the same code paths run on the CPU.

``make gpu-check`` runs this file on a machine with a GPU.
"""

import dataclasses
import gc

import numpy as np
import pytest
import torch
from kit.cohorts import CLASSES, SHAPES, rngs, shards_of, start_of
from kit.tiers import mark_slow
from torch import nn

from coterie.client import backend, dpsgd
from coterie.client import device as devices
from coterie.client.backend import train
from coterie.client.device_sums import clipped_total
from coterie.client.dpsgd import DPSGD, train_privately
from coterie.client.gradients import BatchesOfOne, MappedClients, clipper_of
from coterie.client.scores import accuracies, losses
from coterie.client.sgd import LocalTrainingConfig
from coterie.privacy.clipping import clip_to_unit
from coterie.tasks import AUTO
from coterie.wire.messages import Layout

SHAPE = SHAPES["mlp-32"]
LARGE = "resnet18-gn"
BY_NAME = pytest.mark.parametrize("name", mark_slow(SHAPES, {LARGE}))


@pytest.fixture(
    params=["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
)
def device(request):
    return request.param


def close(found, wanted, share):
    assert np.linalg.norm(wanted) > 0.01
    assert np.linalg.norm(found - wanted) <= share * np.linalg.norm(wanted)


@pytest.mark.parametrize("precision", devices.PRECISIONS)
@pytest.mark.parametrize("name", ["mlp-32", "cnn-tiny", "lstm-char"])
def test_a_cohort_trains_as_its_clients_do(name, precision, device):
    model, layout, start = start_of(name)
    shards, config = shards_of(name), LocalTrainingConfig(2, 4, 0.1)
    wanted = train(model, layout, start, shards, rngs(), config, batched=False)
    fast = dataclasses.replace(config, device=device, precision=precision)
    share = {"float32": 1e-4, "tf32": 0.02, "bfloat16": 0.05}[precision]
    together = train(model, layout, start, shards, rngs(), fast, batched=True)
    close(together, wanted, share)
    close(train(model, layout, start, shards, rngs(), fast, batched=False), wanted, share)
    if precision == "bfloat16":
        assert np.linalg.norm(together - wanted) > 1e-4 * np.linalg.norm(wanted)


@BY_NAME
def test_sums_of_updates_that_stay_on_the_device(name, device):
    model, layout, start = start_of(name)
    shards, config = shards_of(name), LocalTrainingConfig(1, 4, 0.1)
    updates = train(model, layout, start, shards, rngs(), config)
    wanted = np.stack([clip_to_unit(updates[rows], 0.1).sum(axis=0) for rows in ([0, 2], [1])])
    there, on_it = torch.tensor(start, device=device), dataclasses.replace(config, device=device)
    moved = train(model, layout, there, shards, rngs(), on_it)
    assert moved.device.type == device
    total, norms, kept = clipped_total(moved, np.array([0, 1, 0]), 2, 0.1, [np.inf] * 3)
    close(total, wanted, 1e-4)
    close(norms, np.linalg.norm(updates, axis=1), 1e-4)
    assert kept.all()


def test_products_restores_the_precision():
    kinds = torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn
    before = [kind.fp32_precision for kind in kinds]
    for precision, expected in {"tf32": "tf32", "float32": "ieee", "bfloat16": "ieee"}.items():
        with devices.products(precision, "cpu"):
            assert [kind.fp32_precision for kind in kinds] == [expected] * 3
        assert [kind.fp32_precision for kind in kinds] == before


@BY_NAME
def test_losses_of_all_models_in_one_pass(name, device, monkeypatch):
    model, layout, models = start_of(name)
    shards = shards_of(name)
    x, y = shards[1].x, shards[1].y
    each = [(losses(model, layout, one[None], shards), accuracies(model, layout, one[None], x, y)) for one in models]
    monkeypatch.setattr(backend, "_IMAGE_CHUNK", 4)
    found = losses(model, layout, models, shards, device), accuracies(model, layout, models, x, y, device)
    np.testing.assert_allclose(found[0], np.concatenate([one for one, _ in each], axis=1), rtol=1e-4)
    np.testing.assert_allclose(found[1], np.concatenate([one for _, one in each]))


@pytest.mark.parametrize("clip_norm", [0.5, 20.0])  # below and above the norms of all gradients
@pytest.mark.parametrize("name", ["cnn-tiny", "lstm-char"])
def test_dp_sgd_of_a_cohort(name, clip_norm, device, monkeypatch):
    model, layout, start = start_of(name)
    shards = shards_of(name)
    settings = [DPSGD(len(each.y), 3, 2, 0.1, clip_norm, 0.01, memory_mb=1) for each in shards]
    wanted = train_privately(model, layout, start, shards, rngs(1), rngs(2), settings, batched=False, ghost=False)
    mapped = MappedClients(BatchesOfOne(model, AUTO, device=device))
    monkeypatch.setattr(dpsgd, "clipper_of", lambda *given, **options: mapped)
    settings = [dataclasses.replace(own, device=device) for own in settings]
    found = train_privately(model, layout, start, shards, rngs(1), rngs(2), settings, batched=True)
    close(found, wanted, 1e-4)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_dp_sgd_of_a_cohort_drops_what_is_not_finite(bad, device):
    model, layout, start = start_of("cnn-tiny", 1)
    vectors = torch.tensor(start, device=device)
    x = torch.randn(1, 3, *SHAPE, generator=torch.Generator().manual_seed(0)).to(device)
    y = torch.zeros(1, 3, dtype=torch.int64, device=device)
    clips, every = (
        torch.ones(1, 1, dtype=torch.float64, device=device),
        torch.ones(1, 3, dtype=torch.bool, device=device),
    )
    sums = MappedClients(BatchesOfOne(model, AUTO, device=device)).sums
    wanted = sums(layout.split(vectors), x[:, 1:], y[:, 1:], every[:, 1:], clips)[0]
    x[0, 0, 0, 0, 0] = bad
    found = sums(layout.split(vectors), x, y, every, clips)[0]
    torch.testing.assert_close(found, wanted)
    assert wanted.norm() > 0.1


class Counts(nn.Module):
    """A network that vmap cannot compute: its path depends on the data."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, CLASSES)

    def forward(self, x):
        x = x.flatten(1)
        return self.layer(x if float(x.sum()) > 0 else 2 * x)


def test_a_network_that_vmap_does_not_support_trains_client_after_client(device):
    model = Counts()
    assert not backend.supports_vmap(model, backend.Examples(SHAPE, torch.float32, torch.int64, device))
    layout = Layout.of(dict(model.named_parameters()))
    start = np.random.default_rng(0).normal(0, 0.1, (3, layout.size)).astype(np.float32)
    shards, config = shards_of("mlp-32"), LocalTrainingConfig(2, 4, 0.1)
    wanted = train(model, layout, start, shards, rngs(), config, batched=False)
    fast = dataclasses.replace(config, device=device)
    close(train(model, layout, start, shards, rngs(), fast, batched=True), wanted, 1e-4)


@pytest.mark.parametrize(("network", "kind"), [("cnn-tiny", MappedClients), (None, BatchesOfOne)])
def test_dp_sgd_takes_all_clients_at_once_on_a_gpu_if_vmap_supports_the_network(network, kind, device):
    model = start_of(network)[0] if network else Counts()
    device = "cuda" if device == "cuda" else "cpu:0"  # a device that is not called the CPU
    examples = backend.Examples(SHAPES[network or "mlp-32"], torch.float32, torch.int64, device)
    assert type(clipper_of(model, examples, AUTO, batched=True, ghost=True, units=False)) is kind


def test_data_stay_on_the_gpu_until_memory_is_short(monkeypatch):
    (shard,) = shards_of("mlp-32", [4])
    monkeypatch.setattr(devices, "_ON_GPU", type(devices._ON_GPU)())
    device = "cuda" if torch.cuda.is_available() else "meta"  # a device that is not the CPU
    first, labels = devices.on_device(shard, device)
    assert (first.device.type, labels.device.type) == (device, device)
    assert devices.on_device(shard, device)[0] is first
    devices.free_device()
    assert devices.on_device(shard, device)[0] is not first
    del shard
    gc.collect()
    assert not devices._ON_GPU
