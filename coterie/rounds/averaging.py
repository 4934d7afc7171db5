"""Averaging: post-processing of released models that cancels part of their noise.

Under privacy, models fluctuate around their limit, since every round adds noise. The mean of the last rounds'
models (B. T. Polyak, A. B. Juditsky: Acceleration of Stochastic Approximation by Averaging, SIAM J. Control Optim.
1992) fluctuates less. Clients train from the last models; a run evaluates and returns the means.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Models = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Averaging:
    """The mean of the last models.

    Attributes:
        last: part of the rounds whose models are averaged, in [0, 1).
    """

    last: float = 0.0

    def begins_after(self, rounds: int) -> int:
        """The round after which models are averaged."""
        return rounds - round(self.last * rounds)

    def __call__(self, mean: Models | None, models: Models, current: int, rounds: int) -> Models | None:
        """(k, d) mean of the models so far, ``models`` those of round ``current``; None before averaging begins."""
        seen = current - self.begins_after(rounds)
        if seen < 1:
            return None
        return models if mean is None or seen == 1 else np.asarray(mean + (models - mean) / seen, dtype=np.float32)
