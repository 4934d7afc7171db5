"""Adaptive clipping: the clipping norm follows a quantile of the clients' norms, within the guarantee.

G. Andrew, O. Thakkar, H. B. McMahan, S. Ramaswamy: Differentially Private Learning with Adaptive Clipping, NeurIPS
2021, arXiv:1905.03871, Algorithm 1.

     1  input: target quantile gamma, learning rate eta, initial norm C
     2  for t = 0, 1, ..., T - 1 do
     3      each client of the cohort sends its update; b_i = 1 if its norm is below C / factor, else 0
     4      ~B = sum over the cohort of (b_i - 1/2) + N(0, sigma_b^2)
     5      ~b = 1/2 + ~B / (q M), the share of short updates
     6      C <- C exp(-eta (~b - gamma))

Deviations from the paper
- C is a fraction (``clip_factor``) of the quantile: noise is proportional to C, and updates that are all clipped keep
  their directions. In the paper the factor is 1.
- The server computes b_i from the update that it clips, so clients send nothing else.
- Line 4 is a coordinate of the same event as the sums (privacy/mechanisms): its noise takes the share ``clip_share`` of
  a round's privacy instead of being a second release.
- Line 5 divides by the public expected size of the cohort, never by the number of replies.
- C stays in the range of clipping norms.
- At record level, lines 3 to 5 are about the gradients of a client's batches: each client counts them with noise of its
  own (privacy/record.py) and without a step at the threshold (client/dpsgd.py); ~b is the mean of these shares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.privacy import MAX_CLIP_NORM, MIN_CLIP_NORM, Plan
from coterie.rounds.run_state import RunState

#: Quantile of the norms that is assumed before round 1, a public constant.
INITIAL_NORM = 1.0
# gamma, and eta, the step in the logarithm of C.
_QUANTILE, _RATE = 0.5, 0.2
# The clipping norm of the next round, in the arrays of a run.
_CLIP_NORM = "clip-norm"


def next_norm(clip_norm: float, below: float) -> float:
    """The next C (line 6).

    Args:
        clip_norm: C.
        below: Released share of short updates or gradients. Noise may carry it out of [0, 1].
    """
    share = min(max(below, 0.0), 1.0)
    return min(max(clip_norm * math.exp(-_RATE * (share - _QUANTILE)), MIN_CLIP_NORM), MAX_CLIP_NORM)


def adapted(state: RunState, below: float) -> RunState:
    """The state of a run after a round with a released share; see :func:`next_norm`."""
    clip_norm = next_norm(state.plan.clip_norm, below)
    arrays = {**state.arrays, _CLIP_NORM: np.array(clip_norm)}
    return replace(state, plan=state.plan.with_clip_norm(clip_norm), arrays=arrays)


def resumed(plan: Plan, arrays: Mapping[str, npt.NDArray[Any]]) -> Plan:
    """The plan with the clipping norm of a resumed run, if it is adaptive."""
    return plan.with_clip_norm(arrays[_CLIP_NORM].item()) if _CLIP_NORM in arrays else plan
