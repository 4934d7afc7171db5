"""Training and sums of clipped updates that stay on a GPU: k models go there, and k x d sums come back.

The updates of simulated clients, n x d numbers, are neither copied nor clipped on the CPU. The sums are those of
:class:`coterie.privacy.Summed` up to rounding in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from coterie.client.clipper import clip_factors
from coterie.client.cohort import Cohort
from coterie.client.device import to_numpy
from coterie.privacy import Summed

Labels = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

# Numbers in a float64 copy of updates: 512 MB.
_BLOCK = 1 << 26


def stays_on_device(cohort: Cohort, sums: Summed) -> bool:
    """Whether updates of these clients are summed where they are computed.

    Clients with personal layers keep their own part of the model, FeSEM's clients compare all of it, a trainer of users
    returns arrays of NumPy, and integers are rounded client by client.
    """
    return (
        cohort.local_training.device != "cpu"
        and type(sums) is Summed
        and math.isfinite(sums.clip_norm)
        and not cohort.is_stateful
        and cohort.layers.whole == cohort.layers.sent
        and cohort.local_training.plugins.trainer_class is None
    )


def clipped_total(
    updates: Tensor, labels: Labels, clusters: int, clip_norm: float, limits: Sequence[float], shared: int = 0
) -> tuple[FloatArray, FloatArray, npt.NDArray[np.bool_]]:
    """Sum updates on their device, each clipped to norm C and divided by C (:func:`coterie.privacy.clip_to_unit`).

    Args:
        updates: (n, d) float32.
        labels: (n,) cluster of each update.
        clusters: k.
        clip_norm: C.
        limits: (n,) longest norm of an update that counts.
        shared: coordinates that all clusters share, whose sum is in row 0 alone.

    Returns:
        (k, d) float64 sums; (n,) norms; and (n,) which updates count: the finite ones within their limits.
    """
    device, (n, d) = updates.device, updates.shape
    longest = torch.as_tensor(np.asarray(limits, np.float64), device=device)
    members = torch.as_tensor(labels, device=device) == torch.arange(clusters, device=device)[:, None]
    total = torch.zeros(clusters, d, dtype=torch.float64, device=device)
    lengths, many = [], max(1, _BLOCK // max(d, 1))
    for begin in range(0, n, many):
        some = slice(begin, begin + many)
        rows = updates[some].double()
        norms = torch.linalg.vector_norm(rows, dim=1)
        weights, finite = clip_factors(norms, clip_norm)
        kept = finite & (norms <= longest[some])
        rows = rows.where(kept[:, None], 0)
        total[0, :shared] += weights @ rows[:, :shared]
        total[:, shared:] += (members[:, some] * weights) @ rows[:, shared:]
        lengths.append(norms)
    found = to_numpy(torch.cat([*lengths, total.flatten()]))  # in one copy
    return found[n:].reshape(clusters, d), found[:n], np.isfinite(found[:n]) & (found[:n] <= limits)
