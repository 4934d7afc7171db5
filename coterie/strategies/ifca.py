"""IFCA: the iterative federated clustering algorithm.

A. Ghosh, J. Chung, D. Yin, K. Ramchandran: An Efficient Framework for Clustered Federated Learning, NeurIPS
2020, arXiv:2006.04088, Algorithm 1 (option II, model averaging). With client-level privacy and the setting
``rebalance-min``, B of RR-Cluster, it is that paper's Algorithm 2.

     1  input: number of clusters k, step size, theta_j^(0) for j in [k]
     2  for t = 0, 1, ..., T - 1 do
     3      server: broadcast theta_j^(t) for all j
     4      M_t <- random subset of the M clients
     5      for client i in M_t in parallel do
     6          cluster identity j <- argmin_j F_i(theta_j^(t)),  s_i = one-hot of j
     7          theta_i <- LocalUpdate(theta_j^(t)), several local steps
     8          send theta_i - theta_j^(t) and s_i
     9      server: theta_j^(t+1) <- theta_j^(t) + eta / D_j * sum of the updates with label j, eta = ``server-lr``

Deviations from the paper
- Clients send updates instead of models. Their sum is divided by a public divisor D_j instead of the true number of
  members, as client-level privacy requires; without privacy, D_j is that number, as in the paper.
- Local steps run over shuffled mini-batches for ``local-epochs`` epochs.
- With rebalancing, line 9 takes the label that a client has redrawn (privacy/mechanisms/rebalancing.py).
- Models of clusters whose released size stays small are re-seeded from other models (strategies/reseeding.py);
  Algorithm 1 relies on several restarts instead.
- With ``clusters = 0``, the number of clusters is found from released histograms (strategies/model_search.py).
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from coterie.strategies.method import Models, Round
from coterie.strategies.strategy import ClusteredStrategy


class IFCA(ClusteredStrategy):
    """One model per cluster; every client chooses the one with the smallest loss on its training data."""

    name: ClassVar[str] = "ifca"
    title: ClassVar[str] = "iterative federated clustering, private sums and counts, optional rebalancing"
    paper: ClassVar[str] = "Ghosh et al. 2020; RR-Cluster, Algorithm 2"
    row_wise: ClassVar[bool] = True  # a label depends on the client's own data and released models alone (line 6)
    robust: ClassVar[bool] = True  # models change by line 9 alone, also with a median in the place of the sum
    finds_clusters: ClassVar[bool] = True  # with clusters = 0 ...
    searches: ClassVar[bool] = True  # ... by a search that begins with max-clusters models

    def round(self, number: int, models: Models) -> Round:
        """Lines 3 to 9; ``sums`` exchanges messages with a cohort, and returns noisy sums by label."""
        released = yield from self.sums(self.training(), models)  # lines 3-8; 6-8 are client/handlers.py::_train
        return self.step(models, released)  # line 9

    def initial_models(self, models: Models) -> Models:
        """Line 1: k different models. Copies of one model get noise with the standard deviation of its parameters."""
        every = super().initial_models(models)
        if len(models) == 1 and len(every) > 1:
            rng = self.streams.stream("models")
            noise = rng.standard_normal(every.shape) * models.std()
            noise[0] = 0.0
            return np.asarray(every + noise, dtype=np.float32)
        return every
