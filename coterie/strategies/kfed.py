"""k-FED: one round of k-means at every client; the server merges the centroids by farthest-point seeding.

Dennis, Li, Smith, "Heterogeneity for the Win: One-Shot Federated Clustering", ICML 2021, Algorithm 2; the first
baseline of papers/ppfc_gan.

    client i
     1  Theta_i <- k' centroids of X_i by k-means; send them
    server
     2  M <- Theta_i of any one client
     3  while |M| < k:  M <- M + the centroid of all clients that is farthest from M
     4  tau_r <- the centroids of all clients that are nearest to m_r, r = 1..k
     5  c_r <- mean of tau_r; send C to every client
    client i
     6  label of x <- argmin_r |x - c_r|

Details
- If k' is at least k, M starts from one centroid of that client: with k of them, line 3 would have no effect, and for
  a client with one class all seeds would belong to that class.
- Line 1 is k-means++ with restarts instead of the spectral initialisation of its Algorithm 1 (Awasthi and Sheffet),
  which the authors' code omits as well. A client with fewer records than k' sends one centroid per record.
- Line 6 follows papers/ppfc_gan. In k-FED itself, a record has the label of its local centroid.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from coterie.strategies.centroids import LocalCentroids


class KFED(LocalCentroids):
    """Lines 1 to 6."""

    name: ClassVar[str] = "kfed"
    title: ClassVar[str] = "k-means of clients' k-means, seeded far apart"
    paper: ClassVar[str] = "Dennis et al. 2021"
    row_wise: ClassVar[bool] = False
    local: ClassVar[str] = "k-means"

    def merge(self, sent: Mapping[int, npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
        """Lines 2 to 5."""
        from scipy.spatial.distance import cdist  # slow to import

        every = np.concatenate(list(sent.values()))
        rng = self.streams.stream("clustering", 1)
        first = sent[int(rng.choice(list(sent)))]
        seeds = first if len(first) < self.clusters else first[rng.integers(len(first)), None]  # line 2
        while len(seeds) < self.clusters:  # line 3
            apart = cdist(every, seeds).min(axis=1)
            seeds = np.concatenate([seeds, every[apart.argmax(), None]])
        nearest = cdist(every, seeds).argmin(axis=1)  # line 4
        held = [every[nearest == r] for r in range(self.clusters)]
        return np.stack(
            [members.mean(axis=0) if len(members) else seed for members, seed in zip(held, seeds, strict=True)]
        )
