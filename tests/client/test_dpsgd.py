"""Record-level DP-SGD: a loop over records is the oracle; then what the guarantee stands on, one by one."""

import dataclasses
import math
import subprocess
import sys
import threading
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from coterie import models as networks
from coterie.client import dpsgd, gradients
from coterie.client.dpsgd import DPSGD, train_privately
from coterie.client.ghost import ChainClipping, GhostClipping
from coterie.client.gradients import PerRecord
from coterie.client.penalties import Penalty
from coterie.datasets import Shard, TestSet
from coterie.privacy import Streams, gaussian
from coterie.tasks import AUTO
from coterie.wire.messages import Layout

#: Shape of an example and number of classes for every network; images are small to be quick.
DATA = {
    "linear": ((1, 6, 6), 3),
    "mlp-32": ((1, 6, 6), 3),
    "mlp-200": ((1, 6, 6), 3),
    "cnn-tiny": ((1, 8, 8), 3),
    "cnn-small": ((1, 8, 8), 3),
    "lenet": ((1, 12, 12), 3),
    "lstm-char": ((6,), 7),
    "regression": ((5,), 0),
}
#: Networks that can be trained all clients at once.
CHAINS = ("linear", "mlp-32", "mlp-200", "regression")
#: The reference, one client after the other, and all clients at once.
WAYS = {"opacus": {"batched": False, "ghost": False}, "ghost": {"batched": False}, "chain": {"batched": True}}
ONE = DPSGD(num_examples=4, batch_size=4, epochs=1, lr=1.0, clip_norm=1.0, noise_multiplier=0.0)


