"""FedAvg: one model for all.

H. B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Aguera y Arcas: Communication-Efficient Learning of Deep
Networks from Decentralized Data, AISTATS 2017, arXiv:1602.05629, Algorithm 1; with client-level privacy it is
DP-FedAvg (McMahan et al. 2018, arXiv:1710.06963, fixed-denominator estimator).

     1  initialise w_0
     2  for each round t = 1, 2, ... do
     3      S_t <- random set of clients
     4      for each client k in S_t in parallel: w_k <- ClientUpdate(k, w_t), E epochs of batches of size B
     5      w_(t+1) <- w_t + 1 / D * sum over k in S_t of (w_k - w_t)

Deviations from the paper
- All clients have equal weights instead of n_k, because weights by number of examples would reveal these numbers;
  without privacy, `weights = records` has those of the paper.
- Under client-level privacy, D is qM, the expected number of clients; without privacy, it is their number. At record
  level the mean is weighted by public numbers of records, which gives RC-DPFL's baseline DPFedAvg (Noble et al. 2021).
"""

from __future__ import annotations

from typing import ClassVar

from coterie.strategies.method import Models, Round
from coterie.strategies.strategy import ClusteredStrategy


class FedAvg(ClusteredStrategy):
    """One global model; the baseline of every clustered method."""

    name: ClassVar[str] = "fedavg"
    title: ClassVar[str] = "one global model (DP-FedAvg under client-level privacy)"
    paper: ClassVar[str] = "McMahan et al. 2017, 2018"
    row_wise: ClassVar[bool] = True
    units: ClassVar[tuple[str, ...]] = ("client", "record", "none")
    clustered: ClassVar[bool] = False
    robust: ClassVar[bool] = True

    def round(self, number: int, models: Models) -> Round:
        """Lines 3 to 5."""
        released = yield from self.sums(self.training(), models)  # lines 3-4
        return self.step(models, released)  # line 5
