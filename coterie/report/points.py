"""What clients sent to have their records clustered: points of every client, and codes of some of all points."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coterie.files import open_regular
from coterie.report.evidence import BROKEN

#: Fewer points have no picture; of more, the first.
FEWEST, MOST = 5, 1000
_PERPLEXITY, _STEPS = 30, 500


@dataclass(frozen=True)
class Codes:
    """A sample of all points, as the server saw them.

    Attributes:
        points: (n, F) flattened.
        codes: (n, code) what the encoder makes of them; the points themselves where there is none.
        labels: (n,) the cluster of each.
        clients: (n,) whose they are.
    """

    points: np.ndarray
    codes: np.ndarray
    labels: np.ndarray
    clients: np.ndarray

    @property
    def encoded(self) -> bool:
        """Whether codes are anything else than the points."""
        return self.points.shape != self.codes.shape or not np.array_equal(self.points, self.codes)


def point_files(folder: Path) -> dict[int, Path]:
    """The files of points in a run folder by their clients, in order."""
    named = ((re.fullmatch(r"points-(\d+)\.npz", path.name), path) for path in folder.glob("evidence/*.npz"))
    return dict(sorted((int(match[1]), path) for match, path in named if match))


def read_points(path: Path) -> np.ndarray | None:
    """(n, *shape) what a client sent; None if the file is not whole."""
    try:
        with os.fdopen(open_regular(path), "rb") as opened, np.load(opened, allow_pickle=False) as file:
            points = np.asarray(file["points"], np.float32)
    except BROKEN:
        return None
    return points if points.ndim > 1 and points.size and np.isfinite(points).all() else None


def read_codes(path: Path) -> Codes | None:
    """The sample of all points; None if the file is not there or not whole."""
    try:
        with os.fdopen(open_regular(path), "rb") as opened, np.load(opened, allow_pickle=False) as file:
            labels, clients = (np.asarray(file[name], np.int64) for name in ("labels", "clients"))
            n = len(labels)
            points, codes = (np.asarray(file[name], np.float32).reshape(n, -1) for name in ("points", "codes"))
            sample = Codes(points, codes, labels, clients)
    except BROKEN:
        return None
    shaped = labels.shape == clients.shape == (n,) and labels.min(initial=0) >= 0
    return sample if n and shaped and np.isfinite(points).all() and np.isfinite(codes).all() else None


def plane(vectors: np.ndarray) -> np.ndarray:
    """(n, 2) where t-SNE puts vectors (n, F), the same every time; at least :data:`FEWEST` of them."""
    from sklearn.manifold import TSNE

    spread = min(vectors.shape) >= 2 and np.ptp(vectors, axis=0).max() > 0
    start, perplexity = "pca" if spread else "random", min(_PERPLEXITY, (len(vectors) - 1) / 3)
    return np.asarray(TSNE(perplexity=perplexity, init=start, max_iter=_STEPS, random_state=0).fit_transform(vectors))