def shard(size, shape, classes, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((size, *shape)).astype(np.float32)
    if shape == DATA["lstm-char"][0]:
        x = rng.integers(classes, size=(size, *shape))
    y = rng.integers(classes, size=size) if classes else rng.standard_normal(size).astype(np.float32)
    return Shard(seed, 0, x, y, TestSet(x, y))


def vectors(model, shards):
    """The layout of a network and one start for each client."""
    layout = Layout.of(dict(model.named_parameters()))
    rng = np.random.default_rng(9)
    scales = [1 / math.sqrt(math.prod(shape[1:])) if len(shape) > 1 else 0.1 for shape in layout.shapes]
    start = [rng.normal(0, scale, (len(shards), size)) for scale, size in zip(scales, layout.sizes, strict=True)]
    return layout, np.concatenate(start, axis=1).astype(np.float32)


def generators(count, salt):
    return [np.random.default_rng([salt, i]) for i in range(count)]


class GroupNormBlock(nn.Module):
    """A residual block as resnet18-gn has them, with in-place ReLU and a layer whose gradient is a rounding error."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(4, 4)
        self.second, self.relu = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.ReLU(inplace=True)
        self.output = nn.Linear(4 * 64, 3)

    def forward(self, x):
        x = self.relu(self.norm(self.first(x)))
        return self.output(self.relu(x + self.second(x)).flatten(1))


def oracle(model, layout, start, data, coins, noises, own):
    """One record after the other, in plain autograd."""
    vector = torch.tensor(start)
    loss = mse_loss if data.y.dtype.kind == "f" else cross_entropy
    for _ in range(own.epochs * (own.num_examples // own.batch_size)):
        total = np.zeros(layout.size)
        taken = np.flatnonzero(coins.random(len(data.y)) < own.batch_size / own.num_examples)
        for i in taken:
            parameters = {name: value.clone().requires_grad_() for name, value in layout.split(vector).items()}
            output = torch.func.functional_call(model, parameters, (torch.tensor(data.x[i : i + 1]),))
            gradients = torch.autograd.grad(loss(output, torch.tensor(data.y[i : i + 1])), list(parameters.values()))
            flat = torch.cat([gradient.flatten() for gradient in gradients]).double().numpy()
            total += flat / max(1, np.linalg.norm(flat) / own.clip_norm)
        total += gaussian(noises, own.noise_multiplier * own.clip_norm, total.shape)
        pull = own.penalty.weight * (vector.double() - torch.tensor(start))
        vector = (vector.double() - own.lr * (torch.tensor(total) / own.batch_size + pull)).float()
    return vector.numpy() - start


CASES = {
    # Two clients with other N, b, K, z and c; the second's true number is not N.
    "poisson": (DPSGD(12, 4, 2, 0.1, 0.7, 0.02), DPSGD(11, 3, 3, 0.1, 2.0, 0.01)),
    "proximal": (
        DPSGD(12, 4, 2, 0.1, 0.7, 0.02, penalty=Penalty("proximal", 3.0)),
        DPSGD(11, 3, 3, 0.1, 2.0, 0.01, penalty=Penalty("proximal", 3.0)),
    ),
    "full batch": (DPSGD(12, 12, 3, 0.1, 0.7, 0.02), DPSGD(11, 11, 2, 0.1, 2.0, 0.01)),
}


@cache
def by_a_loop(name, case):
    """A network, its shards, and the updates of a loop over their records, which takes half of the test's time."""
    shape, classes = DATA.get(name, ((1, 8, 8), 3))
    model = networks.build(name, shape, classes) if name in DATA else GroupNormBlock()
    shards = [shard(12, shape, classes, 1), shard(12, shape, classes, 2)]
    layout, start = vectors(model, shards)
    own = zip(start, shards, generators(2, 1), generators(2, 2), CASES[case], strict=True)
    return model, shards, layout, start, np.stack([oracle(model, layout, *each) for each in own])


@pytest.mark.parametrize(("chunk", "case"), [(256, "poisson"), (5, "proximal"), (5, "full batch")])
@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, way) for way in ("opacus", "ghost") for name in (*DATA, "block")),
        *((name, "chain") for name in DATA if name in CHAINS),
    ],
)
def test_a_loop_over_records_gives_the_same(name, way, chunk, case, monkeypatch):
    model, shards, layout, start, wanted = by_a_loop(name, case)
    monkeypatch.setattr(dpsgd, "_MAX_RECORDS", chunk)
    monkeypatch.setattr(gradients, "_MAX_NUMBERS", 2 * layout.size)  # two records a float64 copy
    for unused in {"opacus": [GhostClipping], "ghost": [PerRecord], "chain": [GhostClipping, PerRecord]}[way]:
        monkeypatch.delattr(unused, "clipped_sum")
    found = train_privately(model, layout, start, shards, generators(2, 1), generators(2, 2), CASES[case], **WAYS[way])
    assert np.abs(wanted).max() > 0.01
    assert np.linalg.norm(found - wanted) <= 1e-5 * np.linalg.norm(wanted)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("name", ["linear", "cnn-tiny"])
def test_a_thread_that_draws_noise_ahead_draws_the_same(name):
    """Each step gets noise of its own, and what the round releases of norms is drawn after it."""
    own = tuple(dataclasses.replace(one, noise_multiplier=2.0, noise_of_norms=0.5) for one in CASES["poisson"])
    shape, classes = DATA[name]
    model = networks.build(name, shape, classes)
    shards = [shard(12, shape, classes, 1), shard(12, shape, classes, 2)]
    layout, start = vectors(model, shards)

    def trained(threads):
        torch.set_num_threads(threads)
        below = np.empty(2)
        rngs = generators(2, 1), generators(2, 2)
        return train_privately(model, layout, start, shards, *rngs, own, batched=True, below=below), below

    for alone, ahead in zip(trained(1), trained(2), strict=True):
        np.testing.assert_allclose(ahead, alone, rtol=1e-5)


