"""Re-seeding: post-processing of released histograms that ends model collapse.

IFCA's models can collapse: a few of them serve every client and the rest never train. While rounds remain, a
starving model is overwritten by a perturbed copy of the fullest one, which is perturbed the opposite way, so
that the clients of two groups that share a model can part.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Reseeding:
    """When and how models are re-seeded. Thresholds read released histograms only.

    Attributes:
        every: rounds between two chances; 0 never re-seeds.
        until: part of the rounds after which models are left alone.
        starving: a model below this part of its fair share is overwritten ...
        crowded: ... by a copy of the fullest, if that is above this multiple of its own.
        spread: length of the perturbation relative to that of the copied model.
    """

    every: int = 5
    until: float = 0.6
    starving: float = 0.35
    crowded: float = 1.4
    spread: float = 0.3

    def due(self, round: int, rounds: int) -> bool:
        """Whether models may be re-seeded after ``round`` of ``rounds``."""
        return self.every > 0 and round % self.every == 0 and round <= self.until * rounds

    def __call__(
        self, models: npt.NDArray[np.float32], shares: FloatArray, rng: np.random.Generator, shared: int = 0
    ) -> tuple[npt.NDArray[np.float32], FloatArray, list[tuple[int, int]]]:
        """Re-seeded models, the shares that go with them, and which model was copied over which.

        Args:
            models: (k, d).
            shares: (k,) running mean of released histograms.
            rng: for the direction of each perturbation.
            shared: leading coordinates that all models share; they stay as they are.
        """
        models, shares, moves = models.copy(), shares.copy(), []
        fair = max(float(shares.sum()), 0.0) / len(shares)
        for hungry in np.argsort(shares):
            full = int(np.argmax(shares))
            if shares[hungry] >= self.starving * fair or shares[full] <= self.crowded * fair:
                break
            copied = models[full, shared:]
            direction = rng.standard_normal(len(copied))
            direction *= self.spread * float(np.linalg.norm(copied) / np.linalg.norm(direction))
            models[hungry, shared:], models[full, shared:] = copied - direction, copied + direction
            shares[hungry] = shares[full] = (shares[full] + shares[hungry]) / 2
            moves.append((full, int(hungry)))
        return models, shares, moves
