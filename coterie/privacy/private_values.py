"""Exact values of a client's records and units of privacy, which leave the client as noisy sums alone.

The classes have no other exit: no conversion to a number or an array, no item, no sum without noise. So a type check
fails where a reply has an exact value, and where the values of records stand for those of units.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from coterie.fields import LOSS_BOUND
from coterie.privacy.accountants import PrivacyError
from coterie.privacy.randomness import FloatArray
from coterie.privacy.releases import IntArray

# Range of the bound L of a value.
_LOW, _HIGH = LOSS_BOUND.low, LOSS_BOUND.high


class PerUnit:
    """Values of units of privacy: of records, or of units that have several records, such as patients.

    Args:
        values: (U, m) of every unit, such as its losses by m models.
    """

    __slots__ = ("__values",)

    def __init__(self, values: npt.ArrayLike) -> None:
        self.__values = np.asarray(values, np.float64)

    def noisy_sum(self, bound: float, noise: Callable[[tuple[int, ...]], FloatArray]) -> FloatArray:
        """Return the (m,) noisy sums of values that are clipped to [0, bound]; a unit moves each by at most 1.

        Args:
            bound: L, finite. Sums and noise are in units of L, so that their ratio does not depend on L. NaN counts
                as L.
            noise: Returns noise of this shape.

        Raises:
            PrivacyError: the bound is NaN, too small or too large.

        Examples:
            >>> PerUnit([[2.0, 0.5], [1.0, 0.5]]).noisy_sum(4.0, np.zeros)
            array([0.75, 0.25])
        """
        if not _LOW <= bound <= _HIGH:
            raise PrivacyError(f"the bound of a record's loss must lie in [{_LOW:g}, {_HIGH:g}], not {bound:g}")
        units = np.clip(np.nan_to_num(self.__values, nan=bound), 0.0, bound) / bound
        return np.asarray(units.sum(axis=0) + noise(units.shape[1:]))


class PerRecord:
    """Values of single records, which are units of privacy only if each record is one.

    Args:
        values: (n, m) of every record, such as its losses by m models.
    """

    __slots__ = ("__values",)

    def __init__(self, values: npt.ArrayLike) -> None:
        self.__values = np.asarray(values, np.float64)

    def per_unit(self, of_record: IntArray | None) -> PerUnit:
        """Return the means over the records of each unit.

        Args:
            of_record: (n,) index of each record's unit, from 0. None if each record is a unit.
        """
        if of_record is None:
            return PerUnit(self.__values)
        sums = np.zeros((int(of_record.max(initial=-1)) + 1, *self.__values.shape[1:]))
        np.add.at(sums, of_record, self.__values)
        sizes = np.bincount(of_record, minlength=len(sums))
        return PerUnit(sums / sizes[:, None])