@pytest.mark.usefixtures("two_threads")
def test_a_step_that_fails_ends_the_thread_that_draws_noise(monkeypatch):
    shape, classes = DATA["linear"]
    model, data = networks.build("linear", shape, classes), shard(12, shape, classes)
    layout, start = vectors(model, [data])
    before = threading.active_count()
    monkeypatch.setattr(dpsgd, "short", lambda *_: 1 / 0)
    own = dataclasses.replace(CASES["poisson"][0], noise_multiplier=2.0, noise_of_norms=0.5)
    with pytest.raises(ZeroDivisionError):
        train_privately(model, layout, start, [data], generators(1, 1), generators(1, 2), [own], batched=True)
    assert threading.active_count() == before


def linear_sums(x, y, own, coins=None, way="opacus"):
    """(d,) what one step of softmax regression from zero subtracts, times b: the noisy sum."""
    x = np.asarray(x, np.float32)
    model = networks.build("linear", x.shape[1:], 2)
    layout = Layout.of(dict(model.named_parameters()))
    start = np.zeros((1, layout.size), np.float32)
    coins = coins or np.random.default_rng(3)
    data = Shard(0, 0, x, np.asarray(y, np.int64), TestSet(x, y))
    moved = train_privately(model, layout, start, [data], [coins], [np.random.default_rng(4)], [own], **WAYS[way])
    return -moved[0].astype(np.float64) * own.batch_size / own.lr


all_ways = pytest.mark.parametrize("way", WAYS)


@all_ways
def test_a_step_by_hand(way):
    # One pixel 2, label 1, parameters zero: the gradient is (1, -1, 1/2, -1/2), of norm sqrt(2.5), clipped to 1.
    x = np.full((4, 1, 1, 1), 2.0)
    gradient = np.array([1, -1, 0.5, -0.5]) / math.sqrt(2.5)
    np.testing.assert_allclose(linear_sums(x, [1] * 4, ONE, way=way), 4 * gradient, rtol=2e-6)
    loose = dataclasses.replace(ONE, clip_norm=2.0)
    np.testing.assert_allclose(linear_sums(x, [1] * 4, loose, way=way), [4, -4, 2, -2], rtol=1e-6)


@all_ways
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_record_that_is_not_finite_contributes_nothing(bad, way):
    rng = np.random.default_rng(0)
    good, labels = rng.standard_normal((3, 1, 2, 2)), [0, 1, 1]
    worse = good[:1].copy()
    worse[0, 0, 1, 0] = bad
    expected = linear_sums(good, labels, ONE, way=way)
    found = linear_sums(np.concatenate([good[:1], worse, good[1:]]), [0, 1, 1, 1], ONE, way=way)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@all_ways
@pytest.mark.parametrize("scale", [1e-42, 1e-22, 1.0, 1e4, 1e25, 3e38])
def test_a_record_adds_at_most_the_clipping_norm_however_large(scale, way):
    x = np.array([[[[scale, -scale / 3]]]], np.float64)
    length = np.linalg.norm(linear_sums(x, [1], ONE, way=way))
    assert 0.5 < length <= 1  # the bias alone has sqrt(1/2)


def test_zero_gradients_stay_zero():
    x, y = np.zeros((4, 3), np.float32), np.zeros(4, np.float32)
    model = networks.build("regression", (3,), 0)
    layout = Layout.of(dict(model.named_parameters()))
    data = Shard(0, 0, x, y, TestSet(x, y))
    for way in WAYS.values():
        moved = train_privately(
            model, layout, np.zeros((1, 4), np.float32), [data], generators(1, 1), generators(1, 2), [ONE], **way
        )
        np.testing.assert_array_equal(moved, 0)


class Fixed:
    """Coins that are given, one for each record."""

    def __init__(self, coins):
        self.coins = coins

    def random(self, size):
        assert size == len(self.coins)
        return np.array(self.coins)


