"""Optimizers of the server: against PyTorch's, what noise does to them, and what becomes of their state."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.run_folders import model, run_in
from kit.tables import for_rows
from kit.toy_grids import quiet
from kit.toys import UP
from test_base import CLIENTS, ZERO, Stub, nothing, private

from coterie.fields import FieldError
from coterie.privacy import Banded, Joint, RRSlot
from coterie.server import ConfigError, RunConfig, RunFolder, planning
from coterie.strategies import FedAvg, ServerOptimizer
from coterie.strategies.registry import STRATEGIES
from coterie.wire import ClientConfig
from coterie.wire.messages import unpack_models

EXACT = np.zeros((1, 2))
MOMENTUM, ADAM = ServerOptimizer("momentum"), ServerOptimizer("adam")


def path(optimizer, means, step_size=0.1, noise=EXACT, shared=0):
    """(T, k, d) models after each of (T, k, d) means, from zero; and the arrays of the optimizer."""
    models, kept, visited = np.zeros(means.shape[1:]), {}, []
    for mean in means:
        step, kept = optimizer(kept, mean, noise, step_size, shared)
        models = models + step
        visited.append(models)
    return np.stack(visited), kept


def of_torch(make, means):
    """The same by an optimizer of PyTorch, which descends."""
    parameter = torch.zeros(means.shape[1:], dtype=torch.float64, requires_grad=True)
    optimizer, visited = make([parameter]), []
    for mean in means:
        parameter.grad = -torch.tensor(mean)
        optimizer.step()
        visited.append(parameter.detach().numpy().copy())
    return np.stack(visited)


MEANS = np.random.default_rng(0).standard_normal((30, 2, 5)) + 1.0


# ---- the rules -----------------------------------------------------------------------------------------------


@for_rows("momentum", [0.0, 0.5, 0.9, 0.99])
def test_momentum_is_that_of_pytorch_with_dampening(momentum):
    """Whose first step is undamped: it starts from a step of zero here."""
    means = np.concatenate([np.zeros((1, 2, 5)), MEANS])
    expected = of_torch(lambda p: torch.optim.SGD(p, 0.1, momentum=momentum, dampening=momentum), means)
    np.testing.assert_allclose(path(ServerOptimizer("momentum", momentum), means)[0], expected, atol=1e-6)


@for_rows("momentum", [0.0, 0.5, 0.9, 0.99])
def test_adam_is_that_of_pytorch_without_noise(momentum):
    expected = of_torch(lambda p: torch.optim.Adam(p, 0.1, betas=(momentum, 0.99), eps=0.0), MEANS)
    np.testing.assert_allclose(path(ServerOptimizer("adam", momentum), MEANS)[0], expected, atol=2e-6)


def test_sgd_keeps_nothing():
    visited, kept = path(ServerOptimizer(), MEANS)
    np.testing.assert_allclose(visited[-1], 0.1 * MEANS.sum(axis=0))
    assert kept == {}


@for_rows("scale", [1e-30, 1e-4, 1.0, 1e25])
def test_means_of_all_magnitudes_move_a_model_finitely(scale):
    for optimizer in (MOMENTUM, ADAM):
        visited, kept = path(optimizer, scale * MEANS)
        assert np.isfinite(visited).all()
        assert all(np.isfinite(values).all() for values in kept.values())
        assert (np.abs(np.diff(visited, axis=0)).max() <= 4 * scale * np.abs(MEANS).max()) or optimizer is MOMENTUM


def test_adam_subtracts_the_known_noise_and_never_amplifies_it():
    """Where there is no signal, its steps are those of momentum in units of the noise."""
    noise, rng = 0.2, np.random.default_rng(1)
    means = noise * rng.standard_normal((4000, 1, 50))
    means[..., :25] += 1.0  # with signal
    still = ServerOptimizer("adam", 0.0)
    visited, _ = path(still, means, 0.01, np.full((1, 2), noise))
    steps = np.diff(visited, axis=0)[-1000:, 0] / means[-1000:, 0] / 0.01
    assert steps.max() <= 1 / noise + 1e-6  # as SGD with the step size eta / sigma
    np.testing.assert_allclose(steps[:, 25:], 1 / noise, rtol=0.3)
    np.testing.assert_allclose(steps[:, :25].mean(), 1.0, rtol=0.02)  # 1 / sqrt(1 + 0.04 - 0.04)


@given(st.sampled_from([0.0, 0.5, 0.9, 0.97]), st.integers(1, 200), st.sampled_from(["sgd", "momentum", "adam"]))
def test_the_gain_of_white_noise(momentum, rounds, name):
    """The deviation of the last model is at most eta sigma sqrt(T) times the gain, and that without a signal."""
    optimizer, impulses = ServerOptimizer(name, momentum), np.eye(rounds)[:, None]
    if name == "adam":  # of the largest noise that a denominator knows: d = sigma
        weights = path(optimizer, impulses, 1.0, np.full((1, 2), 1e6))[0][-1] * 1e6
    else:
        weights = path(optimizer, impulses, 1.0)[0][-1]
    assert optimizer.gain(rounds) == pytest.approx(float(np.sqrt(np.mean(weights**2))), rel=1e-4)
    assert optimizer.gain(rounds) <= 1 + 1e-12 or name == "adam"


# ---- step sizes from public numbers --------------------------------------------------------------------------


def step_of(plan, name="adam", momentum=0.9):
    return planning.server_lr(plan, ServerOptimizer(name, momentum))


@for_rows("mechanism", [Joint, RRSlot, Banded])
@for_rows("name", ["sgd", "momentum", "adam"])
def test_the_noise_of_a_run_moves_a_parameter_by_the_same_at_most(mechanism, name):
    """Simulated, by the mechanism itself."""
    shape = {"clients": 40, "num_clusters": 2, "rounds": 20, "sampling_rate": 0.25, "clip_norm": 0.5}
    plan = mechanism(noise_multiplier=8.0, epsilon=math.inf, delta=1e-5, identifier_share=0.2, divisor="fixed", **shape)
    optimizer, size, rng = ServerOptimizer(name, 0.5), 2000, np.random.default_rng(0)
    step_size, state, kept, models = planning.server_lr(plan, optimizer), plan.new_state(), {}, np.zeros((2, size))
    for number in range(1, 21):
        empty = plan.contributions(size)
        at = plan.state_of(state, number)
        output = plan.of_round(number).perturb(empty, rng, np.random.default_rng(0), np.eye(2), at)
        assert output.sums[0].std() == pytest.approx(plan.noise_of_sums(number), rel=0.05)
        divisors = output.divisors[0][:, None]
        noise = plan.noise_of_sums(number) / np.repeat(divisors, 2, axis=1)
        step, kept = optimizer(kept, output.sums[0] / divisors, noise, step_size, 0)
        models += step
    assert models.std() <= 0.3 * 1.05
    assert models.std() >= 0.15


def test_adams_step_size_depends_on_rounds_alone_with_white_noise():
    assert step_of(private(4.0, rounds=100), momentum=0.0) == pytest.approx(0.3 / math.sqrt(101), rel=0.01)
    assert step_of(private(9.0, rounds=100)) == pytest.approx(step_of(private(4.0, rounds=100)))
    assert step_of(nothing(rounds=100), momentum=0.0) == 0.3 / math.sqrt(100)
    assert step_of(private(4.0, rounds=400)) < step_of(private(4.0, rounds=100))
    assert step_of(private(4.0, rounds=100), "momentum") == step_of(private(4.0, rounds=100), "sgd")


def test_at_record_level_noise_is_unknown_and_nothing_is_subtracted():
    settings = {"strategy": "fedavg", "privacy-unit": "record", "samples-per-client": 90}
    plan = planning.sketch(RunConfig({**settings, "server-optimizer": "adam"}))
    assert plan.noise_of_sums(1) == 0
    assert step_of(plan) == pytest.approx(0.3 / math.sqrt(plan.rounds), rel=0.1)
    assert step_of(plan, "momentum") == 1


# ---- state ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM])
def test_moved_models_take_their_state_along_and_new_ones_have_none(optimizer):
    _, kept = path(optimizer, MEANS[:, :, :4])
    given = {"other": np.arange(3), **kept}
    arrays = ServerOptimizer.rearranged(given, np.array([1, -1, 0]), np.array([1.0, 1.0, 0.5]))
    np.testing.assert_array_equal(arrays["other"], np.arange(3))
    later = np.tile(MEANS[0, :1, :4], (3, 1))
    step, _ = optimizer(arrays, later, np.zeros((3, 2)), 0.1, 0)
    whole, _ = optimizer(kept, later[:2], np.zeros((2, 2)), 0.1, 0)
    fresh, _ = optimizer({}, later, np.zeros((3, 2)), 0.1, 0)
    np.testing.assert_array_equal(step[0], whole[1])
    np.testing.assert_array_equal(step[1], fresh[1])
    assert not np.allclose(step[2], whole[0])  # half of its momentum
    np.testing.assert_array_equal(arrays["optimizer-mean"][2], kept["optimizer-mean"][0] / 2)


@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM])
def test_what_clusters_share_stays_shared_when_one_is_re_seeded(optimizer):
    shared = MEANS[:, :1, :2].repeat(2, axis=1)
    means = np.concatenate([shared, MEANS[:, :, 2:]], axis=2)
    _, kept = path(optimizer, means[:5], shared=2)
    arrays = ServerOptimizer.rearranged(kept, np.array([0, -1]), np.ones(2), shared=2)
    step, arrays = optimizer(arrays, means[5], np.zeros((2, 2)), 0.1, 2)
    whole, _ = optimizer(kept, means[5], np.zeros((2, 2)), 0.1, 2)
    np.testing.assert_array_equal(step[:, :2], whole[:, :2])
    np.testing.assert_array_equal(step[0], step[0])
    fresh, _ = optimizer({}, means[5], np.zeros((2, 2)), 0.1, 2)
    np.testing.assert_array_equal(step[1, 2:], fresh[1, 2:])


def test_another_shape_starts_anew():
    _, kept = path(ADAM, MEANS)
    step, _ = ADAM(kept, MEANS[0, :1], EXACT, 0.1, 0)
    np.testing.assert_array_equal(step, ADAM({}, MEANS[0, :1], EXACT, 0.1, 0)[0])


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "fedper", "model": "mlp-32"},
        {"strategy": "fesem", "clusters": 2},
        {"strategy": "rr-cluster", "clusters": 2},
        {"strategy": "ifca", "clusters": 0, "max-clusters": 4, "rounds": 20},
        {"strategy": "fedavg", "privacy-unit": "none", "aggregator": "median"},
        {"strategy": "lcfl", "clusters": 2, "warm-up-rounds": 1},
        {"strategy": "rc-dpfl", "clusters": 2, "privacy-unit": "none"},
        {"strategy": "f-cdpfl", "clusters": 2, "privacy-unit": "record", "epsilon": 50},
        {"strategy": "oracle", "clusters": 2, "groups": "2"},
    ],
    ids=lambda settings: settings["strategy"],
)
def test_every_method_that_steps_by_means(tmp_path, settings):
    common = {"clients": 12, "rounds": 3, "local-epochs": 1, "samples-per-client": 20, "model": "linear", "seed": 0}
    config = RunConfig({**common, "evaluate": "off", "server-optimizer": "adam", **settings})
    outcome = run_in(RunFolder.create(tmp_path / "run", config))
    assert outcome["rounds"] == config.run.rounds
    assert all(np.isfinite(values).all() for values in model(tmp_path / "run").values())


def test_a_method_that_replaces_its_arrays_keeps_those_of_the_optimizer():
    class Forgetful(FedAvg):
        name = "forgetful"

        def round(self, number, models):
            stepped = yield from super().round(number, models)
            self.state = {"mine": np.array([number])}
            return stepped

    optimizer = ServerOptimizer("momentum", 0.5)
    strategy = Forgetful(nothing(rounds=3), server_optimizer=optimizer, **quiet())
    moved = unpack_models(strategy.start(Stub(), ZERO, 3).arrays)[0]
    np.testing.assert_allclose(moved, [(0.5 + 0.75 + 0.875) * UP], rtol=1e-6)
    assert sorted(strategy.state) == ["mine", "optimizer-mean", "optimizer-steps"]
    assert strategy.statistics.accepted == 3 * CLIENTS


# ---- settings ------------------------------------------------------------------------------------------------


def test_the_momentum_without_a_setting():
    found = {name: RunConfig({"server-optimizer": name}).server_optimizer for name in ("momentum", "adam")}
    assert {name: optimizer.momentum for name, optimizer in found.items()} == {"momentum": 0.9, "adam": 0.0}


def test_optimizers_that_do_not_exist_are_refused():
    with pytest.raises(ConfigError, match="server-optimizer = 'adagrad'"):
        RunConfig({"server-optimizer": "adagrad"})
    with pytest.raises(FieldError, match="momentum must be a finite number at least 0 and below 1"):
        ServerOptimizer("momentum", 1.0)


@for_rows("name", sorted(STRATEGIES))
def test_methods_whose_models_change_otherwise_refuse_it(name):
    unit = STRATEGIES[name].units[-1]
    values = {"strategy": name, "server-optimizer": "momentum", "privacy-unit": unit}
    values |= {"samples-per-client": 60} if unit == "record" else {}
    if STRATEGIES[name].robust:
        assert RunConfig(values).server_optimizer == MOMENTUM
    else:
        with pytest.raises(ConfigError, match=f"{name} supports server-optimizer sgd, not momentum"):
            RunConfig(values)


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_clients_accept_what_the_server_does(name):
    sent = RunConfig({"server-optimizer": name}).for_clients()
    ClientConfig.from_record(sent)
    assert not any(key.startswith("server-") for key in sent)  # the server's alone
