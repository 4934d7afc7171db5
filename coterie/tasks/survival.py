"""Times until an event, which may be censored."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from coterie.tasks.task import FloatArray, Measure, Outputs, Targets, Task, TaskError, decimals, sigmoid

if TYPE_CHECKING:
    from torch import Tensor

#: Bins of time, at most.
MAX_BINS = 1000


@dataclass(frozen=True)
class _Survival(Task):
    """Each record has a time until an event, or until it is censored: hazards of bins of time.

    Output j is the logit of the probability that the event happens in bin j, given that it did not before. A target is
    2 b + e: the record is free of the event in its first b bins, and e tells whether it has it in the next one.

    Attributes:
        edges: ends of the bins, which begin at 0.
    """

    edges: tuple[float, ...] = ()

    name = "survival"
    score_name = "Concordance"
    counted = "events"
    marker = "survival"
    constant = ("concordance", "baseline_concordance", False)

    @property
    def probe(self) -> int:
        return self.num_targets - 2  # the event in the last bin

    def __str__(self) -> str:
        return f"times in {self.num_outputs} bins"

    @property
    def num_targets(self) -> int:
        return 2 * self.num_outputs + 1

    def _losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return minus the log-likelihood: of no event in the first bins, and of the event in the next one."""
        from torch.nn.functional import softplus

        free, event = (y >> 1)[..., None], (y & 1)[..., None]
        bins = outputs.new_tensor(range(self.num_outputs), dtype=y.dtype)
        nats = softplus(outputs) * (bins < free) + softplus(-outputs) * ((bins == free) & (event > 0))
        return nats.sum(dim=-1)

    def marks(self, outputs: Tensor, y: Tensor) -> Tensor:
        from torch.nn.functional import logsigmoid

        return -logsigmoid(-outputs).cumsum(dim=1).exp().sum(dim=1)  # minus the mean number of bins without the event

    def score(self, marks: FloatArray, y: Targets) -> float:
        from coterie.tasks.performance import concordance

        index = concordance(marks, y >> 1, y & 1)
        return 0.5 if index is None else index

    def survival(self, outputs: Outputs) -> FloatArray:
        """Return the (n, b) probabilities that a record is free of the event until the end of each bin."""
        return np.asarray(np.cumprod(1 - sigmoid(outputs), axis=1))

    def squared_error(self, outputs: FloatArray, y: Targets) -> float:
        """Return the mean squared error of :meth:`survival` at the ends of bins at which it is known."""
        bins, free, event = np.arange(self.num_outputs), (y >> 1)[:, None], (y & 1)[:, None]
        known = (bins < free) | (event > 0)
        errors = (self.survival(outputs) - (bins < free)) ** 2
        return float(errors[known].mean()) if known.any() else 0.0

    def measure(
        self, y: Targets, outputs: Outputs, positive: int | None = None, threshold: float | None = None
    ) -> Measure:
        from coterie.tasks.performance import of_times

        return partial(of_times, y >> 1, y & 1, sigmoid(outputs))

    def predicted(self, outputs: Outputs) -> npt.NDArray[Any]:
        return self.survival(outputs)

    def columns(
        self, outputs: Outputs, names: Sequence[str], decision: tuple[int, float] | None = None
    ) -> dict[str, list[str]]:
        shares = zip(self.edges, self.survival(outputs).T, strict=True)
        return {f"survival_{edge:g}": decimals(share) for edge, share in shares}

    def agreement(self, outputs: Outputs, y: Targets, where: str) -> str:
        from coterie.tasks.performance import of_times

        index = of_times(y >> 1, y & 1, sigmoid(outputs)).concordance
        return f"concordance {'not defined' if index is None else f'{index:.3f}'} with the times of {where}"

    @property
    def num_cells(self) -> int:
        return 2

    @property
    def time_bins(self) -> tuple[float, ...]:
        return self.edges

    rule = "a time must be finite and at least 0, an event 0 or 1"

    def are_valid(self, cells: FloatArray) -> npt.NDArray[np.bool_]:
        time, event = cells.T
        return np.asarray(np.isfinite(time) & (time >= 0) & np.isin(event, (0, 1)))

    def encoded(self, cells: FloatArray) -> FloatArray:
        time, event = cells[:, 0], cells[:, 1] > 0
        free = np.searchsorted(self.edges, time, side="right")
        ended = np.searchsorted(self.edges, time, side="left")
        inside = event & (ended < self.num_outputs)
        return np.where(inside, 2 * ended + 1, 2 * free).astype(np.float64)

    def counts(self, y: Targets, names: Sequence[str]) -> dict[str, int]:
        counts = np.bincount(y.astype(np.int64), minlength=self.num_targets)
        events = zip(self.edges, counts[1::2].tolist(), strict=True)
        return {**{f"until {edge:g}": count for edge, count in events}, "censored": int(counts[::2].sum())}

    def target_names(self, names: Sequence[str]) -> tuple[str, ...]:
        ends = [0.0, *self.edges]
        names_of_bins = ([f"censored from {start:g}", f"event until {end:g}"] for start, end in pairwise(ends))
        return (*chain.from_iterable(names_of_bins), f"censored from {ends[-1]:g}")

    def examples(self, n: int) -> npt.NDArray[Any]:
        targets = np.concatenate([np.arange(1, self.num_targets, 2)[::-1], np.arange(2, self.num_targets, 2)])
        return targets[np.arange(n) % len(targets)]

    def right_outputs(self, y: Tensor) -> Tensor:
        import torch

        bins = torch.arange(self.num_outputs)
        return 8.0 * ((bins >= (y >> 1)[:, None]) & ((y & 1)[:, None] > 0)) - 4


