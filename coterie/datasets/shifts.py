"""Distribution shifts between hidden groups of clients.

A shift is a pure function `(x, y, group, num_groups, num_classes, seed) -> (x, y)` of examples and targets in the
format of `Source`, with images as float32. It applies to both the training and the test data of a client, and raises
DataError for unsupported kinds of data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.datasets.sources import DataError

Examples = npt.NDArray[Any]
Targets = npt.NDArray[Any]
Shift = Callable[[Examples, Targets, int, int, int, int], tuple[Examples, Targets]]

#: Slope and intercept of the line of each group in shift `lines`.
LINES = ((2.0, 3.0), (-1.0, 1.0), (1.0, -1.0), (-2.0, -3.0))


def no_shift(
    x: Examples, y: Targets, group: int, num_groups: int, num_classes: int, seed: int
) -> tuple[Examples, Targets]:
    """Every group has the same distribution."""
    return x, y


def rotation(
    x: Examples, y: Targets, group: int, num_groups: int, num_classes: int, seed: int
) -> tuple[Examples, Targets]:
    """Rotate group g of G by g·360/G degrees counter-clockwise (IFCA, arXiv:2006.04088; RC-DPFL).

    Quarter turns of square images are exact. Other rotations are bilinear, keep the image size and fill with zeros.

    Raises:
        DataError: the data are not images.
    """
    return _rotate("rotation", x, 360 * group / num_groups), y


def quarter_turns(
    x: Examples, y: Targets, group: int, num_groups: int, num_classes: int, seed: int
) -> tuple[Examples, Targets]:
    """Rotate group g by g·90 degrees, for any number of groups (RR-Cluster: 2:1:1 at 0, 90, 180).

    Raises:
        DataError: there are more than four groups, or the data are not images.
    """
    if num_groups > 4:
        raise DataError(f"shift 'rotation-90' has 4 distinct groups, not {num_groups}; use 'rotation'")
    return _rotate("rotation-90", x, 90 * group), y


def label_permutation(
    x: Examples, y: Targets, group: int, num_groups: int, num_classes: int, seed: int
) -> tuple[Examples, Targets]:
    """Permute the labels of every group but the first with a distinct random permutation
    (CFL's label-permutation problem, Sattler et al.).

    Raises:
        DataError: there are more groups than permutations, or the data have no labels.
    """
    _need_labels("label-permutation", num_classes)
    return x, _permutations(num_groups, num_classes, seed)[group][y]


def label_shift(
    x: Examples, y: Targets, group: int, num_groups: int, num_classes: int, seed: int
) -> tuple[Examples, Targets]:
    """Replace the labels of group g by y + g mod num_classes (RC-DPFL's concept shift).

    Raises:
        DataError: there are more groups than classes, so two groups would be equal, or the data have no labels.
    """
    _need_labels("label-shift", num_classes)
    if num_groups > num_classes:
        raise DataError(f"shift 'label-shift' has {num_classes} distinct groups, one per class, not {num_groups}")
    return x, (y + group) % num_classes


def rotation_and_permutation(
    x: Examples, y: Targets, group: int, num_groups: int, num_classes: int, seed: int
) -> tuple[Examples, Targets]:
    """Rotate group g of G by g·360/G degrees, and permute its labels by a distinct random permutation.

    Raises:
        DataError: the data are not images with labels, or there are more groups than permutations.
    """
    _need_labels("rotation-and-permutation", num_classes)
    turned = _rotate("rotation-and-permutation", x, 360 * group / num_groups)
    return turned, _permutations(num_groups, num_classes, seed)[group][y]


def lines(
    x: Examples, y: Targets, group: int, num_groups: int, num_classes: int, seed: int
) -> tuple[Examples, Targets]:
    """Replace the targets of group g by y + a·x + b with (a, b) = LINES[g] (RR-Cluster's synthetic data).

    Raises:
        DataError: there are more groups than lines, or the data are not points (n, 1) with real-valued targets.
    """
    if num_classes or y.dtype.kind != "f" or x.shape[1:] != (1,):
        raise DataError(
            f"shift 'lines' requires points with real targets, such as dataset 'lines-easy', not examples of shape "
            f"{x.shape[1:]} in {num_classes} classes; use shift 'none'"
        )
    if num_groups > len(LINES):
        raise DataError(f"shift 'lines' has {len(LINES)} distinct groups, not {num_groups}; use fewer")
    slope, intercept = (np.float32(value) for value in LINES[group])
    return x, y + (slope * x[:, 0] + intercept)


SHIFTS: dict[str, Shift] = {
    "none": no_shift,
    "rotation": rotation,
    "rotation-90": quarter_turns,
    "label-permutation": label_permutation,
    "label-shift": label_shift,
    "rotation-and-permutation": rotation_and_permutation,
    "lines": lines,
}


def _need_labels(shift: str, num_classes: int) -> None:
    if not num_classes:
        raise DataError(
            f"shift '{shift}' requires labels of classes, which these data lack; use shift 'none' or 'lines'"
        )


def _rotate(shift: str, x: Examples, degrees: float) -> Examples:
    if x.ndim != 4:
        raise DataError(f"shift '{shift}' requires images, not examples of shape {x.shape[1:]}; use shift 'none'")
    turns, rest = divmod(degrees, 90)
    if rest == 0 and (x.shape[2] == x.shape[3] or turns % 2 == 0):
        return np.rot90(x, int(turns), axes=(2, 3))
    from scipy.ndimage import rotate

    rotated: Examples = rotate(x, degrees, axes=(2, 3), order=1, reshape=False)
    return rotated


@lru_cache(maxsize=8)
def _permutations(num_groups: int, num_classes: int, seed: int) -> npt.NDArray[np.int64]:
    """Return a distinct label permutation per group, (num_groups, num_classes); row 0 is the identity."""
    if num_groups > math.factorial(num_classes):
        raise DataError(
            f"shift 'label-permutation': {num_classes} classes have fewer than {num_groups} permutations; "
            "use fewer groups"
        )
    rng = np.random.default_rng(seed)
    rows = {tuple(range(num_classes)): None}
    while len(rows) < num_groups:
        rows[tuple(rng.permutation(num_classes).tolist())] = None
    return np.array(list(rows), dtype=np.int64)
