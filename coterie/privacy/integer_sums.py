"""Sums of integer vectors, as secure aggregation computes them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import numpy.typing as npt

from coterie.privacy.contributions import Summed, short_updates
from coterie.privacy.discrete_gaussians import STEPS
from coterie.privacy.releases import IntArray, NothingReleasedError

if TYPE_CHECKING:
    from coterie.privacy.mechanisms.secure import Secure
    from coterie.privacy.secure_aggregation.integers import Integers

# Deviations of a noisy sum that honest clients do not exceed in a run.
DEVIATIONS = 10.0


def check_survivors(survivors: int, least: int) -> None:
    """Check that enough clients are left.

    Raises:
        NothingReleasedError: they are not.
    """
    if survivors < least:
        raise NothingReleasedError(f"{survivors} clients are left of the {least} that mechanism secure requires")


def has_possible_norm(total: Integers, survivors: int, noise: float) -> bool:
    """Return whether the vectors of so many clients, in the grid of norm D, may have this sum.

    Args:
        total: (n,).
        survivors: number of clients.
        noise: deviation of the noise of an entry, in units of D.
    """
    return float(np.linalg.norm(total / STEPS)) <= survivors + noise * (math.sqrt(len(total)) + DEVIATIONS)


class IntegerSums(Summed):
    """Sums of the integer vectors of clients, whose noise a simulation adds later; see :class:`Summed`.

    Attributes:
        sums, counts, below: of the vectors' parts, int64.
        survivors: clients of the sum.
        noisy: whether the clients' noise is inside.
        unremoved: clients whose surplus of noise is inside, too.
    """

    dtype: ClassVar[Any] = np.int64

    def __init__(self, plan: Secure, size: int, draws: int = 1, shared: int = 0) -> None:
        super().__init__(plan, size, draws, shared)
        self._secure = plan
        self.survivors = 0
        self.noisy = False
        self.unremoved = 0

    def add(self, slot: int, label: Any, redrawn_label: Any, update: npt.ArrayLike) -> None:
        """Add the vector of one client, whose update is the same in all draws; ``slot`` is ignored."""
        every, values = np.arange(self.draws), np.asarray(update)
        grid = self._secure.on_grid(values)
        _, count, half = self._secure.factors
        self.sums[:, 0, : self.shared] += grid[: self.shared]
        self.sums[every, redrawn_label, self.shared :] += grid[self.shared :]
        self.counts[every, label] += count
        if half:
            self.below += int(2 * half * short_updates(values[None], self.plan.norm_threshold)[0])
        self.survivors += 1

    def add_rows(self, labels: IntArray, redrawn_labels: IntArray, updates: npt.NDArray[np.float32]) -> None:
        """Add the vectors of n clients; see :meth:`Summed.add_rows`."""
        for label, redrawn_label, update in zip(labels, redrawn_labels, updates, strict=True):
            self.add(0, label, redrawn_label, update)

    def add_null(self) -> None:
        """Add a client without an update: the vector that it sends itself in a masked round."""
        self.add(0, 0, 0, np.zeros(self.size))

    def add_vectors(self, total: Integers, survivors: int, unremoved: int = 0) -> None:
        """Add the sum of vectors that have their noise already, in one draw; see :meth:`vector`."""
        shared, blocks = total[: self.shared], total[self.shared : -self.plan.num_clusters - 1]
        self.sums[0, 0, : self.shared] += shared
        self.sums[0, :, self.shared :] += blocks.reshape(self.plan.num_clusters, -1)
        self.counts[0] += total[-self.plan.num_clusters - 1 : -1]
        self.below[0] += total[-1]
        self.survivors += survivors
        self.unremoved += unremoved
        self.noisy = True

    def vector(self) -> Integers:
        """Return the sums of one draw as one vector: shared block, blocks of the clusters, counts, norms."""
        blocks = self.sums[0, :, self.shared :].ravel()
        return np.concatenate([self.sums[0, 0, : self.shared], blocks, self.counts[0], self.below])

    @property
    def partial(self) -> Callable[[], Summed]:
        """Creates an empty container, to be merged into this one."""
        return functools.partial(IntegerSums, self._secure, self.size, self.draws, self.shared)

    def merge(self, partial: Summed) -> None:
        """Add the sums of other clients."""
        super().merge(partial)
        self.survivors += cast(IntegerSums, partial).survivors
