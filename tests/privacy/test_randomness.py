"""Streams: secret unless asked otherwise, and apart from one another."""

import math

import numpy as np
from randomgen import AESCounter

from coterie.privacy import Streams, gaussian


def draw(streams, *key):
    return tuple(streams.stream(*key).random(4))


def test_seeded_streams_repeat_and_differ_by_seed_name_round_and_attempt():
    keys = [("noise", 1, 1), ("noise", 1, 2), ("noise", 2, 1), ("cohort", 1, 1), ("models",)]
    first = [draw(Streams(5), *key) for key in keys]
    assert first == [draw(Streams(5), *key) for key in keys]
    assert len({*first, draw(Streams(6), *keys[0])}) == 6


def test_unseeded_streams_never_repeat_and_are_cryptographic():
    streams = Streams()
    assert streams.secret
    assert not Streams(0).secret
    assert len({draw(streams, "noise", 1, 1) for _ in range(20)}) == 20
    assert isinstance(streams.stream("noise").bit_generator, AESCounter)


def test_gaussian_has_its_scale_and_shape():
    # 200,000 draws: the standard error of the standard deviation is 0.16 %.
    noise = gaussian(np.random.default_rng(0), 3.0, (2, 100_000))
    assert noise.shape == (2, 100_000)
    assert noise.dtype == np.float64
    assert abs(noise.std() / 3 - 1) < 0.01
    assert abs(noise.mean()) < 4 * 3 / math.sqrt(200_000)
    assert abs((noise**4).mean() / 81 - 3) < 0.1
    assert not gaussian(np.random.default_rng(0), 0.0, (3,)).any()
