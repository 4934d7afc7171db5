"""Noise in layers, of which the surplus is removed when fewer clients drop out than there may.

XNoise of Z. Jiang, W. Wang, R. Chen: Dordis: Efficient Federated Learning with Dropout-Resilient Differential Privacy
(EuroSys 2024, arXiv:2209.12528), with few layers, and with a chain of keys in place of shares of every layer's seed.

     1  of a cohort of n clients at least l stay, and c of them may work with the server: n = m_0 > m_1 > ... > m_J = l
     2  a client adds the layers 0, ..., J; the first j + 1 have together the variance S^2 / (m_j - c)
     3  of u survivors, m_j <= u < m_(j-1), each keeps the layers 0, ..., j and reveals the later ones, which the server
        subtracts: at least u - c honest clients leave noise of S^2 (u - c) / (m_j - c) >= S^2 in the sum
     4  layer j is drawn by a key that follows from r_j: r_0 is secret, and r_(j+1) = H(r_j). So r_j reveals layer j and
        all later ones, and none before

The surplus of a client that leaves before it reveals anything stays in the sum.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock

import numpy as np
from randomgen import AESCounter

from coterie.privacy.noise import SLACK
from coterie.privacy.secure_aggregation.integers import Integers, discrete_gaussian
from coterie.privacy.secure_aggregation.keys import derive

#: Smallest deviation of a layer in steps of the grid: sums of discrete Gaussians have the law of one to 10^-4000.
MIN_STEPS = 32.0
# More layers leave less surplus between two of them, and take the server longer to draw: 4 leave 5 % at 30 % dropout.
_MOST_LAYERS = 4


@dataclass(frozen=True)
class Surplus:
    """What a client reveals of its noise.

    Attributes:
        key: r_j of the first layer that is not kept; empty if all are.
        digest: of these layers together, by which the server recognises that it draws other ones.
    """

    key: bytes = b""
    digest: bytes = b""


NO_SURPLUS = Surplus()


@dataclass(frozen=True)
class NoiseLayers:
    """The layers of a client's noise.

    Attributes:
        survivors: m_j, decreasing.
        deviations: of each layer, in steps of the grid.

    Examples:
        >>> layers = NoiseLayers.of(60_000.0, clients=10, least=7, corrupt=1)
        >>> layers.survivors, [round(deviation) for deviation in layers.deviations]
        ((10, 9, 8, 7), [20000, 7071, 8018, 9258])
        >>> [layers.kept(survivors) for survivors in (10, 9, 7)]
        [1, 2, 4]
    """

    survivors: tuple[int, ...]
    deviations: tuple[float, ...]

    @classmethod
    def of(cls, total: float, clients: int, least: int, corrupt: int) -> NoiseLayers:
        """Return the layers with which honest survivors always have noise of the deviation `total` together.

        A layer below :data:`MIN_STEPS` is part of the next one; the last one is not smaller.

        Args:
            total: S, in steps of the grid.
            clients: n.
            least: l.
            corrupt: c, below l.
        """
        steps = min(clients - least, _MOST_LAYERS)
        survivors, deviations = [clients], [total / math.sqrt(clients - corrupt)]
        for step in range(1, steps + 1):
            level = clients - round(step * (clients - least) / steps)
            missing = total**2 / (level - corrupt) - sum(deviation**2 for deviation in deviations)
            if missing >= MIN_STEPS**2 or level == least:
                survivors.append(level)
                deviations.append(math.sqrt(max(missing, MIN_STEPS**2)))
        return cls(tuple(survivors), tuple(deviations))

    def kept(self, survivors: int) -> int:
        """Return the number of layers that so many survivors keep."""
        return min(1 + sum(survivors < level for level in self.survivors), len(self.survivors))

    def deviation(self, survivors: int | None = None) -> float:
        """Return the deviation of the noise that each of so many survivors keeps; None: of all layers."""
        kept = len(self.deviations) if survivors is None else self.kept(survivors)
        return math.hypot(*self.deviations[:kept])

    def deviation_of_sum(self, survivors: int, unremoved: int = 0) -> float:
        """Return the deviation of the noise of so many survivors together, some of them with their surplus."""
        removed = (survivors - unremoved) * self.deviation(survivors) ** 2
        return math.sqrt(removed + unremoved * self.deviation() ** 2)

    def suffice(self, total: float, clients: int, least: int, corrupt: int) -> bool:
        """Return whether honest survivors always have noise of a deviation together.

        Args:
            total: the deviation, in steps of the grid.
            clients: of the cohort.
            least: survivors below which nothing is released.
            corrupt: survivors that may be corrupt.
        """
        # between two levels, more survivors have more noise
        counts = {least, *(level for level in self.survivors if least <= level <= clients)}
        honest = (math.sqrt(survivors - corrupt) * self.deviation(survivors) for survivors in counts)
        return min(self.deviations) >= MIN_STEPS and min(honest) * (1 + SLACK) >= total

    def draw(self, key: bytes, size: int, first: int = 0) -> tuple[Integers, list[bytes]]:
        """Draw the layers from `first` on, by the key of that one.

        Returns:
            their sum, (size,) integers; and for each of them a digest of the sum from it on.
        """
        keys = [key]
        for _ in self.deviations[first + 1 :]:
            keys.append(_next(keys[-1]))
        total, digests = np.zeros(size, np.int64), list[bytes]()
        for layer_key, deviation in zip(reversed(keys), reversed(self.deviations[first:]), strict=True):
            rng = np.random.Generator(AESCounter(key=int.from_bytes(derive(layer_key, b"layer")[:16])))
            total += discrete_gaussian(rng, deviation, size)
            digests.insert(0, hashlib.sha256(total.astype("<i8").tobytes()).digest())
        return total, digests

    def surplus(self, key: bytes, digests: Sequence[bytes], survivors: int) -> Surplus:
        """Return what a client reveals of its noise, by the first key, and the digests of the layers."""
        first = self.kept(survivors)
        if first >= len(digests):
            return NO_SURPLUS
        for _ in range(first):
            key = _next(key)
        return Surplus(key, digests[first])

    def total_surplus(self, revealed: Iterable[Surplus], size: int, survivors: int) -> tuple[Integers, int]:
        """Return the sum of what clients have revealed, and how many of them have revealed it.

        Layers that are not those of the client, such as by another version of NumPy, are left out.
        """
        first = self.kept(survivors)

        def add(one: Surplus) -> bool:
            layers, digests = self.draw(one.key, size, first)
            if equal := digests[:1] == [one.digest]:
                with adding:
                    np.add(total, layers, out=total)
            return equal

        total, adding = np.zeros(size, np.int64), Lock()
        with ThreadPoolExecutor() as pool:  # NumPy draws without the interpreter's lock
            return total, sum(pool.map(add, (one for one in revealed if one.key)))


def _next(key: bytes) -> bytes:
    return derive(key, b"next layer")
