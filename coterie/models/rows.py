"""A test that a function treats every row of a batch by itself, as privacy at record level assumes.

It compares the outputs of random batches, so it finds mistakes and proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[Any]
#: Outputs (n, ...) of rows, with inputs or parameters changed by a relative amount, the same for every row.
Evaluate = Callable[[Rows, float], Rows]

#: Random rows that `batch` expects.
DRAWN = 13
# Relative changes whose effects bound those of rounding: 8 units of rounding in float32, and one that float32 rounds
# away, of many units in float64.
_COARSE, _FINE = 2.0**-20, 2.0**-34


def batch(drawn: Rows) -> Rows:
    """Return (16, ...) rows of several scales, three of them copies, of (13, ...) random ones."""
    scales = 2.0 ** -(np.arange(DRAWN) % 4) if drawn.dtype.kind == "f" else np.ones(DRAWN, drawn.dtype)
    scaled = drawn * scales.astype(drawn.dtype).reshape(-1, *[1] * (drawn.ndim - 1))
    return np.concatenate([scaled, scaled[[0, 0, 1]]])


def find_mixing(evaluate: Evaluate, x: Rows, others: Rows, noun: str) -> tuple[int, str] | None:
    """Return a column of the flattened outputs that depends on other rows, and what changes it; None if there is none.

    A column may change by what rounding explains: relative to its own largest value, and to the effect of a change of
    the inputs or parameters by a few units of rounding. Outputs for ``others`` may be infinite or NaN.

    Args:
        evaluate: the function. With float64 outputs, columns that are computed in float32 are treated as float32.
        x: (n, ...) rows of `batch`.
        others: (k, ...) extreme rows, which replace some of ``x``.
        noun: what a row is, in the description of the change.
    """
    outputs = _flat(evaluate(x, 0.0))
    tolerance = _tolerance(evaluate, x, outputs)
    for change, changed, where, same in _changes(x, others, noun):
        difference = np.abs(_flat(evaluate(changed, 0.0))[where] - outputs[same])
        wrong = ~(difference <= tolerance).all(axis=0)  # also NaN
        if wrong.any():
            return int(wrong.argmax()), change
    return None


def _changes(x: Rows, others: Rows, noun: str) -> Iterator[tuple[str, Rows, Any, Any]]:
    """What is changed; the batch; some of its rows, and the rows of ``x`` that they equal."""
    n, every = len(x), np.arange(len(x))
    for i, other in enumerate(others):
        k = (0, n - 1, n // 2)[i % 3]
        kept = every != k
        yield f"one other {noun}", np.where(kept.reshape(-1, *[1] * (x.ndim - 1)), x, other), kept, kept
    replaced = others[every % len(others)]
    replaced[n // 2] = x[n // 2]
    yield f"all other {noun}s", replaced, [n // 2], [n // 2]
    order = np.random.RandomState(0).permutation(n)
    yield f"the order of the {noun}s", x[order], every, order
    for subset in (every[:1], every[5:6], every[-1:], every[3:5], every[: n // 2], every[n // 2 :]):
        yield f"the number of {noun}s", x[subset], slice(None), subset
    twice = np.append(every, every[: n // 2])
    yield f"copies of {noun}s", x[twice], slice(None), twice


def _tolerance(evaluate: Evaluate, x: Rows, outputs: Rows) -> Rows:
    """(m,) differences that rounding explains."""
    scale = np.abs(outputs).max(axis=0)
    coarse = np.abs(_flat(evaluate(x, _COARSE)) - outputs)
    tolerance = 8 * _COARSE * scale + 4 * coarse.max(axis=0)
    if outputs.dtype != np.float64:
        return np.asarray(tolerance)
    # What is computed in float64 moves in proportion to the change; what is computed in float32 does not.
    fine = np.abs(_flat(evaluate(x, _FINE)) - outputs)
    unequal = np.abs(coarse - _COARSE / _FINE * fine).max(axis=0)
    double = unequal <= 1e-3 * coarse.max(axis=0) + _COARSE / _FINE * 8 * np.finfo(np.float64).eps * scale
    return np.asarray(np.where(double, 8 * _FINE * scale, tolerance))


def _flat(outputs: Rows) -> Rows:
    flat: Rows = outputs.reshape(len(outputs), -1)
    return flat
