"""How the noise of one Gaussian release divides between its parts."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class NoiseSplit:
    """One release of updates (or gradients), counts and norms, whose parts are shares of 1 / z^2:

        1 / z^2 = 1 / z_u^2 + 1 / s_c^2 + 1 / (2 s_b)^2,

    where s_c is a share ``identifier_share`` of 1 / z^2, and s_b a share ``clip_share``; 0: it is not released.

    Attributes:
        noise_multiplier: z.
        identifier_share: share for counts or one-hot identifiers, of sensitivity 1.
        clip_share: share for a sum of 1/2 or -1/2 per update (or gradient), by whether it is short.
    """

    noise_multiplier: float
    identifier_share: float = 0.0
    clip_share: float = 0.0

    @property
    def updates(self) -> float:
        """z_u, noise standard deviation of the sum of updates / their clipping norm."""
        return self.noise_multiplier / math.sqrt(1 - self.identifier_share - self.clip_share)

    @property
    def counts(self) -> float | None:
        """s_c, noise standard deviation of counts; None if they are not released."""
        return self.noise_multiplier / math.sqrt(self.identifier_share) if self.identifier_share else None

    @property
    def norms(self) -> float | None:
        """s_b, noise standard deviation of the sum of 1/2 or -1/2; None if it is not released."""
        return 0.5 * self.noise_multiplier / math.sqrt(self.clip_share) if self.clip_share else None
