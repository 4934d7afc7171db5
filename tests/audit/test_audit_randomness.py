"""The audit of samplers, keys and noise finds what is broken.

Seeded tests never fail by chance. Of secret keys, two of 16,384 are equal with probability 4e-31, and a bit is the same
in all of them with probability 2^-16376.
"""

import secrets

import numpy as np
import pytest

from coterie.audit.randomness import audit_randomness, keys, poisson_sampler, resolution, slot_sampler
from coterie.privacy import Joint, RRSlot, Streams, randomness

SAMPLE = Joint.sample
SLOTS = RRSlot.sample


def failed(findings):
    return [f.attack for f in findings if f.failed]


def test_what_is_shipped_holds():
    findings = audit_randomness(["joint", "rr-slot"], Streams(0))
    assert len(findings) == 10
    assert not [f for f in findings if f.failed]


@pytest.mark.parametrize("bits", [16, 127])
def test_short_keys_are_found(monkeypatch, bits):
    monkeypatch.setattr(randomness.secrets, "randbits", lambda _, randbits=secrets.randbits: randbits(bits))
    repeats, constant = keys()
    assert constant.violated
    assert constant.bound == 128 - bits
    if bits == 16:  # 2,000 are expected, with a standard deviation of 45
        assert repeats.violated
        assert 1500 < repeats.bound < 2500


def again(self, rng, number):
    """An empty cohort is drawn again."""
    cohort = SAMPLE(self, rng, number)
    return cohort if len(cohort) else again(self, rng, number)


def some(self, rng, number):
    """A cohort of fixed size in place of coins."""
    return np.sort(rng.permutation(self.clients)[: round(self.clients * self.sampling_rate)])


def couples(self, rng, number):
    """One coin for two clients."""
    return np.flatnonzero(np.repeat(rng.random(self.clients // 2), 2) < self.sampling_rate)


@pytest.mark.parametrize(
    ("sampler", "attack"),
    [
        (again, "empty cohort"),
        (some, "participation of two clients"),
        (couples, "participation of two clients"),
        (
            lambda self, rng, number: SAMPLE(self, np.random.default_rng(0), number),
            "participation of a client in two rounds",
        ),
        (lambda self, rng, number: np.flatnonzero(rng.random(self.clients) < 0.27), "participation of a client"),
    ],
)
def test_a_sampler_that_is_not_poisson_is_found(monkeypatch, sampler, attack):
    monkeypatch.setattr(Joint, "sample", sampler)
    assert attack in failed(poisson_sampler(Streams(0)))


@pytest.mark.parametrize(
    ("sampler", "attack"),
    [
        (SAMPLE, "cohort of another size"),
        (lambda self, rng, number: np.arange(self.cohort_size), "participation of two clients"),
        (
            lambda self, rng, number: SLOTS(self, np.random.default_rng(0), number),
            "participation of a client in two rounds",
        ),
    ],
)
def test_slots_that_are_not_random_are_found(monkeypatch, sampler, attack):
    monkeypatch.setattr(RRSlot, "sample", sampler)
    assert attack in failed(slot_sampler(Streams(0)))


class Single(np.random.Generator):
    """Draws float32 numbers."""

    def standard_normal(self, size):
        return super().standard_normal(size, dtype=np.float32)


def test_noise_of_single_precision_is_found(monkeypatch):
    stream = Streams.stream
    monkeypatch.setattr(Streams, "stream", lambda self, *key: Single(stream(self, *key).bit_generator))
    assert failed(audit_randomness(["joint", "rr-slot"], Streams(0))) == ["noise with 16 trailing zero bits"]


def test_noise_that_was_rounded_to_single_precision_is_found(monkeypatch):
    drawn = randomness.gaussian
    from coterie.privacy.mechanisms import joint

    monkeypatch.setattr(joint, "gaussian", lambda *args: drawn(*args).astype(np.float32).astype(np.float64))
    assert resolution(Streams(0)).failed
