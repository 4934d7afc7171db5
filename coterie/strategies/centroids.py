"""The base of k-FED and FFCM: clients send centroids of their records, which the server merges into k."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from coterie.fields.settings import Settings
from coterie.strategies.one_shot import FloatArray, OneShot, OneShotSettings
from coterie.wire import CentroidsRequest
from coterie.wire.messages import PointsSpec

if TYPE_CHECKING:
    from coterie.models.autoencoder import Labeller


class LocalCentroids(OneShot):
    """Merges centroids of all clients."""

    point_name: ClassVar[str] = "local centroids"
    releases: ClassVar[tuple[str, ...]] = ("centroids",)
    settings_class: ClassVar[type[Settings]] = OneShotSettings
    #: Clustering algorithm of the clients.
    local: ClassVar[str]
    unfounded: ClassVar[tuple[str, ...]] = (
        "epsilon is infinite: clients send exact centroids, and that of few records shows them",
    )

    def request(self) -> CentroidsRequest:
        """The number of centroids, k' = k, and the clustering algorithm."""
        return CentroidsRequest(local=self.local, local_centroids=self.clusters, feature_range=self.feature_range)

    def reply_spec(self) -> PointsSpec:
        """At most the requested number of centroids; fewer if a client has fewer records."""
        return replace(super().reply_spec(), max_points=min(self.max_points, self.clusters))

    def cluster(self, points: Mapping[int, FloatArray]) -> Labeller:
        """(k, F) centroids of the centroids of all clients."""
        import torch

        from coterie.models.autoencoder import Labeller

        sent = {
            client: client_points.reshape(len(client_points), -1).astype(np.float64)
            for client, client_points in points.items()
        }
        labeller = Labeller(self.shape, self.clusters, self.encoder)
        with torch.no_grad():
            labeller.centroids.copy_(torch.as_tensor(self.merge(sent)))
        return labeller

    @abstractmethod
    def merge(self, sent: Mapping[int, npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
        """(k, F) centroids of the (n_i, F) centroids of every client."""
