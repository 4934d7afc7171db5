"""Containers for what the clients of a cohort send; mechanisms alone read the secret ones."""

from __future__ import annotations

import functools
import math
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from coterie.privacy.clipping import clip_to_unit
from coterie.privacy.ledger import Permit
from coterie.privacy.randomness import FloatArray
from coterie.privacy.releases import IntArray, ReleasedPoints, ReleasedUpdates

if TYPE_CHECKING:
    from coterie.privacy.plan import Plan

R_co = TypeVar("R_co", covariant=True)

# Numbers that are clipped at once: 512 kB in float64, which fit a core's cache.
_BLOCK = 1 << 16
# Largest number of bytes of collected updates in memory.
_SPOOL = 1 << 28


class Contributions(ABC):
    """Updates of one cohort, clipped on arrival and divided by C; exact sums and labels, accessible to mechanisms only.

    ``draws`` independent rounds can be stored together, as in the audit, which runs a mechanism 100,000 times; a run
    has one. Labels then have shape (draws,) and updates (draws, d).

    The first ``shared`` coordinates of an update are summed over all clients regardless of their labels, and receive
    noise once; this block is the same in every row of a (k, d) sum. An update is clipped as one vector.

    Args:
        size: d.
        clip_norm: C; inf: updates are not clipped.
        draws: number of independent rounds.
        shared: number of shared coordinates.
    """

    def __init__(self, size: int, clip_norm: float = math.inf, draws: int = 1, shared: int = 0) -> None:
        self.size = size
        self.clip_norm = clip_norm
        self.draws = draws
        self.shared = shared

    @abstractmethod
    def add(self, slot: int, label: Any, redrawn_label: Any, update: npt.ArrayLike) -> None:
        """Add one client's contribution: slot in the cohort, chosen label, redrawn label, update."""

    def add_null(self) -> None:
        """Add a client whose reply cannot be used: its update is zero, and it is not missing."""
        return

    @property
    def partial(self) -> Callable[[], Summed] | None:
        """Creates an empty container in which another process sums contributions; None: each must be added here."""
        return None

    def _clipped(self, update: npt.ArrayLike) -> FloatArray:
        rows = np.broadcast_to(np.asarray(update), (self.draws, self.size))
        return clip_to_unit(rows, self.clip_norm)