@all_ways
@pytest.mark.parametrize("gone", [0, 3, 6])
def test_one_record_moves_the_noisy_sum_by_at_most_the_clipping_norm(gone, way):
    # A record takes its own coin with it: the others keep theirs. N stays, as do noise, steps and divisor.
    rng = np.random.default_rng(7)
    x, y, coins = rng.standard_normal((7, 1, 2, 2)), rng.integers(2, size=7), [0.1, 0.9, 0.2, 0.3, 0.05, 0.99, 0.4]
    own = DPSGD(7, 4, 1, 1.0, clip_norm=0.3, noise_multiplier=1.0)
    rest = np.arange(7) != gone
    whole = linear_sums(x, y, own, Fixed(coins), way)
    less = linear_sums(x[rest], y[rest], own, Fixed([coins[i] for i in np.flatnonzero(rest)]), way)
    assert np.linalg.norm(whole - less) == pytest.approx(0.3, rel=1e-5)
    assert np.linalg.norm(whole - less) <= 0.3 + 1e-6  # the update is rounded to float32
    unseen = linear_sums(x, y, own, Fixed([2.0] * 7), way)
    assert np.linalg.norm(unseen) > 0.3  # the noise alone


class Given(PerRecord):
    """Gradients are given in the place of records."""

    def __init__(self):
        pass

    def gradients(self, x, y):
        return [x.flatten(1), x[:, 0, 0]]


def test_sums_keep_the_bound_before_they_are_rounded():
    x = torch.randn(1, 200, 1, 5, 5, generator=torch.Generator().manual_seed(1))
    model = networks.build("mlp-32", (1, 5, 5), 3)
    layout, start = vectors(model, [None])
    there, clip = torch.ones(1, 200, dtype=torch.bool), torch.tensor([[0.01]], dtype=torch.float64)

    def chain(there):
        y = torch.zeros(1, 200, dtype=torch.int64)
        return ChainClipping(model, AUTO).sums(layout.split(torch.tensor(start)), x, y, there, clip)[0]

    less = there.clone()
    less[0, 17] = False
    for moved in (
        Given().clipped_sum(x[0], None, 0.01)[0] - Given().clipped_sum(x[0, less[0]], None, 0.01)[0],
        chain(there) - chain(less),
    ):
        assert moved.dtype == torch.float64
        assert 1 - 2e-6 < float(moved.norm()) <= 1


@all_ways
def test_an_empty_batch_is_a_step_of_noise(way):
    own = DPSGD(4, 2, 1, 0.5, clip_norm=0.3, noise_multiplier=2.0)
    x, y = np.ones((4, 1, 2, 2)), [1] * 4
    rng = np.random.default_rng(4)
    expected = gaussian(rng, 0.6, (10,)) + gaussian(rng, 0.6, (10,))  # both steps of the round
    np.testing.assert_allclose(linear_sums(x, y, own, Fixed([1.0] * 4), way), expected, rtol=1e-5)
    np.testing.assert_allclose(linear_sums(x[:0], y[:0], own, Fixed([]), way), expected, rtol=1e-5)


@all_ways
def test_noise_has_the_standard_deviation_that_is_accounted(way):
    # z c / b times lr, in each of d = 40,000 coordinates of one step; 5 deviations of its estimate, flake rate 6e-7.
    own = DPSGD(8, 8, 1, lr=0.5, clip_norm=0.25, noise_multiplier=3.0)
    shape = (1, 100, 199)
    model = networks.build("linear", shape, 2)
    layout = Layout.of(dict(model.named_parameters()))
    data = shard(0, shape, 2)
    moved = train_privately(
        model, layout, np.zeros((1, layout.size), np.float32), [data], generators(1, 1), [Streams().stream("noise")],
        [own], **WAYS[way],
    )  # fmt: skip
    assert np.std(moved) == pytest.approx(0.5 * 3.0 * 0.25 / 8, rel=5 / math.sqrt(2 * layout.size))


