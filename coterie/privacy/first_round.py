"""Noise of a first round whose updates a mixture clusters (RC-DPFL), from public numbers alone.

In units of lr c S, the update of S steps from a common model is a group's mean clipped gradient plus noise of deviation
s = z_1 / (b_1 sqrt(S)) in each of d coordinates (Equation (2) of the paper). Two rules give z_1:

- *Separation.* Noise adds d s^2 to the diagonal of the Gram matrix of n updates and spreads its eigenvalues by about
  s^2 sqrt(d n). A group of m clients at distance D adds about m D^2. So principal components show it if D / s is some
  multiple of (d n)^(1/4) / sqrt(m), and then a minimum pairwise separation score of 3 requires D / s = 6. Together,

      (D / s)^2 = 2.5^2 sqrt(d n) / m + 6^2,

  where the factor of 2.5 was found by simulation (tests/clustering/test_mixture.py). D is assumed to be 0.09 c, and m
  to be half of an equal share, n / (2 groups). All clients that can afford s have the same s, whatever their N, as the
  mixture assumes.
- *Cost.* z of later rounds may exceed that of the same run without a first round of its own (first batch b, noise z) by
  a bounded factor. A client whose budget does not reach separation spends that much, and no more.

The number of groups is known: a mixture that must find it as well needs more signal.

Full batches are the cheapest for a given s: S b_1^2 / z_1^2 is proportional to the cost of round 1 as z_1 grows, and
smaller batches cost more at every finite z_1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Unpack

from coterie.privacy.record import RecordNumbers, RecordPlan

#: Largest z of later rounds over that of the same run without a first round of its own.
MAX_INCREASE = 1.05
#: D, the assumed distance between the mean clipped gradients of two groups, in units of c.
GROUP_DISTANCE = 0.09

# D / s at which principal components show groups, over (d n)^(1/4) / sqrt(m), and at which two groups are separated.
_SHOWN, _SEPARATED = 2.5, 6.0


@dataclass(frozen=True, kw_only=True)
class FirstRound:
    """Public numbers of a first round whose updates are clustered.

    Attributes:
        clients: n.
        groups: number of groups.
        parameters: d.
    """

    clients: int
    groups: int
    parameters: int

    def separating_noise(self, batch_size: int, steps: int) -> float:
        """Return the largest z_1 that separates groups at the assumed distance.

        Args:
            batch_size: b_1.
            steps: S, the steps of round 1.
        """
        members = max(self.clients / (2 * self.groups), 1.0)
        shown = _SHOWN * math.sqrt(math.sqrt(self.parameters * self.clients) / members)
        return batch_size * math.sqrt(steps) * GROUP_DISTANCE / math.hypot(shown, _SEPARATED)

    def calibrated(self, **numbers: Unpack[RecordNumbers]) -> RecordPlan:
        """Return a client's plan: the largest z_1 of the two rules, and the smallest z that the budget then allows.

        Args:
            numbers: those of :meth:`RecordPlan.calibrated`, without noise.

        Raises:
            PrivacyError: no noise suffices.
        """
        given: dict[str, Any] = {**numbers}
        without = RecordPlan.calibrated(**given | {"first_batch_size": None})
        most = MAX_INCREASE * without.noise_multiplier
        plan = RecordPlan(**given | {"noise_multiplier": most})
        batch = plan.batch(True)
        enough = self.separating_noise(batch, plan.steps(batch)) * math.sqrt(1 - plan.clip_share)
        separated = replace(plan, first_noise_multiplier=enough)
        if plan.rounds > 1 and separated.cost() <= plan.epsilon:
            return RecordPlan.calibrated(**given | {"first_noise_multiplier": enough})
        return RecordPlan.calibrated(**given | {"noise_multiplier": most})
