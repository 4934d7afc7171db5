"""f-CDPFL: DP-SGD clients choose their cluster by loss in every round; IFCA at record level.

A. Ghosh et al. 2020 (strategies/ifca.py) and Y. Mansour, M. Mohri, J. Ro, A. T. Suresh: Three Approaches for
Personalization, arXiv:2002.10619, as a baseline of RC-DPFL (papers/rc_dpfl, section 5.1).

     1  theta_m^1 at random, for every m
     2  for e in 1, ..., E do
     3      R(i) <- argmin_m f_i(theta_m), at each client i
     4      u_i <- DPSGD(theta_(R(i)), b, N_i, K, z_i, c), for each client i in parallel
     5      theta_m <- theta_m + weighted mean of u_i over R(i) = m, for every m

Deviations from the paper
- The choice in line 3 is private and charged by default; see strategies/rc_dpfl.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from coterie.strategies.ifca import IFCA
from coterie.strategies.method import Models, Round


class FCDPFL(IFCA):
    """IFCA with DP-SGD at the clients."""

    name: ClassVar[str] = "f-cdpfl"
    title: ClassVar[str] = "clients choose by loss in every round; DP-SGD at the clients"
    paper: ClassVar[str] = "Ghosh et al. 2020, Mansour et al. 2020; a baseline of RC-DPFL"
    row_wise: ClassVar[bool] = True
    finds_clusters: ClassVar[bool] = False
    searches: ClassVar[bool] = False
    units: ClassVar[tuple[str, ...]] = ("record", "none")

    @classmethod
    def max_selections(cls, rounds: int) -> int:
        """One per round."""
        return rounds

    def round(self, number: int, models: Models) -> Round:
        """Lines 3 to 5."""
        released = yield from self.sums(
            replace(self.training(), choice=True), models
        )  # lines 3-4: client/record_level.py
        return self.step(models, released)  # line 5
