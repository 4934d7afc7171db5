"""Noise of a GPU: the key stream of ChaCha20, normal numbers without correlations, and another key for each round."""

import dataclasses

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from kit.tables import for_rows
from scipy import stats

from coterie import models as networks
from coterie.client import device_noise, dpsgd
from coterie.client.device_noise import DeviceNoise, is_secret
from coterie.client.dpsgd import DPSGD, train_privately
from coterie.datasets import Shard, TestSet
from coterie.privacy import Streams
from coterie.wire.messages import Layout

KEY = bytes(range(32))


def stream(size, begin=0):
    """Words of the key stream as the library computes them, from a 64-bit block number on."""
    nonce = begin.to_bytes(8, "little") + bytes(8)
    raw = Cipher(algorithms.ChaCha20(KEY, nonce), mode=None).encryptor().update(bytes(4 * size))
    return np.frombuffer(raw, "<i4").reshape(-1, 16)


def gaussian(std, size):
    return DeviceNoise([KEY], "cpu").gaussian(torch.tensor([std], dtype=torch.float64), size)[0]


@for_rows("begin", [0, 7, 2**31 - 2, 2**32 - 2, 2**40])
def test_the_stream_is_that_of_the_library(begin):
    noise = DeviceNoise([KEY], "cpu")
    noise._block = begin
    found = torch.cat([noise._words(16 * 4)[0], noise._words(16 * 2)[0]])
    np.testing.assert_array_equal(found.reshape(-1, 16).numpy(), stream(16 * 6, begin))


def test_no_word_is_used_twice():
    noise = DeviceNoise([KEY], "cpu")
    words = np.concatenate([noise._words(count)[0].numpy() for count in (1, 16, 17, 40)])
    assert len(np.unique(words)) == len(words)


def test_noise_is_normal_and_independent():
    values = gaussian(2.0, 400_000).numpy() / 2
    assert values.dtype == np.float64
    assert stats.kstest(values, "norm").pvalue > 1e-3
    assert stats.kurtosis(values) == pytest.approx(0, abs=0.03)
    for lag in (1, 2, 3, 1000):
        assert abs(np.corrcoef(values[:-lag], values[lag:])[0, 1]) < 5 / np.sqrt(len(values))
        assert abs(np.corrcoef(values[:-lag] ** 2, values[lag:] ** 2)[0, 1]) < 5 / np.sqrt(len(values))


def test_uniform_numbers_never_vanish(monkeypatch):
    noise = DeviceNoise([KEY], "cpu")
    monkeypatch.setattr(noise, "_words", lambda count: torch.zeros(1, count, dtype=torch.int32))
    assert noise._uniform(2).tolist() == [[2.0**-65] * 2]
    assert torch.isfinite(noise.gaussian(torch.ones(1), 3)).all()
    monkeypatch.setattr(noise, "_words", lambda count: torch.full((1, count), -1, dtype=torch.int32))
    assert noise._uniform(1).tolist() == [[1.0]]


@pytest.mark.parametrize("size", [0, 1, 5, 9])
def test_long_noise_is_drawn_in_parts(size, monkeypatch):
    monkeypatch.setattr(device_noise, "_AT_ONCE", 4)
    noise = gaussian(1.0, size)
    assert noise.shape == (size,)
    assert len(np.unique(noise)) == size


def test_a_number_is_the_sum_of_four_draws_from_four_pairs(monkeypatch):
    """The two numbers of a pair go to different coordinates, and each coordinate has numbers of four pairs."""
    size, rng = 6, np.random.default_rng(0)
    uniform = torch.tensor(rng.uniform(0.1, 0.9, (1, 2, 2, size)))  # lengths and angles of 2 x 6 pairs

    def drawn(numbers):
        noise = DeviceNoise([KEY], "cpu")
        monkeypatch.setattr(noise, "_uniform", lambda count: numbers.reshape(1, count))
        return noise._normal(size)[0]

    base, of_coordinate = drawn(uniform), [0] * size
    for group in range(2):
        for place in range(size):
            other = uniform.clone()
            other[0, :, group, place] = 0.95
            moved = torch.nonzero(drawn(other) != base).flatten().tolist()
            assert len(moved) == 2, (group, place)
            for coordinate in moved:
                of_coordinate[coordinate] += 1
    assert of_coordinate == [4] * size


def test_streams_together_are_those_apart():
    other = bytes(reversed(KEY))
    stds = torch.tensor([1.0, 3.0], dtype=torch.float64)
    both = DeviceNoise([KEY, other], "cpu").gaussian(stds, 50)
    assert torch.equal(both[0], gaussian(1.0, 50))
    assert torch.equal(both[1], DeviceNoise([other], "cpu").gaussian(stds[1:], 50)[0])


def test_streams_without_a_seed_are_secret():
    assert is_secret(Streams().stream("noise"))
    assert not is_secret(Streams(3).stream("noise"))


@pytest.mark.parametrize("secret", [True, False])
def test_dp_sgd_on_a_device_draws_its_noise_there(secret, monkeypatch):
    """Without a seed; with one, noise is that of the CPU. Each client and each round has another key."""
    keys, shape = [], (1, 6, 6)

    class Noted(DeviceNoise):
        def __init__(self, given, device):
            keys.extend(given)
            super().__init__(given, device)

    monkeypatch.setattr(dpsgd, "DeviceNoise", Noted)
    monkeypatch.setattr(dpsgd, "_makes_noise", lambda device, rngs: all(map(is_secret, rngs)))
    rng = np.random.default_rng(0)
    x, y = np.zeros((4, *shape), np.float32), rng.integers(3, size=4)
    shards = [Shard(client, 0, x, y, TestSet(x, y)) for client in range(2)]
    model = networks.build("linear", shape, 3)
    layout = Layout.of(dict(model.named_parameters()))
    own = DPSGD(4, 4, 50, 1.0, 1.0, 3.0)
    own = [own, dataclasses.replace(own, noise_multiplier=1.0)]
    start = np.zeros((2, layout.size), np.float32)

    def trained():
        noises = [Streams(None if secret else client).stream("noise") for client in range(2)]
        return train_privately(model, layout, start, shards, [rng] * 2, noises, own, batched=True)

    first, second = trained(), trained()
    assert len(set(keys)) == len(keys) == (4 if secret else 0)
    assert np.array_equal(first, second) != secret
    (name,) = [name for name in layout.names if name.endswith("weight")]
    for one, values in zip(own, layout.split(first)[name], strict=True):  # records are zero: noise alone moves weights
        assert values.std() == pytest.approx(one.noise_multiplier * np.sqrt(50) / 4, rel=0.25)
