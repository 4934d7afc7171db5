"""Data set of the table on weights of classes: few malignant tumours."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from coterie.datasets import Source, load

_MALIGNANT = 25


def rare_tumours() -> Source:
    """Return the table of breast cancer with one in twelve malignant tumours among the training records.

    Test records are all of that table, so that scores which do not depend on the share of a class have many of both.

    Examples:
        >>> source = rare_tumours()
        >>> np.bincount(source.train_y).tolist(), np.bincount(source.test_y).tolist()
        ([287, 25], [70, 44])
    """
    source = load("breast-cancer")
    malignant = np.flatnonzero(source.train_y == 1)
    kept = np.sort(np.concatenate([np.flatnonzero(source.train_y == 0), malignant[:_MALIGNANT]]))
    return replace(source, name="rare malignant tumours", train_x=source.train_x[kept], train_y=source.train_y[kept])
