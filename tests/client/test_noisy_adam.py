"""Adam at clients: PyTorch's without noise, and by DP-SGD steps in which known noise moves nothing far."""

import math
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch
from kit.tables import for_rows
from torch import nn
from torch.nn.functional import cross_entropy

from coterie.client.backend import train
from coterie.client.dpsgd import DPSGD, train_privately
from coterie.client.noisy_adam import NoisyAdam
from coterie.client.sgd import LocalTrainingConfig
from coterie.client.training_plugins import TrainingPlugins
from coterie.datasets import Shard, TestSet
from coterie.engine.in_process import LocalGrid
from coterie.models import float32_arrays
from coterie.server import RunConfig, RunFolder, run
from coterie.wire.messages import Layout

CLIP, LR = 0.4, 0.01
SETTINGS = DPSGD(8, 8, 5, LR, CLIP, 0.0, optimizer="adam")


def shard(seed, size=8):
    rng = np.random.default_rng(seed)
    x, y = rng.standard_normal((size, 4), np.float32), rng.integers(3, size=size)
    return Shard(seed, 0, x, y, TestSet(x, y))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def updates(shards, settings, seed=0):
    model = network()
    layout = Layout.of(float32_arrays(model))
    start = np.tile(layout.flatten(float32_arrays(model)), (len(shards), 1))
    coins, noises = ([np.random.default_rng([seed, k, i]) for i in range(len(shards))] for k in range(2))
    return train_privately(model, layout, start, shards, coins, noises, settings, batched=True)


def by_pytorch(data, make, steps=5):
    """Clipped gradients into an optimizer of PyTorch."""
    model = network()
    parameters = list(model.parameters())
    start = [value.detach().clone() for value in parameters]
    optimizer = make(parameters, LR, betas=(0.0, 0.999))
    for _ in range(steps):
        total = [torch.zeros_like(value) for value in parameters]
        for x, y in zip(torch.tensor(data.x), torch.tensor(data.y), strict=True):
            gradients = torch.autograd.grad(cross_entropy(model(x[None]), y[None]), parameters)
            norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
            for sum_, gradient in zip(total, gradients, strict=True):
                sum_ += gradient * min(1.0, CLIP / norm)
        for value, sum_ in zip(parameters, total, strict=True):
            value.grad = sum_ / len(data.y)
        optimizer.step()
    return np.concatenate([(a.detach() - b).numpy().ravel() for a, b in zip(parameters, start, strict=True)])


@pytest.mark.parametrize(("name", "make"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)])
def test_without_noise_it_is_pytorchs_without_momentum(name, make):
    data = [shard(1), shard(2)]
    found = updates(data, [replace(SETTINGS, optimizer=name)] * 2)
    for one, update in zip(data, found, strict=True):
        np.testing.assert_allclose(update, by_pytorch(one, make), atol=1e-5)


def test_batch_size_and_clipping_norm_cancel():
    """The steps do not depend on what divides the sum, and a network whose gradients are all clipped not on c."""
    settings = [replace(SETTINGS, clip_norm=c) for c in (1e-3, 1e-4)]
    np.testing.assert_allclose(*updates([shard(1)] * 2, settings), atol=1e-6)


def test_a_client_with_fewer_steps_stops():
    settings = [replace(SETTINGS, noise_multiplier=0.3), replace(SETTINGS, noise_multiplier=0.3, epochs=2)]
    both = updates([shard(1), shard(2)], settings)
    model = network()
    layout = Layout.of(float32_arrays(model))
    start = layout.flatten(float32_arrays(model))[None]
    coins, noises = [np.random.default_rng([0, 0, 1])], [np.random.default_rng([0, 1, 1])]
    alone = train_privately(model, layout, start, [shard(2)], coins, noises, settings[1:], batched=True)
    np.testing.assert_allclose(both[1:], alone, atol=1e-6)


