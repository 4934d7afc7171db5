"""Clients from Flower Datasets: every partition of a partitioner is one client of Coterie.

`clients` returns a `Source` with owners, so that Coterie leaves the partition as it is. It uses three things of a
partitioner: `num_partitions`, `load_partition(i)`, and of the returned Hugging Face dataset `dataset[:]`, a dictionary
of columns. Any object that has them will do.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from coterie.datasets import DataError, Source


class Partition(Protocol):
    """What is used of `datasets.Dataset`."""

    def __len__(self) -> int:
        """Number of rows."""

    def __getitem__(self, rows: slice, /) -> Mapping[str, Sequence[Any]]:
        """Return these rows by column."""


class Partitioner(Protocol):
    """What is used of `flwr_datasets.partitioner.Partitioner`, and of `FederatedDataset` for one split."""

    @property
    def num_partitions(self) -> int:
        """Number of clients."""

    def load_partition(self, partition_id: int) -> Partition:
        """Return the rows of one client."""


def clients(
    name: str, partitioner: Partitioner, *, image: str, label: str, num_classes: int, test_share: float = 0.2
) -> Source:
    """Return the partitions as the natural clients of a data set.

    Args:
        name: name for messages.
        partitioner: its data set is assigned.
        image: column of the images: PIL images, or nested lists (H, W) or (H, W, C), with pixels 0 to 255.
        label: column of the labels, 0 to num_classes - 1.
        num_classes: number of classes.
        test_share: share of each client's rows that are held out, the last ones; at least one.

    Raises:
        DataError: a partition has less than two rows, or no such column.
    """
    parts: dict[str, list[Any]] = {key: [] for key in ("train_x", "train_y", "test_x", "test_y")}
    owners: dict[str, list[Any]] = {"train_owner": [], "test_owner": []}
    for client in range(partitioner.num_partitions):
        partition = partitioner.load_partition(client)
        columns = partition[:]
        if len(partition) < 2 or not {image, label} <= columns.keys():
            raise DataError(
                f"{name}: partition {client} has {len(partition)} rows and columns {', '.join(columns)}; it needs two "
                f"rows and the columns {image} and {label}"
            )
        x = np.stack([_pixels(each) for each in columns[image]])
        y = np.asarray(columns[label], np.int64)
        held_out = min(max(1, round(test_share * len(y))), len(y) - 1)
        for part, rows in (("train", slice(None, -held_out)), ("test", slice(-held_out, None))):
            parts[f"{part}_x"].append(x[rows])
            parts[f"{part}_y"].append(y[rows])
            owners[f"{part}_owner"].append(np.full(len(y[rows]), client, np.int64))
    joined = {key: np.concatenate(values) for key, values in {**parts, **owners}.items()}
    return Source(name, num_classes=num_classes, **joined)


def _pixels(image: Any) -> np.ndarray:
    """Return an image as uint8 (C, H, W)."""
    pixels = np.asarray(image, np.uint8)
    return pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0)
