"""Attacks on randomness: client sampling, noise keys, and noise resolution.

Amplification requires independent coins for every client and round, and cohorts that are used as sampled, including
empty ones. Noise protects only if its key cannot be guessed, which requires 128 bits from the operating system, and if
it has no gaps, which requires the full precision of a float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.audit.findings import Finding, binomial_test, zero_count_test
from coterie.privacy import Joint, Ledger, Plan, RRSlot, Streams

_CLIENTS, _RATE = 8, 0.25
_ROUNDS = 1 << 13
_KEYS = 1 << 14
_NUMBERS = 1 << 16
# Trailing bits of a float64's 52 that are all zero in one number of 65,536; in nearly all that came from a float32.
_BITS = 16


def audit_randomness(mechanisms: Sequence[str], streams: Streams) -> list[Finding]:
    """Audit the samplers of ``mechanisms``, and the keys and the resolution of the noise that they share."""
    findings = []
    if "joint" in mechanisms:
        findings += poisson_sampler(streams)
    if "rr-slot" in mechanisms:
        findings += slot_sampler(streams)
    return findings + keys() + [resolution(streams)]


def poisson_sampler(streams: Streams) -> list[Finding]:
    """Exact binomial tests that coins are independent between clients and between rounds."""
    q, took_part = _RATE, _participation(_plan(Joint), streams)  # (rounds, clients)
    tests = [
        ("participation of a client", q, took_part),
        ("participation of two clients", q * q, took_part[:, ::2] & took_part[:, 1::2]),
        ("participation of a client in two rounds", q * q, took_part[::2] & took_part[1::2]),
        ("empty cohort", (1 - q) ** _CLIENTS, ~took_part.any(axis=1)),
    ]
    return [binomial_test("joint", name, rate, int(hits.sum()), hits.size) for name, rate, hits in tests]


def slot_sampler(streams: Streams) -> list[Finding]:
    """Test that every round has a fixed number of clients and that all pairs of clients are equally likely."""
    took_part = _participation(_plan(RRSlot), streams)
    sizes, m = took_part.sum(axis=1), round(_RATE * _CLIENTS)
    pair = m * (m - 1) / (_CLIENTS * (_CLIENTS - 1))
    first_two, two_rounds = took_part[:, 0] & took_part[:, 1], took_part[::2, 0] & took_part[1::2, 0]
    return [
        binomial_test("rr-slot", "participation of two clients", pair, int(first_two.sum()), first_two.size),
        binomial_test(
            "rr-slot",
            "participation of a client in two rounds",
            (m / _CLIENTS) ** 2,
            int(two_rounds.sum()),
            two_rounds.size,
        ),
        zero_count_test("rr-slot", "cohort of another size", int((sizes != m).sum())),
    ]


def keys() -> list[Finding]:
    """Test secret streams: first outputs never repeat, and no bit of a key is constant.

    Keys of b bits repeat about ``_KEYS**2 / 2**(b + 1)`` times, so that b = 16 shows 2,000 repeats; keys of 128 bits
    repeat with probability 4e-31. A random bit is the same in all keys with probability 2^-16383.
    """
    streams = Streams()
    generators = [streams.stream("noise", 1, 1).bit_generator for _ in range(_KEYS)]
    # The first two words of the state are the key itself (AES's key schedule begins with it).
    bits = np.unpackbits(np.array([g.state["s"]["seed"][:2] for g in generators]).view(np.uint8), axis=1)
    outputs = {tuple(g.random_raw(2).tolist()) for g in generators}
    constant = 128 - int((bits.any(axis=0) & ~bits.all(axis=0)).sum())
    return [
        zero_count_test("all", f"repeated first outputs among {_KEYS} secret streams", _KEYS - len(outputs)),
        zero_count_test("all", "constant key bits", constant),
    ]


def resolution(streams: Streams) -> Finding:
    """Count noisy numbers with so many trailing zeros that fewer digits were drawn."""
    # Noise of deviation 2 is an unscaled sum of four draws (privacy/randomness.py), so no product hides a gap.
    plan = _plan(Joint, noise_multiplier=2.0)
    contributions = plan.contributions(_NUMBERS)
    released = plan.release(Ledger(plan.delta).charge_round(1, plan.event()), contributions, streams, 1)
    tails = released.sums[0].view(np.uint64) & np.uint64((1 << _BITS) - 1)
    return binomial_test(
        "all", "noise with 16 trailing zero bits", 2.0**-_BITS, int((tails == 0).sum()), _NUMBERS, "greater"
    )


def _plan(plan_class: type[Plan], noise_multiplier: float = 1.0) -> Plan:
    numbers: dict[str, Any] = {
        "clients": _CLIENTS,
        "num_clusters": 1,
        "sampling_rate": _RATE,
        "rounds": 1,
        "clip_norm": 1.0,
    }
    return plan_class(**numbers, epsilon=float("inf"), delta=1e-5, noise_multiplier=noise_multiplier)


def _participation(plan: Plan, streams: Streams) -> npt.NDArray[np.bool_]:
    took_part = np.zeros((_ROUNDS, _CLIENTS), bool)
    for number, row in enumerate(took_part, 1):
        row[plan.sample(streams.stream("cohort", number, number), number)] = True
    return took_part
