"""FFCM: fuzzy c-means at every client, and k-means of the resulting centroids.

Stallmann, Wilbik, "Towards Federated Clustering: A Federated Fuzzy c-Means Algorithm (FFCM)", 2022, in one round,
as in the second baseline of papers/ppfc_gan.

    client i
     1  V_i <- k' centroids of X_i by fuzzy c-means with fuzzifier m; send them
    server
     2  C <- k-means of the centroids of all clients; send C to every client
    client i
     3  label of x <- argmin_r |x - c_r|

Details
- m = 1.1 follows the authors' later code. At m = 2, a common default, centroids coincide if there are many features.
- The authors repeat lines 1 and 2; papers/ppfc_gan uses one round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from coterie.clustering import k_means
from coterie.strategies.centroids import LocalCentroids
from coterie.wire import CentroidsRequest

#: m, the fuzzifier of fuzzy c-means.
FUZZIFIER = 1.1


class FFCM(LocalCentroids):
    """Lines 1 to 3."""

    name: ClassVar[str] = "ffcm"
    title: ClassVar[str] = "k-means of clients' fuzzy c-means"
    paper: ClassVar[str] = "Stallmann and Wilbik 2022"
    row_wise: ClassVar[bool] = False
    local: ClassVar[str] = "fuzzy-c-means"

    def request(self) -> CentroidsRequest:
        """Line 1."""
        return replace(super().request(), fuzzifier=FUZZIFIER)

    def merge(self, sent: Mapping[int, npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
        """Line 2."""
        every = np.concatenate(list(sent.values()))
        return k_means(every, self.clusters, self.streams.stream("clustering", 1))
