"""FedProx: FedAvg with a proximal term that keeps clients near the global model.

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
  (client/penalties.py), the same number for every client.
- Clients are sampled uniformly with equal weights and send updates instead of models (see fedavg.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from coterie.fields import PENALTY_WEIGHT
from coterie.fields.settings import Settings, setting
from coterie.strategies.fedavg import FedAvg
from coterie.wire import TrainRequest


@dataclass(frozen=True)
class FedProxSettings(Settings):
    """Settings of FedProx."""

    table: ClassVar[str] = "fedprox"

    proximal_mu: float = setting(0.1, "weight of the proximal term, mu; 0 is FedAvg", within=PENALTY_WEIGHT, tuned=True)


class FedProx(FedAvg):
    """FedAvg with a proximal term in every client's loss."""

    name: ClassVar[str] = "fedprox"
    title: ClassVar[str] = "one global model, clients kept near it by a proximal term"
    paper: ClassVar[str] = "Li et al. 2020"
    row_wise: ClassVar[bool] = True
    settings_class: ClassVar[type[Settings]] = FedProxSettings
    settings: FedProxSettings

    def training(self) -> TrainRequest:
        """Line 4: mu."""
        return TrainRequest(penalty="proximal", penalty_weight=self.settings.proximal_mu)
