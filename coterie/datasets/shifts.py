"""Shifts: what makes the data of one hidden group of clients differ from another's.

A shift is a pure function `(x, y, group, num_groups, num_classes, seed) -> (x, y)` on float32 images
(n, C, H, W) and int64 labels (n,). A client's training and test data go through the same one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from coterie.datasets.sources import DataError

Images = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]
Shift = Callable[[Images, Labels, int, int, int, int], tuple[Images, Labels]]


def no_shift(x: Images, y: Labels, group: int, num_groups: int, num_classes: int, seed: int) -> tuple[Images, Labels]:
    """Every group has the same distribution."""
    return x, y


def rotation(x: Images, y: Labels, group: int, num_groups: int, num_classes: int, seed: int) -> tuple[Images, Labels]:
    """Group g of G is rotated by g·360/G degrees, counter-clockwise (IFCA, arXiv:2006.04088; RC-DPFL).

    Exact for quarter turns of square images; else bilinear, in the same frame, with zeros at the corners.
    """
    return _rotate(x, 360 * group / num_groups), y


def quarter_turns(
    x: Images, y: Labels, group: int, num_groups: int, num_classes: int, seed: int
) -> tuple[Images, Labels]:
    """Group g is rotated by g·90 degrees, whatever the number of groups (RR-Cluster: 2:1:1 at 0, 90, 180).

    Raises:
        DataError: more than four groups.
    """
    if num_groups > 4:
        raise DataError(f"shift 'rotation-90' has 4 distinct groups, not {num_groups}; use 'rotation'")
    return _rotate(x, 90 * group), y


def label_permutation(
    x: Images, y: Labels, group: int, num_groups: int, num_classes: int, seed: int
) -> tuple[Images, Labels]:
    """Group 0 keeps its labels; each other group has its own random permutation of them, all distinct
    (CFL's label-permutation problem, Sattler et al.).

    Raises:
        DataError: more groups than there are permutations.
    """
    return x, _permutations(num_groups, num_classes, seed)[group][y]


def label_shift(
    x: Images, y: Labels, group: int, num_groups: int, num_classes: int, seed: int
) -> tuple[Images, Labels]:
    """Group g's labels are y + g mod num_classes (RC-DPFL's concept shift).

    Raises:
        DataError: more groups than classes, so that two groups would be the same.
    """
    if num_groups > num_classes:
        raise DataError(f"shift 'label-shift' has {num_classes} distinct groups, one a class, not {num_groups}")
    return x, (y + group) % num_classes


SHIFTS: dict[str, Shift] = {
    "none": no_shift,
    "rotation": rotation,
    "rotation-90": quarter_turns,
    "label-permutation": label_permutation,
    "label-shift": label_shift,
}


def _rotate(x: Images, degrees: float) -> Images:
    turns, rest = divmod(degrees, 90)
    if rest == 0 and (x.shape[2] == x.shape[3] or turns % 2 == 0):
        return np.rot90(x, int(turns), axes=(2, 3))
    from scipy.ndimage import rotate

    rotated: Images = rotate(x, degrees, axes=(2, 3), order=1, reshape=False)
    return rotated


@lru_cache(maxsize=8)
def _permutations(num_groups: int, num_classes: int, seed: int) -> Labels:
    """One permutation of the labels a group (num_groups, num_classes), row 0 the identity, no two equal."""
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
