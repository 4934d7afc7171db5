"""Re-seeding: post-processing of released histograms that ends model collapse.

IFCA's models can collapse: a few of them serve all clients and the others never train. In the first part of a run, a
model with too few clients is replaced by a perturbed copy of the model with most clients, which is perturbed in the
opposite direction, so that two groups of clients that share a model can separate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coterie.rounds.run_state import FloatArray, Models

# A model with less than this multiple of the equal share of clients is replaced ...
_REPLACE_BELOW = 0.35
# ... by a copy of the largest, if that has more than this multiple of the equal share.
_COPY_ABOVE = 1.4
# Norm of the perturbation relative to that of the copied model.
_PERTURBATION = 0.3


@dataclass(frozen=True)
class Reseeding:
    """Schedule of re-seeding, which depends on released histograms only.

    Attributes:
        every: number of rounds between two checks; 0 never re-seeds.
        until: share of the rounds after which no model is re-seeded.
    """

    every: int = 5
    until: float = 0.6

    def due(self, round: int, rounds: int) -> bool:
        """Whether models may be re-seeded after ``round`` of ``rounds``."""
        return self.every > 0 and round % self.every == 0 and round <= self.until * rounds

    def last(self, rounds: int) -> int:
        """Return the last of ``rounds`` after which models may be re-seeded; 0: none."""
        return next((number for number in range(rounds, 0, -1) if self.due(number, rounds)), 0)

    def __call__(
        self, models: Models, shares: FloatArray, rng: np.random.Generator, shared: int = 0
    ) -> tuple[Models, FloatArray, list[tuple[int, int]]]:
        """Re-seeded models, their shares, and pairs (copied model, replaced model).

        Args:
            models: (k, d).
            shares: (k,) running mean of released histograms.
            rng: for the direction of each perturbation.
            shared: number of leading coordinates that all models share; they do not change.
        """
        models, shares, moves = models.copy(), shares.copy(), []
        equal_share = max(float(shares.sum()), 0.0) / len(shares)
        for small in np.argsort(shares):
            large = int(np.argmax(shares))
            if shares[small] >= _REPLACE_BELOW * equal_share or shares[large] <= _COPY_ABOVE * equal_share:
                break
            copied = models[large, shared:]
            direction = rng.standard_normal(len(copied))
            direction *= _PERTURBATION * float(np.linalg.norm(copied) / np.linalg.norm(direction))
            models[small, shared:], models[large, shared:] = copied - direction, copied + direction
            shares[small] = shares[large] = (shares[large] + shares[small]) / 2
            moves.append((large, int(small)))
        return models, shares, moves