@cache
def survival(edges: tuple[float, ...]) -> Task:
    """Return the task of times until an event, in bins from 0 that end at ``edges``, which grow.

    Raises:
        TaskError: an end is not larger than the one before it, or there are none or more than :data:`MAX_BINS`.
    """
    ends = (0.0, *edges)
    if not 1 <= len(edges) <= MAX_BINS or not all(low < high < math.inf for low, high in pairwise(ends)):
        raise TaskError(f"the ends of bins must be 1 to {MAX_BINS} finite numbers above 0, each larger than the last")
    return _Survival(len(edges), edges=edges)


def parse_bins(text: str) -> tuple[float, ...]:
    """Return the ends of bins of time that are separated by commas, such as ``30,90,365``.

    Raises:
        TaskError: they are no numbers above 0 that grow.
    """
    try:
        edges = tuple(map(float, text.split(",")))
        _ = survival(edges)
    except ValueError:
        raise TaskError(
            f"time-bins = {text[:60]!r}: must be the ends of 1 to {MAX_BINS} bins of time, which begin at 0: growing "
            "numbers, separated by commas, such as 30,90,365"
        ) from None
    return edges


def encode_times(time: npt.NDArray[Any], event: npt.NDArray[Any], edges: Sequence[float]) -> npt.NDArray[np.int64]:
    """Return (n,) targets of a survival task.

    Args:
        time: (n,) times until the event, or until nothing more is known.
        event: (n,) whether it is the event.
        edges: ends of the bins, which begin at 0.

    Raises:
        TaskError: a time is negative or not finite, an event is not 0 or 1, or the ends do not grow.

    Examples:
        >>> encode_times(np.array([1.0, 5.0, 9.0]), np.array([1, 0, 1]), [2, 4, 6])
        array([1, 4, 6])
    """
    task = survival(tuple(map(float, edges)))
    if not (np.isfinite(time) & (time >= 0)).all():
        raise TaskError("a time is negative or not finite")
    if not np.isin(event, (0, 1)).all():
        raise TaskError("an event is neither 0 nor 1")
    return task.encoded(np.stack([time, event], axis=1).astype(np.float64)).astype(np.int64)
