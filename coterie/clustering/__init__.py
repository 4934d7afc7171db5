"""Clustering algorithms: k-means, fuzzy c-means, deep clustering, Gaussian mixtures, and clusterers of distances."""

from coterie.clustering.fuzzy import fuzzy_c_means, memberships
from coterie.clustering.kmeans import k_means, k_means_labels

__all__ = ["fuzzy_c_means", "k_means", "k_means_labels", "memberships"]
