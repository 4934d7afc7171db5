"""Mixtures of Gaussians on noisy updates: how the server of RC-DPFL clusters clients and quantifies its uncertainty.

RC-DPFL (papers/rc_dpfl), sections 4.1 to 4.4: if all clients start a round from the same model, their updates are
points around M means with the same spherical noise (Equations 3 and 4).

Updates are projected first. Their principal scores follow from the n x n Gram matrix of the n updates, so models of
any size that fits in memory are possible. All n - 1 scores preserve every distance; M means span M - 1 of them. Along
the others, the noise of d >> n coordinates is about sqrt(d / n) times wider than along these, which no spherical model
fits.

Deviations from the paper
- The authors project to 2 components and scale each to [0, 1] (``components=2, scaled=True``). Here M groups
  use M - 1 components. If M is unknown, all candidates share the components that exceed noise (``spanned``). Nothing
  is scaled. Four groups overlap in a plane: round 1 of 21 clients (Fashion-MNIST, rotations, N = 2000, full batch,
  epsilon 5, 8 seeds) has an MSS of 2 to 8 in the authors' plane and of 27 to 44 in three components. With M unknown,
  the plane gives 3 groups on every seed, three components give 4.
- Candidates must share a space: with M - 1 components for each candidate, two pairs of groups look like two perfect
  groups.
- Appendix F.2 is not public: candidates are 2 to min(10, n/2), and those with a group of a single client are
  excluded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coterie.clustering.distances import FloatArray, Updates, gram

#: Largest number of groups to try if the number is unknown.
MAX_GROUPS = 10
#: Minimum variance of a component relative to that of the widest coordinate; permits groups without noise.
FLOOR = 1e-6

# Maximum number of EM steps and minimum gain per step; relative size of eigenvalues that are rounding errors.
_STEPS, _TOLERANCE = 500, 1e-6
_ROUNDING = 1e-12


@dataclass(frozen=True, eq=False)
class Mixture:
    """A fitted mixture of m Gaussians with equal weights and a common spherical variance.

    Attributes:
        means: (m, r).
        variance: of each coordinate within a component, Equation (4).
        probabilities: (n, m) of the components of each point, pi_i; rows sum to 1.
        log_likelihood: mean over points.
    """

    means: FloatArray
    variance: float
    probabilities: FloatArray
    log_likelihood: float

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        """(n,) most probable component of each point."""
        return np.asarray(self.probabilities.argmax(axis=1), dtype=np.int64)

    @property
    def mss(self) -> float:
        """Minimum pairwise separation score, min of ||mu_a - mu_b|| / (2 sigma); groups are separated above 3.

        0 if two means are equal, infinite for a single component.
        """
        first, second = np.triu_indices(len(self.means), 1)
        between = np.linalg.norm(self.means[first] - self.means[second], axis=1)
        return float(between.min(initial=math.inf) / (2 * math.sqrt(self.variance)))

    @property
    def mpo(self) -> float:
        """Maximum pairwise overlap 2 Q(MSS), in [0, 1]: the uncertainty of the mixture."""
        return math.erfc(self.mss / math.sqrt(2))


def cluster(
    scores: FloatArray,
    num_clusters: int | None,
    rng: np.random.Generator,
    *,
    components: int | None = None,
    scaled: bool = False,
) -> tuple[Mixture, dict[int, float]]:
    """Algorithm 1's first stage: the mixture of updates, and the MSS of every possible number of groups.

    Args:
        scores: (n, n - 1) by :func:`project`, of n updates from the same model.
        num_clusters: M; None: it is determined.
        rng: for the initialisation of EM.
        components: number of principal components; None for M - 1, or for those that exceed noise if M is unknown.
        scaled: scale each component to [0, 1], as the authors do with 2 components.

    Raises:
        ValueError: an argument is invalid, or M is unknown and there are fewer than 4 clients.
    """
    if components is None:
        components = spanned(scores) if num_clusters is None else max(num_clusters - 1, 1)
    points = scores[:, :components]
    if scaled:
        extent = np.ptp(points, axis=0)
        points = (points - points.min(axis=0)) / np.where(extent > 0, extent, 1.0)
    if num_clusters is None:
        return choose(points, rng)
    mixture = fit(points, num_clusters, rng)
    return mixture, {num_clusters: mixture.mss}


def project(updates: Updates, components: int | None = None) -> FloatArray:
    """(n, min(components, n - 1)) principal scores of n updates (d,), by decreasing variance; None: all components.

    In addition to the updates, it allocates a few million numbers. The sign of a component makes the first of its
    largest scores positive.

    Raises:
        ValueError: a number is not finite, or ``components`` is less than 1.
    """
    if components is not None and not components >= 1:
        raise ValueError(f"components must be at least 1, not {components}")
    products = gram(updates, centred=True)
    if not np.isfinite(products).all():
        broken = [i for i, update in enumerate(updates) if not np.isfinite(update).all()]
        raise ValueError(f"updates {broken} contain NaN or Inf; drop them before clustering")
    values, vectors = np.linalg.eigh(products)
    values, vectors = values[:0:-1], vectors[:, :0:-1]  # the last is 0, because updates are centred
    values = np.where(values > _ROUNDING * values.max(initial=0.0), values, 0.0)
    scores: FloatArray = (vectors * np.sqrt(values))[:, :components]
    length = np.abs(scores)
    first = (length >= (1 - 1e-6) * length.max(axis=0)).argmax(axis=0)
    return scores * np.where(scores[first, np.arange(scores.shape[1])] < 0, -1.0, 1.0)


def spanned(scores: FloatArray) -> int:
    """Number of leading components of all n - 1 scores that exceed noise, at least 1.

    It maximises the profile likelihood of the logarithms of their variances, modelled as two normal samples with a
    common variance (M. Zhu, A. Ghodsi: Automatic dimensionality selection from the scree plot via the use of profile
    likelihood, Computational Statistics & Data Analysis 51, 2006). If there are no more components than groups could
    span, all count.
    """
    most = max(_most(len(scores)) - 1, 1)
    variances = (scores**2).sum(axis=0)
    logs = np.log(variances[variances > 0])
    if len(logs) <= most:
        return max(len(logs), 1)
    split = [len(segment) * segment.var() for q in range(1, most + 1) for segment in (logs[:q], logs[q:])]
    return int(np.add(split[::2], split[1::2]).argmin()) + 1


def fit(points: FloatArray, m: int, rng: np.random.Generator, restarts: int = 10) -> Mixture:
    """Fit points (n, r) by EM; of ``restarts`` runs with k-means++ initialisation, return the most likely mixture.

    Raises:
        ValueError: m is not in 1 to n, r is 0, or a number is not finite.
    """
    if points.ndim != 2 or not points.shape[1] >= 1 or not np.isfinite(points).all():
        raise ValueError(f"points must be finite and of shape (n, r) with r >= 1, not {points.shape}")
    if not 1 <= m <= len(points):
        raise ValueError(f"the number of groups must lie between 1 and the number of clients, {len(points)}, not {m}")
    from sklearn.cluster import kmeans_plusplus

    starts = (kmeans_plusplus(points, m, random_state=int(rng.integers(2**31)))[0] for _ in range(restarts))
    return max((_em(points, start) for start in starts), key=lambda mixture: mixture.log_likelihood)


def choose(points: FloatArray, rng: np.random.Generator, most: int | None = None) -> tuple[Mixture, dict[int, float]]:
    """Determine the number of groups: return the mixture of 2 to ``most`` components with the largest MSS.

    Args:
        points: (n, r).
        rng: for the initialisation of EM.
        most: largest number of components to try; None for min(10, n // 2).

    Returns:
        The mixture, and the MSS of each number of components that leaves at least two points in every component.

    Raises:
        ValueError: there is no such number, for example with fewer than 4 points.
    """
    mixtures = [fit(points, m, rng) for m in range(2, (_most(len(points)) if most is None else most) + 1)]
    sizes = [np.bincount(mixture.labels, minlength=len(mixture.means)) for mixture in mixtures]
    allowed = {len(size): mixture for size, mixture in zip(sizes, mixtures, strict=True) if size.min() >= 2}
    if not allowed:
        raise ValueError(
            f"no number of groups leaves two of the {len(points)} clients in each; set the number of groups"
        )
    scores = {m: mixture.mss for m, mixture in allowed.items()}
    return allowed[max(scores, key=lambda m: scores[m])], scores


def switch_round(mpo: float, rounds: int) -> int:
    """E_c = (1 - MPO) E / 2, rounded down: the last round that uses the mixture; at least 1, its own round."""
    if not 0 <= mpo <= 1:
        raise ValueError(f"mpo must lie in [0, 1], not {mpo}")
    return max(1, int((1 - mpo) * rounds / 2))


def _most(n: int) -> int:
    return min(MAX_GROUPS, n // 2)


def _em(points: FloatArray, means: FloatArray) -> Mixture:
    """Run EM from these means until the mean log-likelihood increases by less than the tolerance."""
    n, r = points.shape
    limits = np.finfo(np.float64)
    floor = FLOOR * float(points.var(axis=0).max()) + float(limits.eps * (points**2).max() + limits.tiny)
    squares = _squares(points, means)
    variance = max(float(squares.min(axis=1).sum()) / (n * r), floor)
    before = -math.inf
    for _ in range(_STEPS):
        joint = -squares / (2 * variance) - r / 2 * math.log(2 * math.pi * variance) - math.log(len(means))
        total = np.logaddexp.reduce(joint, axis=1)
        probabilities = np.exp(joint - total[:, None])
        likelihood = float(total.mean())
        if not likelihood - before > _TOLERANCE:
            break
        before = likelihood
        weights = probabilities.sum(axis=0)
        held = weights > 0  # an empty component stays where it is
        means = means.copy()
        means[held] = (probabilities.T @ points)[held] / weights[held, None]
        squares = _squares(points, means)
        variance = max(float((probabilities * squares).sum()) / (n * r), floor)
    return Mixture(means, variance, probabilities, likelihood)


def _squares(points: FloatArray, means: FloatArray) -> FloatArray:
    """(n, m) squared distances."""
    squares: FloatArray = ((points[:, None] - means) ** 2).sum(axis=2)
    return squares