@all_ways
@pytest.mark.parametrize("true", [9, 10, 11])
def test_only_the_public_number_of_records_is_used(true, way):
    # Steps, rate and divisor are those of N = 10, b = 5, K = 3, whatever the true number.
    class Counted:
        asked, rng = 0, np.random.default_rng(5)

        def random(self, size):
            assert size == true
            self.asked += 1
            return np.full(size, 0.4999 if self.asked == 1 else 0.5)  # all below 5 / 10, then none

    coins = Counted()
    x = np.full((true, 1, 1, 1), 2.0)
    own = DPSGD(10, 5, 3, lr=1.0, clip_norm=1.0, noise_multiplier=0.0)
    found = linear_sums(x, [1] * true, own, coins, way)
    assert coins.asked == own.steps == 6
    np.testing.assert_allclose(found, true * np.array([1, -1, 0.5, -0.5]) / math.sqrt(2.5), rtol=2e-6)


def test_steps_round_down_as_they_are_accounted():
    sizes = (6600, 32, 1), (6600, 6600, 2), (10, 4, 3)
    assert [DPSGD(*size, 1.0, 1.0, 1.0).steps for size in sizes] == [206, 2, 6]


def test_every_record_is_taken_with_probability_b_over_n():
    own = DPSGD(200, 20, 1, 1.0, 1.0, 1.0)
    rng = np.random.default_rng(0)
    counts = np.zeros(201)
    sizes = []
    for _ in range(2000):
        taken = own.sample(rng, 201)
        counts[taken] += 1
        sizes.append(len(taken))
    # Five deviations of each estimate.
    assert np.abs(counts / 2000 - 0.1).max() < 5 * math.sqrt(0.09 / 2000)
    assert np.mean(sizes) == pytest.approx(20.1, abs=5 * math.sqrt(201 * 0.09 / 2000))
    assert np.var(sizes) == pytest.approx(201 * 0.09, rel=5 * math.sqrt(2 / 2000))  # batches of fixed size have 0
    assert len(DPSGD(200, 200, 1, 1.0, 1.0, 1.0).sample(rng, 201)) == 201


def test_a_batch_of_more_records_than_there_are_is_refused():
    with pytest.raises(ValueError, match="batch-size must be at most num-examples = 4, not 5"):
        dataclasses.replace(ONE, batch_size=5)


