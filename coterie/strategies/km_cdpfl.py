"""KM-CDPFL: the server clusters clients after every round by k-means on their updates (myopic clustering).

M. Werner, L. He, S. P. Karimireddy, M. Jordan, M. Jaggi: Provably Personalized and Robust Federated Learning, TMLR
2023, arXiv:2306.08393, as a baseline of RC-DPFL (papers/rc_dpfl, section 5.1), where clients run DP-SGD.

     1  every client's model starts at theta^init
     2  for e in 1, ..., E do
     3      for each client i in parallel: u_i <- DPSGD(theta_(R(i)), b, N_i, K, z, c)
     4      server: R <- k-means(u_1, ..., u_n; M)
     5              theta_m <- weighted mean of theta_(R_old(i)) + u_i over R(i) = m, for every m

Deviations from the paper
- RC-DPFL states only that k-means runs on the noisy updates at the end of each round. Line 5 follows: a client's
  model is the result of its training, and the model of a cluster is the mean over its members.
- k-means uses all principal component scores of the updates, which preserve the distances between updates.
- A client without a reply keeps its cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from coterie.clustering import k_means_labels
from coterie.clustering.mixture import project
from coterie.strategies.method import Models, Round
from coterie.strategies.strategy import ClusteredStrategy

_LABELS = "labels"


class KMCDPFL(ClusteredStrategy):
    """k-means on the updates of every round; cluster indices of different rounds need not correspond."""

    name: ClassVar[str] = "km-cdpfl"
    title: ClassVar[str] = "k-means on the updates of every round; DP-SGD at the clients"
    paper: ClassVar[str] = "Werner et al. 2023; a baseline of RC-DPFL"
    row_wise: ClassVar[bool] = False
    equal_start: ClassVar[bool] = True  # line 1
    units: ClassVar[tuple[str, ...]] = ("record", "none")

    def round(self, number: int, models: Models) -> Round:
        """Lines 3 to 5."""
        released = yield from self.updates(self.training(), models, to=self.assignments(number))  # line 3
        if not len(released.updates):
            return models
        rng = self.streams.stream("k-means", number, self.attempt)
        scores = project(released.updates) if len(released.updates) > 1 else np.zeros((1, 1))
        clusters = k_means_labels(scores, min(len(models), len(scores)), rng)  # line 4
        updated = models.copy()
        for cluster in np.unique(clusters):  # line 5
            members = np.flatnonzero(clusters == cluster)
            total = np.zeros(models.shape[1])
            for i in members:
                moved = models[released.labels[i]] + self.options.server_lr * released.updates[i]
                total += released.weights[i] * moved
            updated[cluster] = total / released.weights[members].sum()
        labels = self.state.get(_LABELS, np.zeros(self.plan.clients, np.int64)).copy()
        labels[released.clients] = clusters
        self.state = {_LABELS: labels}
        return updated

    def assignments(self, number: int) -> Mapping[int, int]:
        """The last clusters; initially cluster 0 for all clients, since all models are equal."""
        return dict(enumerate(self.state.get(_LABELS, np.zeros(self.plan.clients, np.int64)).tolist()))
