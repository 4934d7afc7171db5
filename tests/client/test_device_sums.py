"""Updates that stay on a GPU: the sums of the CPU, and copies that do not depend on the number of clients.

Without a GPU, the same code runs on the CPU, and copies are counted on tensors that have a device and no numbers.
"""

import math
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kit.cohorts import CLASSES, SHAPES, rngs, shards_of, start_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from coterie import models as networks
from coterie.client import backend, device_sums, ghost, handlers, scores
from coterie.client import device as devices
from coterie.client.backend import Examples, train
from coterie.client.cohort import _first
from coterie.client.dpsgd import DPSGD, train_privately
from coterie.client.scores import losses
from coterie.client.sgd import LocalTrainingConfig
from coterie.engine.in_process import SummingGrid
from coterie.privacy import Joint, Summed
from coterie.server import RunConfig, RunFolder, run


def plan_of(**options):
    numbers = {"rounds": 2, "epsilon": 8.0, "delta": 1e-3, "clients": 20, "num_clusters": 3, "sampling_rate": 0.5}
    return Joint(**numbers, noise_multiplier=1.0, **options)


@pytest.mark.parametrize("shared", [0, 4])
@pytest.mark.parametrize("block", [1, 3, 1000])
def test_sums_are_those_of_the_cpu(shared, block, monkeypatch):
    monkeypatch.setattr(device_sums, "_BLOCK", block * 10)
    rng = np.random.default_rng(0)
    updates = (rng.standard_normal((8, 10)) * np.geomspace(1e-3, 1e3, 8)[:, None]).astype(np.float32)
    updates[2, 3], updates[4, 0] = np.nan, np.inf
    limits = [math.inf] * 7 + [1.0]  # the last one is too long
    kept = np.array([True, True, False, True, False, True, True, False])
    labels, redrawn = rng.integers(3, size=8), rng.integers(3, size=8)
    plan = plan_of(clip_norm=0.5)
    wanted, found = Summed(plan, 10, shared=shared), Summed(plan, 10, shared=shared)
    wanted.add_rows(labels[kept], redrawn[kept], updates[kept])
    total, norms, counted = device_sums.clipped_total(torch.tensor(updates), redrawn, 3, 0.5, limits, shared)
    assert counted.tolist() == kept.tolist()
    found.add_total(labels[counted], total, norms[counted])
    np.testing.assert_allclose(found.sums, wanted.sums, rtol=1e-12, atol=1e-15)
    assert found.counts.tolist() == wanted.counts.tolist()
    assert np.linalg.norm(found.sums[0, :, shared:], axis=1).max() <= 5  # of five updates of norm 1


RUN = {"strategy": "ifca", "clusters": 2, "clients": 12, "groups": "2", "rounds": 3, "sampling-rate": 1.0}
RUN |= {"samples-per-client": 20, "reseed-every": 1, "seed": 7}


def run_of(path):
    with closing(RunFolder.create(path, RunConfig(RUN))) as folder:
        outcome = run(folder, SummingGrid(RUN["clients"]))
        return outcome["diagnostics"]["accuracy"], folder.rounds()[-1]


def test_a_run_is_that_of_the_cpu(tmp_path, monkeypatch):
    wanted, last = run_of(tmp_path / "cpu")
    summed = []
    monkeypatch.setattr(handlers, "stays_on_device", lambda cohort, sums: summed.append(len(cohort.clients)) or True)
    found, other = run_of(tmp_path / "device")
    assert sum(summed) == 12 * 3
    assert found == pytest.approx(wanted, abs=1e-3)
    assert other.replies == last.replies


def test_integers_and_clients_with_own_layers_stay_on_the_cpu():
    _, layout, _ = start_of("mlp-32")
    plugins = SimpleNamespace(trainer_class=None)

    def stays(sums=None, device="cuda", **given):
        fields = {"local_training": SimpleNamespace(device=device, plugins=plugins), "is_stateful": False}
        fields["layers"] = SimpleNamespace(whole=layout, sent=layout)
        return device_sums.stays_on_device(SimpleNamespace(**fields | given), sums or Summed(plan_of(clip_norm=1.0), 4))

    class Integers(Summed):
        pass

    assert stays()
    assert not stays(device="cpu")
    assert not stays(is_stateful=True)
    assert not stays(Integers(plan_of(clip_norm=1.0), 4))
    assert not stays(layers=SimpleNamespace(whole=layout, sent=None))


