"""Record-level attacks on clients by a server that chooses models, clipping norms and requests freely.

The victim is one record. The server sends a network in which all other records have a zero gradient and the victim's
is a thousand times the clipping norm, or models for which the victim's loss is infinite. The server knows all other
records and sends several requests.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from coterie.audit.findings import Finding, FloatArray, dominance_test, pure_test
from coterie.client import record_level
from coterie.client.dpsgd import DPSGD, Vectors, train_privately
from coterie.datasets import Shard, TestSet, Units
from coterie.models import float32_arrays, set_trainable, trainable, with_lora
from coterie.privacy import Event, PerUnit, RecordPlan, Streams, noisy_argmin, noisy_losses, selection_event
from coterie.privacy.score_histograms import UnitCounts
from coterie.wire.messages import Layout

_MECHANISM = "dp-sgd"
# Clients trained per batch.
_CHUNK = 2000
_RECORDS = 4
_LR = 0.05
# Tolerance for float32 gradients and updates rounded to float32.
_ROUNDING = 1e-5
# Implementations of DP-SGD (client/gradients.py).
_MODES: dict[str, Any] = {
    "batched clients": {"batched": True},
    "sequential clients": {"batched": False},
    "sequential clients by Opacus": {"batched": False, "ghost": False},
    "units of several records": {"batched": True},
    "adapters beside frozen layers": {"batched": False},
}
_UNITS, _ADAPTERS = "units of several records", "adapters beside frozen layers"


def audit_records(streams: Streams, replies: int, attacks: str = "") -> list[Finding]:
    """Audit gradients, losses and selections of one client under addition or removal of one record.

    Args:
        streams: randomness of the audit.
        replies: number of replies in each world.
        attacks: part of the names of the attacks; empty for all.
    """
    full = {"batch_size": _RECORDS, "noise_multiplier": 1.0}
    gradients = {
        "additional record, full batches": (_plan(**full), replies),
        "additional record, Poisson batches": (_plan(batch_size=1, noise_multiplier=0.5), replies),
        "additional record, eight replies": (_plan(**{**full, "noise_multiplier": 8**0.5}, rounds=8), replies // 4),
        "additional record, with the share of short gradients": (
            _plan(**full, clip_share=0.3, clip_factor=0.5),
            replies,
        ),
    }
    findings: dict[str, Callable[[], Finding]] = {
        **{name: partial(_gradients, name, *gradients[name], streams, i) for i, name in enumerate(gradients)},
        **{f"gradient of any norm ({mode})": partial(_measure_shift, mode) for mode in _MODES},
        "additional record, losses of models": partial(_losses, streams, replies),
        "additional record, private selection": partial(_selections, streams, 2 * replies),
        "held-out record of any score, histogram": _measure_histogram,
        "held-out unit of any records, histogram": _measure_units,
        "additional held-out record, histogram": partial(_histograms, streams, 2 * replies),
    }
    return [find() for name, find in findings.items() if attacks in name]


def _plan(**numbers: Any) -> RecordPlan:
    return RecordPlan(**{"num_examples": _RECORDS, "rounds": 1, "epsilon": 100.0, "delta": 1e-5, **numbers})


# ---- gradients --------------------------------------------------------------------------------------------


def _network(adapters: bool = False) -> tuple[nn.Module, Layout, Vectors]:
    """Return two layers and their (1, d) trainable parameters: all, or those of adapters.

    Record (1, 0) of class 0 has no gradient, and (0, 1) of class 1 a very large one.
    """
    network: nn.Module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    first, second = np.eye(2), 100 * np.array([[1.0, 1.0], [-1.0, -1.0]])
    set_trainable(network, {"0.weight": first, "1.weight": second})
    if adapters:  # with A = (1, 1) and B = 0, the gradient of B is as large
        network = with_lora(network, rank=1)
        set_trainable(network, {f"{layer}.down.weight": np.ones((1, 2)) for layer in range(2)})
    layout = Layout.of(trainable(network))
    return network, layout, layout.flatten(float32_arrays(network))[None]


def _shard(victim: bool, units: bool = False) -> Shard:
    """Return the records; the victim is one of them, or a unit that has three, such as a patient."""
    others, times = _RECORDS - 1, (3 if units else 1) * victim
    x = np.array([[1, 0]] * others + [[0, 1]] * times, np.float32)
    y = np.array([0] * others + [1] * times, np.int64)
    of_record = np.minimum(np.arange(len(y)), others)
    return Shard(0, 0, x, y, TestSet(x, y), Units(of_record, most=4) if units else None)


def _settings(plan: RecordPlan) -> DPSGD:
    return DPSGD(
        _RECORDS,
        plan.batch_size,
        plan.local_epochs,
        _LR,
        plan.clip_norm,
        plan.noise_of_gradients(False),
        norm_threshold=plan.norm_threshold,
        noise_of_norms=plan.noise_of_norms(False),
    )


def _updates(
    settings: DPSGD,
    victim: bool,
    coins: np.random.Generator,
    noise: np.random.Generator,
    count: int = 1,
    mode: str = "batched clients",
) -> tuple[FloatArray, FloatArray]:
    """Return replies of clients that differ only in randomness.

    Returns:
        (count, d) updates in units of one clipped gradient's step, and (count,) shares of short gradients in units of
        one record.
    """
    network, layout, start = _network(mode == _ADAPTERS)
    starts, shards = np.repeat(start, count, axis=0), [_shard(victim, mode == _UNITS)] * count
    below = np.zeros(count)
    moved = train_privately(
        network,
        layout,
        starts,
        shards,
        [coins] * count,
        [noise] * count,
        [settings] * count,
        below=below,
        **_MODES[mode],
    )
    return moved.astype(np.float64) / settings.step_size, below * (settings.steps * settings.batch_size)


def _gradients(attack: str, plan: RecordPlan, replies: int, streams: Streams, index: int) -> Finding:
    """Compare the victim's influence on replies, summed over rounds, with the client's charges for these rounds.

    The victim's gradient is long, so it moves the sum of gradients by 1 and the number of short ones by -1/2.
    """
    direction, noise_of_norms = _victim_gradient(plan), plan.noise_of_norms(False)
    counted = 0.0 if noise_of_norms is None else -0.5 * (plan.noise_of_gradients(False) / noise_of_norms) ** 2
    worlds = []
    for victim in (False, True):
        scores = np.zeros((replies, 1))
        for number in range(plan.rounds):
            for done in range(0, replies, _CHUNK):
                coins, noise = (streams.stream(n, index, victim, number, done) for n in ("batches", "gradients"))
                count = min(_CHUNK, replies - done)
                updates, below = _updates(_settings(plan), victim, coins, noise, count)
                scores[done : done + count, 0] += updates @ direction
                if counted:
                    scores[done : done + count, 0] += counted * below
        worlds.append(scores)
    events: Counter[Event] = Counter()
    for number in range(plan.rounds):
        events += plan.part(first=number == 0)
    return dominance_test(_MECHANISM, attack, events, (worlds[0], worlds[1]))


def _victim_gradient(plan: RecordPlan, mode: str = "batched clients") -> FloatArray:
    """Return the difference (d,) of noiseless full-batch steps with and without the victim."""
    settings = replace(_settings(plan), batch_size=_RECORDS, noise_multiplier=0.0)
    rng = np.random.default_rng(0)
    there, gone = (_updates(settings, victim, rng, rng, mode=mode)[0][0] for victim in (True, False))
    return np.asarray(there - gone)


def _measure_shift(mode: str) -> Finding:
    """Measure the maximum influence of one record on a sum of gradients of every length, without noise."""
    norm = 200 * math.sqrt(2)  # of the victim's gradient, nearly
    norms = [norm / length for length in (*np.linspace(0.9, 1.3, 41), 2.0, 100.0)]
    moved = [
        np.linalg.norm(_victim_gradient(_plan(batch_size=1, clip_norm=c, noise_multiplier=1.0), mode)) for c in norms
    ]
    violated = not max(moved) <= 1 + _ROUNDING
    return Finding(_MECHANISM, f"gradient of any norm ({mode})", "mu", 1.0, float(max(moved)), (), violated)


# ---- losses and selections --------------------------------------------------------------------------------


def _losses(streams: Streams, replies: int) -> Finding:
    """Audit noisy losses of four models for which the victim's losses are maximal."""
    bound, plan = 4.0, _plan(batch_size=1, noise_multiplier=1.0, compared=4, loss_noise=1.0)
    others = np.ones((_RECORDS - 1, plan.compared))
    victim = np.array([[1e30, np.inf, np.nan, 4.0]])
    worlds = []
    for world, losses in enumerate((others, np.concatenate([others, victim]))):
        rng = streams.stream("losses", world)
        released = [noisy_losses(PerUnit(losses), bound, plan.loss_deviation, _RECORDS, rng) for _ in range(replies)]
        worlds.append(np.array(released))
    claim = plan.losses(plan.compared)
    return dominance_test(_MECHANISM, "additional record, losses of models", claim, (worlds[0], worlds[1]))


