"""FeSEM: multi-center federated learning by stochastic expectation maximisation.

G. Long, M. Xie, T. Shen, T. Zhou, X. Wang, J. Jiang: Multi-Center Federated Learning: Clients Clustering for
Better Personalization, World Wide Web 2023, arXiv:2108.08647, Algorithm 1. A base of RR-Cluster
(papers/rr_cluster, Table 1) with a plan of ``rebalance_min = B``.

     1  initialise the centres theta_j, j in [k]
     2  repeat
     3      E-step: every client i is assigned to the centre nearest to its model,
                r_i <- argmin_j ||W_i - theta_j||^2
     4      M-step: every centre is the mean of the models that are assigned to it,
                theta_j <- mean of the W_i with r_i = j
     5      every client i: W_i <- LocalUpdate(theta_(r_i)), several local steps

Deviations from the paper
- A sampled cohort participates in each round, in the order 5, 3, 4: a client trains from its last assigned centre
  (initially a random one) and is then assigned to the centre nearest to the result.
- Under privacy, the client's model is the result of the *clipped* update, W_i = theta_(r_i) + clip(u_i, C). For the
  nearest j, the norm of W_i - theta_j is then at most C as well, so line 4 is a sum of vectors of norm at most C.
- The client, which receives all centres, computes the nearest one and stores r_i. The label is then a function of its
  own data, its own past and released values ("row-wise"), as client-level privacy requires. The server would obtain
  the same label.
- All centres start equal and diverge with their members (line 1 does not specify this). With distant initial centres,
  clients would stay in their random initial clusters.
"""

from __future__ import annotations

import math
from typing import ClassVar

from coterie.strategies.method import Models, Round
from coterie.strategies.strategy import ClusteredStrategy
from coterie.wire import EvaluateRequest, TrainRequest


class FeSEM(ClusteredStrategy):
    """One centre per cluster; a client belongs to the centre nearest to its own model."""

    name: ClassVar[str] = "fesem"
    title: ClassVar[str] = "clients join the centre nearest to their own model, optional rebalancing"
    paper: ClassVar[str] = "Long et al. 2023; RR-Cluster, Algorithm 1"
    row_wise: ClassVar[bool] = True
    equal_start: ClassVar[bool] = True  # line 1
    memory: ClassVar[bool] = True
    knows_label: ClassVar[bool] = False
    robust: ClassVar[bool] = True

    def round(self, number: int, models: Models) -> Round:
        """Lines 5, 3 and 4."""
        released = yield from self.sums(self.training(), models)  # lines 5 and 3: client/handlers.py::_train, _assign
        return self.step(models, released)  # line 4

    def training(self) -> TrainRequest:
        """Line 3, and C, the bound on the distance that a client's model moves."""
        bound = float(self.plan.clip_norm)
        return TrainRequest(assign="nearest", clip=bound if math.isfinite(bound) else None)

    def evaluation(self) -> EvaluateRequest:
        """Line 3."""
        return EvaluateRequest(assign="nearest")