class Copies(TorchDispatchMode):
    """Counts copies between devices; a number that the CPU waits for raises an error in this mode."""

    def __init__(self):
        super().__init__()
        self.up = self.down = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if "copy" in str(function):
            target = result.device.type
            source = next(value.device.type for value in reversed(args) if isinstance(value, torch.Tensor))
            self.up += (source, target) == ("cpu", "cuda")
            self.down += (source, target) == ("cuda", "cpu")
        return result


@pytest.fixture
def fake_gpu(monkeypatch):
    """Tensors on a GPU without numbers."""
    for module in (device_sums, backend, scores):
        monkeypatch.setattr(module, "to_numpy", lambda values: np.zeros(values.cpu().shape))
    # A module's tensors without numbers cannot be moved.
    monkeypatch.setattr(backend, "supports_vmap", lambda *_: True)
    monkeypatch.setattr(backend, "fast_network", lambda model, *_: (model, torch.contiguous_format))
    yield FakeTensorMode(allow_non_fake_inputs=True)
    devices.free_device()
    backend.backend_of.cache_clear()


@pytest.mark.parametrize("name", ["mlp-32", "cnn-tiny"])
def test_copies_do_not_grow_with_the_clients(name, fake_gpu):
    """Data go to the GPU once; then a round copies models, indices and weights there, and sums back."""
    _, layout, models = start_of(name)
    config = LocalTrainingConfig(2, 4, 0.1, "cuda")

    def copies(clients):
        shards, used = shards_of(name, [6] * clients), np.arange(clients) % 3

        def one_round():
            losses(model, layout, models, shards, "cuda")
            start = torch.tensor(models, device="cuda")[torch.as_tensor(used, device="cuda")]
            updates = train(model, layout, start, shards, rngs(7, clients), config)
            device_sums.clipped_total(updates, used, 3, 1.0, [math.inf] * clients)

        with Copies() as first:
            one_round()
        with Copies() as later:
            one_round()
        return first.up, later.up, later.down

    with fake_gpu:
        with torch.device("cuda"):
            model = networks.build(name, SHAPES[name], CLASSES)
        small, large = copies(3), copies(30)
    assert small[1:] == large[1:]
    assert small[2] == 2  # losses, and sums with norms
    assert large[0] - small[0] == 2 * 27  # records and labels of each client


@pytest.mark.parametrize("most", [0, 1, 3])
@pytest.mark.parametrize("name", ["mlp-32", "cnn-tiny"])
def test_dp_sgd_goes_on_with_smaller_batches(name, most, monkeypatch):
    (model, layout, models), shards = start_of(name, 2), shards_of(name, [6, 6])
    own = [DPSGD(6, 6, 2, 0.1, 0.7, 0.02)] * 2

    def trained():
        return train_privately(model, layout, models, shards, rngs(7, 2), rngs(8, 2), own, batched=True)

    def limited(sums, records):
        def within_memory(*given, **options):
            if given[records].shape[1] > most:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return sums(*given, **options)

        return within_memory

    wanted = trained()
    for clipper in (ghost.GhostClipping, ghost.ChainClipping):
        monkeypatch.setattr(clipper, "sums", limited(clipper.sums, 3))
    if most:
        np.testing.assert_allclose(trained(), wanted, atol=1e-6)
    else:
        with pytest.raises(torch.OutOfMemoryError):
            trained()


def test_losses_go_on_with_smaller_chunks(monkeypatch):
    (model, layout, models), shards = start_of("mlp-32"), shards_of("mlp-32", [6] * 5)
    wanted, seen = losses(model, layout, models, shards), []
    of_chunk = backend.call

    def call(network, values, x):
        seen.append(len(x))
        if len(x) > 9:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return of_chunk(network, values, x)

    monkeypatch.setattr(backend, "call", call)
    np.testing.assert_allclose(losses(model, layout, models, shards), wanted, rtol=1e-6)
    assert seen[0] == 30
    assert max(seen[-9:]) <= 9


def test_the_first_records_of_a_shard_are_one_object():
    """A GPU keeps the data of a shard as long as it exists."""
    (shard,) = shards_of("mlp-32", [6])
    assert _first(shard, 4) is _first(shard, 4)
    assert len(_first(shard, 4).y) == 4
    assert len(_first(shard, 5).y) == 5


def test_examples_of_tensors_are_those_of_arrays():
    (shard,) = shards_of("mlp-32", [6])
    found = Examples.of(torch.tensor(shard.x), torch.tensor(shard.y), "cpu")
    assert found == Examples.of(shard.x, shard.y, "cpu")
    assert hash(found) == hash(Examples.of(shard.x, shard.y, "cpu"))