def _selections(streams: Streams, replies: int) -> Finding:
    """Audit a private selection between two models; the other records prefer the second by half the loss bound."""
    bound, e = 4.0, 1.0
    others, victim = np.array([[bound / 2, 0.0]]), np.array([[-1.0, np.inf]])
    worlds = []
    for world, losses in enumerate((others, np.concatenate([others, victim]))):
        rng = streams.stream("choice", world)
        chosen = [noisy_argmin(PerUnit(losses), bound, e, rng) == 0 for _ in range(replies)]
        worlds.append(np.array(chosen, np.float64)[:, None])
    claim = {selection_event(e): 1}
    return dominance_test(_MECHANISM, "additional record, private selection", claim, (worlds[0], worlds[1]))


# ---- histograms of scores ---------------------------------------------------------------------------------


def _held_out(records: int, trained: int = _RECORDS, scale: float = 1.0) -> UnitCounts:
    """Return the counts of held-out records, of which the victim is the last and has a very large score."""
    network, layout, models = _network()
    x = np.array([[1, 0]] * records, np.float32)
    x[_RECORDS - 1 :] = [0, scale]
    shard = Shard(0, 0, x[:1].repeat(trained, axis=0), np.zeros(trained, np.int64), TestSet(x, (x[:, 1] != 0) * 1))
    return record_level.held_out_counts(network, layout, models, shard)


