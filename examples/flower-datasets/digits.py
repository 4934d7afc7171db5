"""Scikit-learn's digits, divided by Flower Datasets: every client has few of the classes."""

import numpy as np
from flower_clients import clients
from sklearn.datasets import load_digits

from coterie.datasets import Source


def pathological() -> Source:
    """Return 20 clients with two classes each."""
    from datasets import Dataset  # type: ignore[import-not-found, unused-ignore]
    from flwr_datasets.partitioner import PathologicalPartitioner  # type: ignore[import-not-found, unused-ignore]

    images, labels = load_digits(return_X_y=True)
    pixels = np.minimum(16 * images, 255).astype(np.uint8).reshape(-1, 8, 8)
    partitioner = PathologicalPartitioner(num_partitions=20, partition_by="label", num_classes_per_partition=2, seed=0)
    partitioner.dataset = Dataset.from_dict({"image": pixels.tolist(), "label": labels.tolist()})
    return clients("digits", partitioner, image="image", label="label", num_classes=10)
