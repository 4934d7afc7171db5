"""The frame of k-FED and FFCM: clients send centroids of their records, which the server merges into k."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from coterie.messages import PointsSpec
from coterie.one_shot.base import FloatArray, OneShot
from coterie.privacy import Plan
from coterie.rounds import StrategyError
from coterie.wire import CentroidsRequest

if TYPE_CHECKING:
    from coterie.models.autoencoder import Labeller


class LocalCentroids(OneShot):
    """Merges centroids of all clients.

    Args:
        plan: see :class:`~coterie.one_shot.OneShot`, as for the other arguments.
        local_centroids: k', centroids of each client; 0: as many as clusters.
    """

    options: ClassVar[tuple[str, ...]] = (*OneShot.options, "local-centroids")
    #: Clustering algorithm of the clients.
    local: ClassVar[str]
    unfounded: ClassVar[tuple[str, ...]] = (
        "epsilon is infinite: clients send exact centroids, and that of few records shows them",
    )

    def __init__(self, plan: Plan, *, local_centroids: int = 0, **others: Any) -> None:
        super().__init__(plan, **others)
        if local_centroids < 0:
            raise StrategyError(f"local-centroids must be at least 0, not {local_centroids}")
        self.local_centroids = local_centroids or self.clusters

    def request(self) -> CentroidsRequest:
        """How many centroids, and by which method."""
        return CentroidsRequest(local=self.local, local_centroids=self.local_centroids)

    def reply_spec(self) -> PointsSpec:
        """At most the requested number of centroids; fewer if a client has fewer records."""
        return PointsSpec(self.shape, min(self.most, self.local_centroids))

    def cluster(self, points: Mapping[int, FloatArray]) -> Labeller:
        """(k, F) centroids of the centroids of all clients."""
        import torch

        from coterie.models.autoencoder import Labeller

        sent = {client: own.reshape(len(own), -1).astype(np.float64) for client, own in points.items()}
        labeller = Labeller(self.shape, self.clusters, self.encoder)
        with torch.no_grad():
            labeller.centroids.copy_(torch.as_tensor(self.merge(sent)))
        return labeller

    @abstractmethod
    def merge(self, sent: Mapping[int, npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
        """(k, F) centroids of the (n_i, F) centroids of every client."""
