"""FedProx: FedAvg whose clients stay near the global model.

T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith: Federated Optimization in Heterogeneous
Networks, MLSys 2020, arXiv:1812.06127, Algorithm 2. A baseline of RR-Cluster (papers/rr_cluster, Table 5).

     1  for t = 0, ..., T - 1 do
     2      server: S_t <- random set of clients
     3      server: send w^t to them
     4      client k in S_t: w_k <- a gamma-inexact minimiser of F_k(w) + mu / 2 ||w - w^t||^2
     5      client k: send w_k
     6      server: w^(t+1) <- mean of the w_k

Deviations from the paper
- The minimiser of line 4 is a number of epochs of SGD with mu (w - w^t) added to the gradient
  (client/training.py), the same number for every client.
- Clients are drawn uniformly and weighted alike; updates travel in place of models (see fedavg.py).
"""

from __future__ import annotations

from typing import Any, ClassVar

from coterie.privacy import Plan
from coterie.rounds import StrategyError
from coterie.strategies.fedavg import FedAvg
from coterie.wire import TrainRequest


class FedProx(FedAvg):
    """FedAvg with a proximal term in every client's loss.

    Args:
        plan: see :class:`~coterie.strategies.ClusteredStrategy`, as for the other arguments.
        proximal_mu: mu, at least 0; 0 is FedAvg.
    """

    name: ClassVar[str] = "fedprox"
    title: ClassVar[str] = "one global model, clients kept near it by a proximal term"
    paper: ClassVar[str] = "Li et al. 2020"
    row_wise: ClassVar[bool] = True
    units: ClassVar[tuple[str, ...]] = ("client", "none")
    options: ClassVar[tuple[str, ...]] = ("proximal-mu",)

    def __init__(self, plan: Plan, *, proximal_mu: float = 0.1, **others: Any) -> None:
        super().__init__(plan, **others)
        if not proximal_mu >= 0:
            raise StrategyError(f"proximal-mu must be at least 0, not {proximal_mu}")
        self.proximal_mu = proximal_mu

    def training(self) -> TrainRequest:
        """Line 4: mu."""
        return TrainRequest(proximal_mu=float(self.proximal_mu))