class Summed(Contributions):
    """Sums on arrival: memory does not grow with the cohort.

    Args:
        plan: plan of the run, whose clipping norm bounds updates.
        size: d.
        draws: number of independent rounds.
        shared: number of shared coordinates.

    Attributes:
        sums: (draws, k, d) of clipped updates, by redrawn label; the shared block is in row 0 only.
        counts: (draws, k) numbers of clients by chosen label.
        below: (draws,) sum over clients of 1/2 if the update is shorter than the plan's ``norm_threshold``, else -1/2.
    """

    #: Of these numbers.
    dtype: ClassVar[Any] = np.float64

    def __init__(self, plan: Plan, size: int, draws: int = 1, shared: int = 0) -> None:
        super().__init__(size, plan.clip_norm, draws, shared)
        self.plan = plan
        self.sums: npt.NDArray[Any] = np.zeros((draws, plan.num_clusters, size), self.dtype)
        self.counts: npt.NDArray[Any] = np.zeros((draws, plan.num_clusters), self.dtype)
        self.below: npt.NDArray[Any] = np.zeros(draws, self.dtype)

    def add(self, slot: int, label: Any, redrawn_label: Any, update: npt.ArrayLike) -> None:
        """Add to both sums; ``slot`` is ignored."""
        every, clipped = np.arange(self.draws), self._clipped(update)
        self.sums[:, 0, : self.shared] += clipped[:, : self.shared]
        self.sums[every, redrawn_label, self.shared :] += clipped[:, self.shared :]
        self.counts[every, label] += 1
        if self.plan.clip_share:
            rows = np.broadcast_to(np.asarray(update), (self.draws, self.size))
            self.below += short_updates(rows, self.plan.norm_threshold)

    def add_rows(self, labels: IntArray, redrawn_labels: IntArray, updates: npt.NDArray[np.float32]) -> None:
        """Add the contributions of n clients in one draw.

        Args:
            labels: (n,) chosen labels.
            redrawn_labels: (n,) redrawn labels.
            updates: (n, d).
        """
        sums, many = self.sums[0], max(1, _BLOCK // max(self.size, 1))
        for begin in range(0, len(updates), many):
            clipped = clip_to_unit(updates[begin : begin + many], self.clip_norm)
            for label, row in zip(redrawn_labels[begin : begin + many], clipped, strict=True):
                sums[0, : self.shared] += row[: self.shared]
                sums[label, self.shared :] += row[self.shared :]
            if self.plan.clip_share:
                self.below[0] += short_updates(updates[begin : begin + many], self.plan.norm_threshold).sum()
        self.counts[0] += np.bincount(labels, minlength=self.plan.num_clusters)

    def add_total(self, labels: IntArray, total: FloatArray, norms: FloatArray) -> None:
        """Add the contributions of n clients in one draw, whose clipped updates are summed already.

        Args:
            labels: (n,) chosen labels.
            total: (k, d) sums by redrawn label of updates of :func:`clip_to_unit`; the shared block is in row 0 only.
            norms: (n,) of the updates before clipping.
        """
        self.sums[0] += total
        self.counts[0] += np.bincount(labels, minlength=self.plan.num_clusters)
        if self.plan.clip_share:
            self.below[0] += np.where(norms < self.plan.norm_threshold, 0.5, -0.5).sum()

    @property
    def partial(self) -> Callable[[], Summed]:
        """Creates an empty container, to be merged into this one."""
        return functools.partial(Summed, self.plan, self.size, self.draws, self.shared)

    def merge(self, partial: Summed) -> None:
        """Add sums and counts of other clients."""
        self.sums += partial.sums
        self.counts += partial.counts
        self.below += partial.below


class Collected(Contributions):
    """Updates of single clients, if the server may read them: they are already private, or the run has no privacy.

    Args:
        size: d.
        cohort: (m,) client of every slot.
        weights: (m,) weight of every slot: public, or in a run without privacy that of the reply.
    """

    def __init__(self, size: int, cohort: IntArray, weights: FloatArray) -> None:
        super().__init__(size)
        self._cohort, self.weights = cohort, weights
        self._labels: dict[int, tuple[int, int]] = {}
        self._updates = _rows(len(cohort), size)

    def add(self, slot: int, label: Any, redrawn_label: Any, update: npt.ArrayLike) -> None:
        """Store the update unchanged."""
        self._labels[slot], self._updates[slot] = (int(label), int(redrawn_label)), update

    def released(self, permit: Permit) -> ReleasedUpdates:
        """All of them, by client."""
        slots = sorted(self._labels)
        for row, slot in enumerate(slots):  # in place: the array may be large
            self._updates[row] = self._updates[slot]
        labels = np.array([self._labels[slot] for slot in slots], np.int64).reshape(-1, 2)
        return ReleasedUpdates(
            charge=permit.charge,
            epsilon=permit.epsilon,
            clients=self._cohort[slots],
            labels=labels[:, 0],
            assigned=labels[:, 1],
            weights=self.weights[slots],
            updates=self._updates[: len(slots)],
        )


class Gathered(Contributions):
    """Points of clients, any number per client, if the server may read them; see :class:`Collected`.

    Args:
        cohort: (m,) client of every slot.
    """

    def __init__(self, cohort: IntArray) -> None:
        super().__init__(0)
        self._cohort = cohort
        self._points: dict[int, npt.NDArray[np.float32]] = {}
        self._bytes = 0

    def add(self, slot: int, label: Any, redrawn_label: Any, update: npt.ArrayLike) -> None:
        """Store one client's (n, *shape) points, in an unnamed file if memory use would be large."""
        points = np.asarray(update, np.float32)
        self._bytes += points.nbytes
        if self._bytes > _SPOOL:
            file = _in_a_file(len(points), points[0].size)
            file[:] = points.reshape(len(points), -1)
            points = file.reshape(points.shape)
        self._points[int(self._cohort[slot])] = points

    def released(self, permit: Permit) -> ReleasedPoints:
        """All of them, by client."""
        points = dict(sorted(self._points.items()))
        return ReleasedPoints(charge=permit.charge, epsilon=permit.epsilon, points=points)


class SingleContributions(Protocol[R_co]):
    """Contributions that are released one by one."""

    def released(self, permit: Permit) -> R_co:
        """All of them, by client."""


def short_updates(updates: npt.NDArray[Any], threshold: float) -> FloatArray:
    """(n,) 1/2 for updates, before clipping, that are shorter than the threshold, else -1/2."""
    with np.errstate(over="ignore", invalid="ignore"):  # NaN and infinity are not shorter
        norms = np.linalg.norm(updates.astype(np.float64), axis=1)
    return np.where(norms < threshold, 0.5, -0.5)


def _rows(count: int, size: int) -> npt.NDArray[np.float32]:
    """(count, size) zeros; in an unnamed file if memory use would be large."""
    return np.zeros((count, size), np.float32) if 4 * count * size <= _SPOOL else _in_a_file(count, size)


def _in_a_file(count: int, size: int) -> npt.NDArray[np.float32]:
    """(count, size) zeros in an unnamed file."""
    with tempfile.TemporaryFile() as file:
        return np.memmap(file, np.float32, "w+", shape=(count, size))
