"""Clusters of points: k-means, fuzzy c-means, and the deep clustering network. Clients, server and bench share them."""

from coterie.clustering.fuzzy import fuzzy_c_means, memberships
from coterie.clustering.kmeans import k_means

__all__ = ["fuzzy_c_means", "k_means", "memberships"]
