"""Synthetic regression data of RR-Cluster (Table 9): points around lines, which shift `lines` adds."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from coterie.datasets.sources import DatasetInfo, Source

_TRAIN, _TEST = 40_000, 4_000


def _read(info: DatasetInfo, root: Path, *, deviation: float) -> Source:
    """Draw x uniformly from [-1, 1] and y as noise, with NumPy's legacy generator, whose stream is frozen."""
    rng = np.random.RandomState(0)
    x = rng.uniform(-1, 1, (_TRAIN + _TEST, 1)).astype(np.float32)
    y = (deviation * rng.standard_normal(_TRAIN + _TEST)).astype(np.float32)
    return Source(info.name, x[:_TRAIN], y[:_TRAIN], x[_TRAIN:], y[_TRAIN:], info.num_classes)


#: Built-in synthetic data sets.
LINE_CLOUDS: tuple[DatasetInfo, ...] = tuple(
    DatasetInfo(
        name,
        f"Points about lines, noise of deviation {deviation:g}; shift 'lines' adds the lines (RR-Cluster, Table 9)",
        (1,),
        0,
        _TRAIN,
        _TEST,
        "generated",
        "embedded: nothing to download",
        partial(_read, deviation=deviation),
        kind="vectors",
    )
    for name, deviation in (("lines-easy", 0.1), ("lines-hard", 1.0))
)
