"""RR-Cluster: private clustered training that moves random clients of large clusters to small ones.

X. Yang, S. Hu, S. Kim, T. Li: Differentially Private Federated Clustering with Random Rebalancing
(papers/rr_cluster), Algorithm 1. It adds line 10 to a base method, which defines the other lines (Table 1).

     3  for t = 0, ..., T - 1 do
     4      server samples M^t from the M clients with probability q
     5      server sends theta_1, ..., theta_k to M^t
     6      client i returns its update u_i and other information s_i
     7-9    server privatises s_i, partitions M^t into S_1, ..., S_k, and compares |S_j| with B
    10      server samples clients of large groups into small ones, such that |S_j| >= B for every j
    11-13   server adds the clipped, noisy mean of the updates of S_j to theta_j

Lines 4 to 6 and 11 to 13 are those of the base (strategies/ifca.py, fesem.py or fedcam.py), lines 7 to 10 those of the
mechanism (privacy/mechanisms/rebalancing.py), in three forms.

Deviations from the paper
- By default, B is a third of the expected members qM / k, rounded down. The paper chooses it from {4, 8, 12} for
  qM / k of 25 and 50.
- A base with ``rebalance-min = B`` is the same method; this one has the name of the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from coterie.fields.settings import Settings, setting
from coterie.privacy import Plan
from coterie.rounds.run_state import StrategyError
from coterie.strategies.fedcam import FedCAM
from coterie.strategies.fesem import FeSEM
from coterie.strategies.ifca import IFCA
from coterie.strategies.strategy import ClusteredStrategy


@dataclass(frozen=True)
class RRClusterSettings(Settings):
    """Settings of RR-Cluster."""

    table: ClassVar[str] = "rr-cluster"

    base: str = setting("ifca", "method whose clusters are rebalanced", choices=("ifca", "fesem", "fedcam"), tuned=True)


class RRCluster(ClusteredStrategy):
    """A base method with random rebalancing of small clusters; instances are of the subclasses below."""

    name: ClassVar[str] = "rr-cluster"
    title: ClassVar[str] = "random rebalancing of small clusters, on IFCA, FeSEM or FedCAM"
    paper: ClassVar[str] = "RR-Cluster, Algorithms 1 and 2"
    row_wise: ClassVar[bool] = True
    robust: ClassVar[bool] = True
    rebalances: ClassVar[bool] = True
    finds_clusters: ClassVar[bool] = False
    searches: ClassVar[bool] = False
    settings_class: ClassVar[type[Settings]] = RRClusterSettings
    settings: RRClusterSettings

    def __new__(cls, plan: Plan, settings: RRClusterSettings | None = None, *_: object, **options: object) -> RRCluster:
        """Create the strategy with the configured base; subclasses have theirs already."""
        on: dict[str, type[Any]] = {"ifca": _RRClusterIFCA, "fesem": _RRClusterFeSEM, "fedcam": _RRClusterFedCAM}
        strategy: RRCluster = super().__new__(on[(settings or RRClusterSettings()).base] if cls is RRCluster else cls)
        return strategy

    def check(self) -> None:
        """Line 10 requires B."""
        if not self.plan.rebalance_min:
            raise StrategyError("rr-cluster requires rebalance-min of at least 1, or auto; otherwise use its base")
        super().check()


class _RRClusterIFCA(RRCluster, IFCA):
    """Algorithm 2."""


class _RRClusterFeSEM(RRCluster, FeSEM):
    """Algorithm 1 with FeSEM."""


class _RRClusterFedCAM(RRCluster, FedCAM):
    """Algorithm 1 with FedCAM."""