FULL_BATCH = """
import os
import re
from pathlib import Path
import numpy as np
from coterie import models
from coterie.client.dpsgd import DPSGD, train_privately
from coterie.datasets import Shard
from coterie.wire.messages import Layout
size = 6000
x = np.zeros((60_000, 1, 28, 28), np.float32)[:size]
net = models.build("cnn-tiny", (1, 28, 28), 10)
layout = Layout.of(dict(net.named_parameters()))
rng = np.random.default_rng(0)
start, shards = np.zeros((1, layout.size), np.float32), [Shard(0, 0, x, np.zeros(size, np.int64), None)]
own = [DPSGD(size, size, 1, 0.1, 1.0, 1.0)]
for ghost in (True, False):
    if os.fork() == 0:
        train_privately(net, layout, start, shards, [rng], [rng], own, batched=False, ghost=ghost)
        # Of this process alone: ru_maxrss also counts what the process that started it held when it forked.
        print(int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024, flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a program is known on Linux alone")
@pytest.mark.slow
def test_a_full_batch_is_bounded_in_memory():
    # 6000 records of 11,350 gradients, at once, would be 270 MB in float32, twice that in float64, and activations
    # several times as much. A tenth of the 60,000 has the same peak: chunks do not grow.
    done = subprocess.run([sys.executable, "-c", FULL_BATCH], capture_output=True, check=True, text=True)
    with_ghost, with_opacus = map(float, done.stdout.split())
    assert 0 < with_ghost < 1500
    assert 0 < with_opacus < 1500


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none")
@all_ways
@pytest.mark.parametrize("name", ["mlp-32", "cnn-tiny", "lstm-char"])
def test_a_gpu_gives_the_same(name, way):
    shape, classes = DATA[name]
    model = networks.build(name, shape, classes)
    shards = [shard(12, shape, classes, i) for i in range(2)]
    layout, start = vectors(model, shards)

    def on(device):
        settings = [dataclasses.replace(own, device=device) for own in CASES["poisson"]]
        return train_privately(model, layout, start, shards, generators(2, 1), generators(2, 2), settings, **WAYS[way])

    np.testing.assert_allclose(on("cuda"), on("cpu"), atol=2e-3)  # convolutions may be in TF32


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("chunk", [256, 5])
def test_the_share_of_short_gradients_is_that_of_the_records(way, chunk, monkeypatch):
    """Two clients of different sizes; NaN is long. All gradients are those of the start: lr is 0."""
    monkeypatch.setattr(dpsgd, "_MAX_RECORDS", chunk)
    shards = [shard(12, (4,), 3, 1), shard(9, (4,), 3, 2)]
    shards[0].x[3] = np.nan
    model = networks.build("linear", (4,), 3)
    layout, start = vectors(model, shards)
    rng = np.random.default_rng(0)
    norms = [
        [
            float(np.linalg.norm(oracle(model, layout, start[i], one, rng, rng, DPSGD(1, 1, 1, 1.0, 1e6, 0.0))))
            for one in (dataclasses.replace(each, x=each.x[j : j + 1], y=each.y[j : j + 1]) for j in range(len(each.y)))
        ]
        for i, each in enumerate(shards)
    ]
    threshold = 1.0001 * float(np.nanmedian(norms[0]))
    own = [DPSGD(len(each.y), len(each.y), 2, 0.0, threshold / 2, 0.0, norm_threshold=threshold) for each in shards]
    own = [dataclasses.replace(each, noise_of_norms=0.0) for each in own]
    found = np.zeros(2)
    train_privately(model, layout, start, shards, generators(2, 1), generators(2, 2), own, below=found, **WAYS[way])
    ramps = [np.interp(np.nan_to_num(each, nan=np.inf) / threshold, [0.75, 1.25], [1, 0]) for each in norms]
    assert found == pytest.approx([ramp.mean() for ramp in ramps], rel=1e-5)
    assert 0 < found[0] < 1


@pytest.mark.parametrize("threshold", [1e-6, 1.0, 1e9])
def test_rounding_of_norms_at_the_threshold_hardly_moves_the_count(threshold):
    """A server may choose the threshold at the norm of all records but one, whose presence changes their last bits."""
    norms = torch.full((20_000,), threshold, dtype=torch.float64)
    there, gone = (dpsgd.short(norms * (1 + rounding), threshold).sum() for rounding in (1e-7, -1e-7))
    assert abs(there - gone) < 0.01
    extremes = dpsgd.short(torch.tensor([0.0, 0.75, 1.25, 1e300, math.inf, math.nan]).double() * threshold, threshold)
    assert extremes.tolist() == pytest.approx([0.5, 0.5, -0.5, -0.5, -0.5, -0.5])


def test_the_share_of_short_gradients_has_the_planned_noise():
    """Of all K floor(N / b) = 3 * 9 steps; the divisor is what they contain on average."""
    own = DPSGD(103, 11, 3, 0.1, 1.0, 0.7, norm_threshold=2.0, noise_of_norms=5.0)
    rng, deviation = np.random.default_rng(0), 5 * math.sqrt(27) / (27 * 11)
    shares = [own.below(40.0, rng) for _ in range(4000)]
    assert np.mean(shares) == pytest.approx(0.5 + 40 / (27 * 11), abs=4 * deviation / math.sqrt(4000))
    assert np.std(shares) == pytest.approx(deviation, rel=4 / math.sqrt(2 * 4000))
    assert math.isnan(dataclasses.replace(own, noise_of_norms=None).below(40.0, rng))