@for_rows("noise", [0.1, 1.0, 50.0])
@for_rows("steps", [1, 20])
def test_noise_alone_moves_a_coordinate_by_lr_for_a_step(noise, steps):
    """As SGD with the step size lr / noise moves it."""
    adam, rng, moved = NoisyAdam([DPSGD(1, 1, steps, LR, CLIP, noise)]), np.random.default_rng(0), 0.0
    for _ in range(steps):
        sums = torch.tensor(noise * rng.standard_normal((1, 4000)))
        moved = moved + adam.moves(sums, torch.zeros(1, 4000))
    deviation = float(moved.std()) / (LR * math.sqrt(steps))
    assert 0.7 < deviation <= 1.01


def test_a_signal_above_the_noise_moves_by_lr_whatever_its_size():
    for size in (10.0, 1000.0):
        adam, rng = NoisyAdam([DPSGD(1, 1, 20, LR, CLIP, 1.0)]), np.random.default_rng(0)
        for _ in range(20):
            move = adam.moves(torch.tensor(size + rng.standard_normal((1, 100))), torch.zeros(1, 100))
        assert float(move.mean()) == pytest.approx(LR, rel=0.02)


@pytest.mark.parametrize(("name", "code"), [("adam", "torch.optim:Adam"), ("adamw", "torch.optim:AdamW")])
def test_without_privacy_the_name_is_pytorchs(name, code):
    model = network()
    layout = Layout.of(float32_arrays(model))
    start = np.tile(layout.flatten(float32_arrays(model)), (2, 1))

    def trained(optimizer):
        config = LocalTrainingConfig(2, 3, LR, plugins=TrainingPlugins(optimizer=optimizer))
        rngs = [np.random.default_rng(i) for i in range(2)]
        return train(model, layout, start, [shard(1), shard(2)], rngs, config, batched=True)

    np.testing.assert_array_equal(trained(name), trained(code))
    assert TrainingPlugins(optimizer=name).named == {}


RUN = {"dataset": "digits", "clients": 6, "clusters": 2, "rounds": 2, "epsilon": 4.0, "samples-per-client": 40}


@pytest.mark.parametrize("strategy", ["f-cdpfl", "rc-dpfl", "ifca"])
def test_a_certified_run(tmp_path, strategy):
    config = RunConfig({**RUN, "strategy": strategy, "optimizer": "adam", "lr": LR, "batch-size": 10})
    with closing(RunFolder.create(tmp_path / "run", config)) as folder:
        assert run(folder, LocalGrid(6))["certified"]
        assert not folder.rounds()[-1].to_json().get("dropped")
        assert "optimizer-sha256" not in folder.certify()["public_inputs"]


def test_a_run_costs_what_it_costs_by_sgd():
    configs = [RunConfig({**RUN, "strategy": "f-cdpfl", "optimizer": name}) for name in ("sgd", "adam", "adamw")]
    assert len({str(sorted(config.plan.planned().items(), key=str)) for config in configs}) == 1
    assert len({config.plan for config in configs}) == 1


def test_the_server_bounds_updates_by_the_noise_of_a_step():
    plan = RunConfig({**RUN, "strategy": "f-cdpfl"}).plan.client_plans[0]
    noise = plan.noise_of_gradients(False) * plan.clip_norm / plan.batch(False)
    assert plan.update_noise(noise, optimizer="adam") == pytest.approx(plan.update_noise(1.0))
    assert plan.max_update_norm(50, noise, optimizer="adam") == pytest.approx(plan.max_update_norm(50, 1.0))
    steps = plan.steps(plan.batch(False))
    assert plan.update_noise(LR, optimizer="adam") == pytest.approx(LR * math.sqrt(steps))


def test_a_longer_update_is_shortened_to_what_the_server_accepts(tmp_path, monkeypatch):
    """As by the decay of large parameters, which the bound leaves out."""
    monkeypatch.setattr("coterie.privacy.record.RecordPlan.max_update_norm", lambda *_, **__: 1e-3)
    config = RunConfig({**RUN, "strategy": "f-cdpfl", "optimizer": "adamw", "lr": LR, "rounds": 1})
    with closing(RunFolder.create(tmp_path / "run", config)) as folder:
        run(folder, LocalGrid(6))
        assert not folder.rounds()[-1].to_json().get("dropped")