def _measure_histogram() -> Finding:
    """Measure the maximum influence of a held-out record on a histogram, and that of a training record, which is 0."""
    without = _held_out(_RECORDS - 1)
    moved = [_distance(_held_out(_RECORDS, scale=s), without) for s in (1, -1, 1e-3, 1e30, np.inf, np.nan)]
    trained = _distance(_held_out(_RECORDS - 1, trained=_RECORDS + 1), without)
    largest = max(moved) if trained == 0 else math.inf
    name = "held-out record of any score, histogram"
    return Finding(_MECHANISM, name, "L1", 1.0, largest, (), largest > 1 + _ROUNDING)


def _distance(counts: UnitCounts, without: UnitCounts) -> float:
    released = (each.noisy(1.0, np.random.default_rng(0)) for each in (counts, without))
    return float(np.abs(np.subtract(*released)).sum())


def _measure_units() -> Finding:
    """Measure how far a unit with any number of held-out records moves a histogram, whether it is trained on or not."""
    largest = 0.0
    for records in (1, 2, 3, 7, 16, 60):
        for trained in (False, True):
            names = np.array([f"unit {i}" for i in range(_RECORDS)] + ["victim"] * records)
            without = _of_units(names[:_RECORDS], ["trained on"])
            shift = _distance(_of_units(names, ["trained on", *["victim"] * trained]), without)
            largest = max(largest, math.inf if trained and shift else shift)  # one that is trained on adds nothing
    name = "held-out unit of any records, histogram"
    return Finding(_MECHANISM, name, "L1", 1.0, largest, (), largest > 1 + _ROUNDING)


def _of_units(names: npt.NDArray[np.str_], trained: Sequence[str]) -> UnitCounts:
    network, layout, models = _network()
    x, y = np.array([[0, 1]] * len(names), np.float32), np.ones(len(names), np.int64)
    shares = Units.named(names, _RECORDS).held_out_shares(Units.named(trained, _RECORDS))
    shard = Shard(0, 0, x[:1], y[:1], TestSet(x, y), test_shares=shares)
    return record_level.held_out_counts(network, layout, models, shard, units=True)


def _histograms(streams: Streams, replies: int) -> Finding:
    epsilon, worlds = 1.0, []
    for world, records in enumerate((_RECORDS - 1, _RECORDS)):
        rng, counts = streams.stream("histogram", world), _held_out(records)
        worlds.append(np.array([counts.noisy(epsilon, rng) for _ in range(replies)]))
    return pure_test(_MECHANISM, "additional held-out record, histogram", epsilon, (worlds[0], worlds[1]))
