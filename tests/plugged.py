"""What users write: strategies, clusterers and features, right and wrong."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from coterie.fields.settings import Settings, setting
from coterie.strategies import IFCA, ClusteredStrategy


@dataclass(frozen=True)
class MomentumSettings(Settings):
    """Settings of the strategy below."""

    table: ClassVar[str] = "momentum"

    beta: float = setting(0.5, "weight of the last step", at_least=0, below=1, tuned=True)


class Momentum(IFCA):
    """IFCA with heavy-ball momentum at the server."""

    name = "momentum"
    title = "IFCA with momentum"
    paper = "-"
    row_wise = True
    settings_class = MomentumSettings

    def round(self, number, models):
        new = yield from super().round(number, models)
        velocity = new - models + np.float32(self.settings.beta) * self.state.get("velocity", np.zeros_like(models))
        self.state = {"velocity": velocity}
        return models + velocity if self.settings.beta else new


class Other(Momentum):
    name = "other"
    row_wise = True


class NotRowWise(IFCA):
    name = "not-row-wise"
    row_wise = False
    units = ("none", "client")


class Undeclared(IFCA):
    name = "undeclared"


class Taken(IFCA):
    name = "ifca"
    row_wise = True


class NoRound(ClusteredStrategy):
    name, title, paper, row_wise = "no-round", "-", "-", True


class ShortRound(IFCA):
    name, row_wise = "short", True

    def round(self, models):
        return models


class Closed(IFCA):
    name, row_wise = "closed", True

    def __init__(self, plan, settings=None):
        super().__init__(plan, settings)


class Needy(IFCA):
    name, row_wise, needs = "needy", True, ("weather",)


class Units(IFCA):
    name, row_wise, units = "units", True, ("clients",)


class Labels(IFCA):
    name, row_wise, produces = "labels", True, "labels"


@dataclass(frozen=True)
class Loose(Settings):
    beta: float = setting(0.5, "a number")


class Tableless(IFCA):
    name, row_wise, settings_class = "tableless", True, Loose


class Undecorated(Settings):
    table = "undecorated"
    beta: float = setting(0.5, "a number")


class Bare(IFCA):
    name, row_wise, settings_class = "bare", True, Undecorated


@dataclass(frozen=True)
class ShadowSettings(Settings):
    table: ClassVar[str] = "privacy"
    epsilon: float = setting(0.5, "a number")


class Shadow(IFCA):
    name, row_wise, settings_class = "shadow", True, ShadowSettings


# ---- clusterers -----------------------------------------------------------------------------------------------------


def halves(distances, num_clusters):
    return np.arange(len(distances)) * num_clusters // len(distances)


def split(distances, num_clusters):
    from sklearn.cluster import AgglomerativeClustering

    return AgglomerativeClustering(num_clusters, metric="precomputed", linkage="complete").fit(distances).labels_


def alone(distances):
    return (distances[0] > distances.mean()).astype(int)


def three(a, b, c):
    return a


def short(distances, k):
    return np.zeros(1, np.int64)


def floats(distances, k):
    return np.zeros(len(distances))


def many(distances, k):
    return np.arange(len(distances))


def fails(*_):
    raise RuntimeError("no")


def random(distances, k):
    return np.random.default_rng().integers(k, size=len(distances))


# ---- features -------------------------------------------------------------------------------------------------------


def flip(x):
    return x[..., ::-1]


def batch_mean(x):
    return x - x.mean(axis=0)


def noisy(x):
    return x + np.random.default_rng().random(x.shape, np.float32)


def doubles(x):
    return x * np.float64(2)


def lists(x):
    return x.tolist()


def flat(x):
    return x.reshape(len(x), -1)


def first(x):
    return x[:1]


def infinite(x):
    return np.full_like(x, np.inf)


def growing(x):
    return np.repeat(x[:, :, :1], 3, axis=2) if len(x) < 6 else np.pad(x, ((0, 0), (0, 0), (0, 1), (0, 1)))
