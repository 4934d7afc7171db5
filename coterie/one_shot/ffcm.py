"""FFCM: fuzzy c-means in every client, and k-means of what they found.

Stallmann, Wilbik, "Towards Federated Clustering: A Federated Fuzzy c-Means Algorithm (FFCM)", 2022, in one round,
as the second baseline of papers/ppfc_gan takes it.

    client i
     1  V_i <- k' centroids of X_i by fuzzy c-means with fuzzifier m; send them
    server
     2  C <- k-means of the centroids of all clients; send C to every client
    client i
     3  label of x <- argmin_r |x - c_r|

Details
- m = 1.1 is the authors' later code. At m = 2, a common default, centroids of many features fall together.
- The authors repeat lines 1 and 2; papers/ppfc_gan counts one round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from coterie.clustering import k_means
from coterie.one_shot.centroids import LocalCentroids
from coterie.privacy import Plan
from coterie.rounds import StrategyError
from coterie.wire import CentroidsRequest


class FFCM(LocalCentroids):
    """Lines 1 to 3.

    Args:
        plan: see :class:`~coterie.one_shot.centroids.LocalCentroids`, as for the other arguments.
        fuzzifier: m, above 1.
    """

    name: ClassVar[str] = "ffcm"
    title: ClassVar[str] = "k-means of clients' fuzzy c-means"
    paper: ClassVar[str] = "Stallmann and Wilbik 2022"
    row_wise: ClassVar[bool] = False
    options: ClassVar[tuple[str, ...]] = (*LocalCentroids.options, "fuzzifier")
    local: ClassVar[str] = "fuzzy-c-means"

    def __init__(self, plan: Plan, *, fuzzifier: float = 1.1, **others: Any) -> None:
        super().__init__(plan, **others)
        if not fuzzifier > 1:
            raise StrategyError(f"fuzzifier must be above 1, not {fuzzifier:g}")
        self.fuzzifier = fuzzifier

    def request(self) -> CentroidsRequest:
        """Line 1."""
        return replace(super().request(), fuzzifier=self.fuzzifier)

    def merge(self, sent: Mapping[int, npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
        """Line 2."""
        every = np.concatenate(list(sent.values()))
        return k_means(every, self.clusters, self.streams.stream("clustering", 1))
