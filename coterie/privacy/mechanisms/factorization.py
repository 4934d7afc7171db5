"""Banded matrices for correlated noise: the strategy matrix C of a matrix factorization.

C. A. Choquette-Choo, A. Ganesh, R. McKenna, H. B. McMahan, K. Rush, A. Thakurta, Z. Xu: (Amplified) Banded Matrix
Factorization: A Unified Approach to Private Training, NeurIPS 2023, arXiv:2306.08153.
R. McKenna: Scaling up the Banded Matrix Factorization Mechanism for Differentially Private ML, arXiv:2405.15913.

A mechanism that releases x + C^-1 Z, row by row, for a T x T lower-triangular C and standard normal rows Z, has the
sensitivity of C x. The prefix sums A (x + C^-1 Z) of T rounds, whose final one is the model, have the error A C^-1 Z.
C has b bands, C[t, s] = 0 unless 0 <= t - s < b, and columns of norm one. Among these, :func:`banded_matrix` minimises

    1/T sum_t |(A C^-1)_t|^2  +  |w C^-1|^2  +  1/T sum_t |(C^-1)_t|^2,

the mean square error over all models, that of the last model (w: the last row of A), and the variance of single rounds.
The last model alone would be ill-posed: its infimum has a singular C. Where the mean of the last models is used, w for
that mean would lower its error by less than half a percent.

A matrix is stored by bands: an array of shape (T, b) with C[t, t - j] in column j.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

#: Largest number of rounds for which the matrix is optimised; above it, it is the square root of A, in b bands.
MAX_OPTIMISED = 1000
# Numbers of an optimisation: iterations at most, and multiplications of all of them at most.
_ITERATIONS, _WORK = 300, 2e9


@lru_cache(maxsize=32)
def banded_matrix(rounds: int, bands: int) -> FloatArray:
    """Return the (T, b) bands of C, a function of these public numbers.

    Args:
        rounds: T.
        bands: b, at most T.
    """
    start = _normalised(_square_root(rounds, bands))
    if bands == 1 or rounds > MAX_OPTIMISED:
        return start
    from scipy.optimize import minimize  # slow to import

    iterations = int(np.clip(_WORK / (8 * bands * rounds**2), 1, _ITERATIONS))
    inside = _inside(rounds, bands)
    error = _error(rounds, bands)

    def objective(entries: FloatArray) -> tuple[float, FloatArray]:
        free = np.zeros((rounds, bands))
        free[inside] = entries
        value, gradient = error(free)
        return value, gradient[inside]

    solution = minimize(objective, start[inside], jac=True, method="L-BFGS-B", options={"maxiter": iterations})
    best = np.zeros((rounds, bands))
    best[inside] = solution.x
    return _normalised(best) if solution.fun < error(start)[0] else start


def dense(bands: FloatArray) -> FloatArray:
    """Return the (T, T) matrix of its (T, b) bands."""
    rounds = len(bands)
    matrix = np.zeros((rounds, rounds))
    for j in range(bands.shape[1]):
        at = np.arange(rounds - j)
        matrix[at + j, at] = bands[j:, j]
    return matrix


def prefix_errors(bands: FloatArray, noise: npt.ArrayLike = 1.0) -> FloatArray:
    """(T,) deviation of the model after each round.

    Args:
        bands: (T, b) bands of C.
        noise: (T,) factors of the rows of C^-1 Z, or one of all.
    """
    inverse = np.linalg.inv(dense(bands)) * np.broadcast_to(noise, len(bands))[:, None]
    return np.asarray(np.linalg.norm(np.cumsum(inverse, axis=0), axis=1))


@lru_cache(maxsize=32)
def row_errors(rounds: int, bands: int) -> FloatArray:
    """(T,) deviation of the noise of each round, of the optimised matrix."""
    return np.asarray(np.linalg.norm(np.linalg.inv(dense(banded_matrix(rounds, bands))), axis=1))


def _square_root(rounds: int, bands: int) -> FloatArray:
    """Bands of the Toeplitz square root of A, of ones on and below the diagonal: 1, 1/2, 3/8, 5/16, ..."""
    steps = np.arange(1, bands)
    coefficients = np.cumprod(np.concatenate([[1.0], (2 * steps - 1) / (2 * steps)]))
    return np.where(_inside(rounds, bands), coefficients, 0.0)


def _inside(rounds: int, bands: int) -> npt.NDArray[np.bool_]:
    """(T, b) whether an entry lies in the matrix."""
    return np.asarray(np.arange(bands) <= np.arange(rounds)[:, None])


def _norms(bands: FloatArray) -> FloatArray:
    """(T,) norms of the columns: that of column s is over C[s + j, s]."""
    squares = np.zeros(len(bands))
    for j in range(bands.shape[1]):
        squares[: len(bands) - j] += bands[j:, j] ** 2
    return np.sqrt(squares)


def _by_column(values: FloatArray, bands: int) -> FloatArray:
    """(T, b) the value of the column of each entry; zero outside the matrix."""
    spread = np.zeros((len(values), bands))
    for j in range(bands):
        spread[j:, j] = values[: len(values) - j]
    return spread


def _normalised(bands: FloatArray) -> FloatArray:
    """Columns of norm one."""
    return bands * _by_column(1 / _norms(bands), bands.shape[1])


def _error(rounds: int, bands: int) -> Callable[[FloatArray], tuple[float, FloatArray]]:
    """Return the objective of the module as a function of unnormalised bands, with its gradient."""
    from scipy.linalg import solve_banded

    ones = np.tril(np.ones((rounds, rounds)))
    workload = np.concatenate([ones / math.sqrt(rounds), ones[-1:], np.eye(rounds) / math.sqrt(rounds)])

    @np.errstate(over="ignore", invalid="ignore")
    def error(free: FloatArray) -> tuple[float, FloatArray]:
        norms = _norms(free)
        matrix = free * _by_column(1 / norms, bands)
        lower = np.zeros((bands, rounds))  # LAPACK's storage: C[s + j, s] in row j
        for j in range(bands):
            lower[j, : rounds - j] = matrix[j:, j]
        upper = np.zeros((bands, rounds))  # that of the transpose
        for j in range(bands):
            upper[bands - 1 - j, j:] = lower[j, : rounds - j]
        errors = solve_banded((0, bands - 1), upper, workload.T, check_finite=False).T  # E = W C^-1
        again = solve_banded((bands - 1, 0), lower, errors.T, check_finite=False).T  # E C^-T
        value = float((errors**2).sum())
        if not (math.isfinite(value) and np.isfinite(again).all()):  # a step to a singular matrix
            return sys.float_info.max, np.zeros((rounds, bands))
        # d|E|^2 / dC = -2 E^T (E C^-T)
        slope = np.zeros((rounds, bands))
        for j in range(bands):
            slope[j:, j] = -2 * np.einsum("rt,rt->t", errors[:, j:], again[:, : rounds - j])
        along = np.zeros(rounds)  # of the gradient, along each column, which normalisation removes
        for j in range(bands):
            along[: rounds - j] += slope[j:, j] * matrix[j:, j]
        slope = (slope - matrix * _by_column(along, bands)) * _by_column(1 / norms, bands)
        return value, slope

    return error
