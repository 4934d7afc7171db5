"""Small last steps of a model that a client trains alone, so that it is a strong baseline.

Plain SGD with one step size ends at a distance from the minimum that grows with the step size. A model that others
share is a mean over clients, which removes most of it; for a model of one client, small last steps do.
"""

from __future__ import annotations

#: Step size of the last steps, as a share of that of training.
SMALL_STEP = 0.1
# Share of all steps that are small.
_SMALL = 0.25


def small_steps(total: int) -> int:
    """Return how many of ``total`` epochs or rounds, the last ones, have the small step size."""
    return int(_SMALL * total)
