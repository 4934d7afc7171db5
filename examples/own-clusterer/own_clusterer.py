"""Spectral clustering of clients: normalised cuts of a graph whose weights fall with the distance."""

import numpy as np
import numpy.typing as npt
from sklearn.cluster import SpectralClustering


def spectral(distances: npt.NDArray[np.float64], num_clusters: int) -> npt.NDArray[np.int32]:
    """Return (n,) labels below ``num_clusters`` from the (n, n) distances between clients."""
    usual = max(float(np.median(distances)), 1e-30)
    affinity = np.exp(-((distances / usual) ** 2))
    found = SpectralClustering(num_clusters, affinity="precomputed", random_state=0).fit(affinity)
    return np.asarray(found.labels_, np.int32)
