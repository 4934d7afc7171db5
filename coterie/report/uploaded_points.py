"""Points uploaded for the clustering of records, and the codes of a sample of them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coterie.files import open_regular
from coterie.report.evidence import READ_ERRORS

#: Minimum and maximum number of plotted points; the first ones are used.
MIN_POINTS, MAX_POINTS = 5, 1000
_PERPLEXITY, _STEPS = 30, 500


@dataclass(frozen=True)
class Codes:
    """A sample of all points received by the server.

    Attributes:
        points: (n, F) flattened points.
        codes: (n, code) their codes; the points themselves if there is no encoder.
        labels: (n,) cluster of each point.
        clients: (n,) client of each point.
    """

    points: np.ndarray
    codes: np.ndarray
    labels: np.ndarray
    clients: np.ndarray

    @property
    def encoded(self) -> bool:
        """Whether the codes differ from the points."""
        return self.points.shape != self.codes.shape or not np.array_equal(self.points, self.codes)


def read_points(path: Path) -> np.ndarray | None:
    """Read the points (n, *shape) of a client; None if the file is incomplete."""
    try:
        with os.fdopen(open_regular(path), "rb") as opened, np.load(opened, allow_pickle=False) as file:
            points = np.asarray(file["points"], np.float32)
    except READ_ERRORS:
        return None
    return points if points.ndim > 1 and points.size and np.isfinite(points).all() else None


def read_codes(path: Path) -> Codes | None:
    """Read the sample of all points; None if the file is missing or incomplete."""
    try:
        with os.fdopen(open_regular(path), "rb") as opened, np.load(opened, allow_pickle=False) as file:
            labels, clients = (np.asarray(file[name], np.int64) for name in ("labels", "clients"))
            n = len(labels)
            points, codes = (np.asarray(file[name], np.float32).reshape(n, -1) for name in ("points", "codes"))
            sample = Codes(points, codes, labels, clients)
    except READ_ERRORS:
        return None
    shaped = labels.shape == clients.shape == (n,) and labels.min(initial=0) >= 0
    return sample if n and shaped and np.isfinite(points).all() and np.isfinite(codes).all() else None


def embed(vectors: np.ndarray) -> np.ndarray:
    """Embed at least :data:`MIN_POINTS` vectors (n, F) in the plane, (n, 2), by t-SNE with a fixed seed."""
    from sklearn.manifold import TSNE

    spread = min(vectors.shape) >= 2 and np.ptp(vectors, axis=0).max() > 0
    start, perplexity = "pca" if spread else "random", min(_PERPLEXITY, (len(vectors) - 1) / 3)
    return np.asarray(TSNE(perplexity=perplexity, init=start, max_iter=_STEPS, random_state=0).fit_transform(vectors))
