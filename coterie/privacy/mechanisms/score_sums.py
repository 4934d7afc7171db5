"""Private evaluations under mechanism secure: sums of one vector per client, of which the server sees no summand.

The cohort are all clients, of which l = ceil((1 - dropout) M) must stay. The vector is the client's accuracy, from -1
to 1, or its counts of scores, both on the grid of training (coterie/privacy/mechanisms/secure.py); every client adds
discrete Gaussian noise in layers, as in training, by which the honest ones that stay have that of the event together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coterie.privacy.accountants import Event
from coterie.privacy.discrete_gaussians import STEPS
from coterie.privacy.integer_sums import check_survivors, has_possible_norm
from coterie.privacy.randomness import FloatArray
from coterie.privacy.releases import NothingReleasedError
from coterie.privacy.score_histograms import CELLS, ScoreHistogram, unit_counts
from coterie.privacy.secure_aggregation.integers import Integers, discrete_gaussian, from_grid, to_grid, to_modulus
from coterie.privacy.secure_aggregation.noise_layers import NoiseLayers

#: What a masked round releases: the sum of updates, or one of the sums of a private evaluation.
TRAINING, ACCURACY, HISTOGRAM = "training", "accuracy", "histogram"


@dataclass(frozen=True)
class ScoreSum:
    """One private evaluation.

    Attributes:
        event: of its release.
        clients: M, all of them.
        threshold: l, those without which nothing is released.
        corrupt: c, clients that may work with the server.
        histograms: number of histograms in a vector; 0: it is an accuracy.
    """

    event: Event
    clients: int
    threshold: int
    corrupt: int
    histograms: int = 0

    @property
    def size(self) -> int:
        """Number of entries of a vector."""
        return self.histograms * CELLS or 1

    @property
    def layers(self) -> NoiseLayers:
        """The layers of one client's noise."""
        noise = self.event.noise_multiplier * STEPS
        return NoiseLayers.of(noise, self.clients, self.threshold, self.corrupt)

    def noise_of_all(self, survivors: int, unremoved: int = 0) -> float:
        """Return the noise multiplier of a sum with the noise of all survivors, some with their surplus."""
        return self.layers.deviation_of_sum(survivors, unremoved) / STEPS

    def encode(self, value: Any) -> Integers:
        """Return the vector of one client without noise, of L2 norm at most that of the grid.

        Args:
            value: an accuracy, clipped to [0, 1], or counts of scores; 1/2 or zeros stand for one that is invalid.
        """
        if self.histograms:
            return to_grid(unit_counts(value, self.histograms))
        return to_grid([2 * float(np.clip(np.nan_to_num(value, nan=0.5), 0.0, 1.0)) - 1])

    def simulated(self, values: Sequence[Any], rng: np.random.Generator) -> Integers:
        """Return the sum over the clients that replied, with the noise of all of them at once.

        Raises:
            NothingReleasedError: they are too few.
        """
        check_survivors(len(values), self.threshold)
        total = np.sum([self.encode(value) for value in values], axis=0)
        return np.asarray(total + discrete_gaussian(rng, self.noise_of_all(len(values)) * STEPS, self.size))

    def check_sum(self, total: Integers, survivors: int, unremoved: int = 0) -> None:
        """Check that the vectors of so many clients may have this sum.

        Raises:
            NothingReleasedError: their number is too small, or the norm exceeds that of all clients together.
        """
        check_survivors(survivors, self.threshold)
        if not has_possible_norm(total, survivors, self.noise_of_all(survivors, unremoved)):
            raise NothingReleasedError(
                "the sum of the clients' scores is impossible: its norm exceeds that of all clients together"
            )

    def accuracy(self, total: Integers) -> float:
        """Return the noisy mean accuracy of all clients, of a sum; missing ones count as one half."""
        return min(1.0, max(0.0, 0.5 + float(_units(total)[0]) / (2 * self.clients)))

    def histogram(self, total: Integers, survivors: int, unremoved: int = 0) -> ScoreHistogram:
        """Return the noisy histograms of a sum over so many clients."""
        return ScoreHistogram.of_units(_units(total), self.noise_of_all(survivors, unremoved))


def _units(total: Integers) -> FloatArray:
    return from_grid(to_modulus(total))
