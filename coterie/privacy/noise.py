"""How the noise of one Gaussian release divides between its parts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from coterie.privacy.accountants import PrivacyError

#: Relative rounding of deviations of noise.
SLACK = 1e-9


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


def check_noise(parts: Iterable[tuple[float, float | None]], charged: float) -> None:
    """Check that the parts of a Gaussian release have, together, the noise that is charged.

    Args:
        parts: sensitivity and standard deviation of the noise of each part; None: it is not released.
        charged: noise multiplier of the event.

    Raises:
        PrivacyError: the parts have less noise.

    Examples:
        >>> check_noise([(1.0, 2.0), (0.5, None)], charged=2.0)
        >>> check_noise([(1.0, 2.0), (1.0, 10.0)], charged=2.0)
        Traceback (most recent call last):
        coterie.privacy.accountants.PrivacyError: a release has noise multiplier 1.96116, less than the charged one, 2
    """
    shift = math.hypot(*(sensitivity / deviation for sensitivity, deviation in parts if deviation is not None))
    if not shift * charged <= 1 + SLACK:
        raise PrivacyError(f"a release has noise multiplier {1 / shift:g}, less than the charged one, {charged:g}")
