"""LCFL: loss-based clustered federated learning.

E. Gu, Y. Chen, H. Wen, X. Cai, D. Han: LCFL, clustered federated learning based on local loss (papers/lcfl),
Algorithm 1. Clients are close when each other's models do well on their data; the server never sees a gradient.

     1  for client i in [M] in parallel do
     2      for t = 0 to T - 1 do
     3          w_i^(t+1) <- w_i^t - gamma grad L_i(w_i^t)
     4      end
     5      send w_i^T to the server
     6      for j in [M] \\ i do
     7          receive w_j^T from the server
     8          d(i, j)_i <- |L_i(w_j^T) - L_i(w_i^T)|
     9          send d(i, j)_i to the server
    10      end
    11  end
    12  for i, j in [M], i != j, the server does
    13      d(i, j) <- d(i, j)_i + d(j, i)_j
    14  end
    15  the server gets C_1, ..., C_k from C(d(i, j)), any clusterer
    16  for every cluster C_k do
    17      w_k* <- FedOpt(C_k)
    18  end

Deviations from the paper
- All clients start from one model (line 3): models that began apart differ for no reason of their data.
- The T steps of line 2 are the local epochs of any round, and this is the first round.
- Clients send losses, and the server takes the differences of line 8, which say less. Models travel in messages of
  ``models_per_message``, each model once to each client.
- ``landmarks = L``: every client evaluates the same L models, drawn by chance, in place of all M. Clients are then as
  far apart as their losses of these (Equation (6) over all landmarks in place of i and j); with L = M it is line 13.
- ``warm_up_rounds``: rounds of FedAvg before line 1. The paper's tables have equal figures for LCFL and FedAvg after 5
  of 60 iterations, which Algorithm 1 does not explain, and such rounds do.
- Line 17 starts from the mean of the members' warmed-up models (section II-B) and is FedAvg or FedProx.
- Where k is not given, all clients may be one cluster (clusterers.py). The run ends if no two clients are alike: if
  most gain less from any other client's model than half of what clients gain from their own.
- A client that did not answer joins when it comes: it reports its losses of the models that are best for each cluster,
  and belongs where the members' mean of these losses is nearest; by another metric, where their mean update is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from coterie.clustering.clusterers import CLUSTERERS, check_clusterer, cluster
from coterie.clustering.distances import (
    FloatArray,
    Indices,
    Updates,
    cosines,
    loss_distances,
    parameter_distances,
    profile_distances,
)
from coterie.messages import losses_layout
from coterie.privacy import Plan
from coterie.rounds import StrategyError
from coterie.settings import Settings, setting
from coterie.strategies.base import ClusteredStrategy
from coterie.strategies.method import Models, Round, Steps
from coterie.wire import LossesRequest

_BETWEEN: dict[str, Callable[[Updates], FloatArray]] = {
    "params": parameter_distances,
    "gradcos": lambda updates: 1 - cosines(updates),
}

#: Ways to tell clients apart: Equations (2) and (1), and 1 - the cosine of CFL.
METRICS = ("loss", *_BETWEEN)
#: Ways to train the model of a cluster.
OPTIMIZERS = ("fedavg", "fedprox")

_LABELS, _FIRST, _LANDMARKS, _PROFILES, _CENTRES = "labels", "first", "landmarks", "profiles", "centres"
# Bytes of models in one message, beyond which machines and networks give up.
_MAX_BYTES = 1 << 30


@dataclass(frozen=True)
class LCFLSettings(Settings):
    """Settings of LCFL."""

    table: ClassVar[str] = "lcfl"

    metric: str = setting(
        "loss",
        "difference of two clients: in losses of each other's models, in parameters, in directions of first updates",
        choices=METRICS,
        tuned=True,
    )
    clusterer: str = setting("k-medoids", "clustering algorithm on the distances", choices=CLUSTERERS, tuned=True)
    landmarks: int = setting(0, "models that every client evaluates, L; 0: all pairs", at_least=0, tuned=True)
    warm_up_rounds: int = setting(0, "rounds of FedAvg before clients are compared", at_least=0, tuned=True)
    models_per_message: int = setting(32, "models in one message to be evaluated", at_least=1)
    cluster_optimizer: str = setting("fedavg", "training of the model of a cluster", choices=OPTIMIZERS, tuned=True)
    proximal_mu: float = setting(
        0.1,
        "weight of the proximal term, mu",
        at_least=0,
        at_most=1e6,
        tuned=True,
        only=("lcfl.cluster-optimizer", ("fedprox",)),
    )


class LCFL(ClusteredStrategy):
    """Clusters from how well clients' first models do on each other's data."""

    name: ClassVar[str] = "lcfl"
    title: ClassVar[str] = "any clusterer, on losses of each other's first models; then FedAvg or FedProx"
    paper: ClassVar[str] = "LCFL, Algorithm 1"
    units: ClassVar[tuple[str, ...]] = ("none", "record")
    row_wise: ClassVar[bool] = False
    equal_start: ClassVar[bool] = True
    finds_clusters: ClassVar[bool] = True
    robust: ClassVar[bool] = True
    settings_class: ClassVar[type[Settings]] = LCFLSettings
    settings: LCFLSettings

    def __init__(self, plan: Plan, settings: LCFLSettings | None = None, **others: Any) -> None:
        super().__init__(plan, settings, **others)
        warm_up = self.settings.warm_up_rounds
        if not warm_up < plan.rounds:
            raise StrategyError(f"warm-up-rounds = {warm_up} of {plan.rounds} rounds leave none for clusters")
        try:
            check_clusterer(self.settings.clusterer, self.clusters or None)
        except ValueError as error:
            raise StrategyError(str(error)) from None
        if self.averaging.begins_after(plan.rounds) < warm_up:
            raise StrategyError(
                f"average-last = {self.averaging.last:g} begins before there are clusters, in round {warm_up + 1}: "
                f"set it to at most {1 - warm_up / plan.rounds:g}"
            )

    def round(self, number: int, models: Models) -> Round:
        """Lines 1 to 15 in the first round, line 17 in all others."""
        if number == 1:
            self.state = {_FIRST: models[:1]}  # untrained
        if number <= self.settings.warm_up_rounds:
            released = yield from self.sums(self.training(), models[:1])
            return self.step(models[:1], released)[:1]  # FedAvg
        if _LABELS not in self.state:
            return (yield from self._find(models[:1]))  # lines 1-15
        yield from self._place_late()
        request = self.training()
        if self.settings.cluster_optimizer == "fedprox":
            request = replace(request, penalty="proximal", penalty_weight=self.settings.proximal_mu)
        released = yield from self.sums(request, models, to=self.assignments(number))
        return self.step(models, released)  # line 17

    def assignments(self, number: int) -> Mapping[int, int] | None:
        """Line 15, from the round of clustering on."""
        if _LABELS not in self.state:
            return None
        return {i: int(label) for i, label in enumerate(self.state[_LABELS]) if label >= 0}

    @classmethod
    def released_losses(cls, clients: int, settings: Settings) -> dict[str, int]:
        """All models or the landmarks, and the untrained one."""
        assert isinstance(settings, LCFLSettings)
        compared = min(settings.landmarks or clients, clients) + 1 if settings.metric == "loss" else 0
        return {"compared": compared, "models_per_message": settings.models_per_message}

    # ---- lines 1 to 15 ------------------------------------------------------------------------------------

    def _find(self, start: Models) -> Round:
        """Warm up, compare, cluster; (k, d) means of the members' models."""
        warm = yield from self.updates(self.training(), start, clients=range(self.plan.clients))  # lines 1-5
        started = time.perf_counter()
        if self.settings.metric == "loss":
            losses, columns = yield from self._compare(start, warm.updates, warm.clients.tolist())  # lines 6-11
            rows = np.flatnonzero(np.isfinite(losses).all(axis=1))  # of clients that reported all
            untrained, losses = losses[rows, 0], losses[rows, 1:]
        else:
            rows = np.arange(len(warm.updates))
        if len(rows) < max(2, self.clusters):
            raise StrategyError(
                f"only {len(rows)} of {self.plan.clients} clients could be compared: too few to find groups among; "
                "see why the others failed, or ask for fewer clusters"
            )
        if self.settings.metric != "loss":
            distances = _BETWEEN[self.settings.metric](warm.updates)
        elif len(columns) == len(warm.updates):  # all pairs
            distances = loss_distances(losses[:, rows])  # lines 12-14
        else:
            distances = profile_distances(losses)
        compared = time.perf_counter() - started
        found = cluster(distances, self.settings.clusterer, self.clusters or None)  # line 15
        many = int(found.labels.max()) + 1
        members = [rows[found.labels == j] for j in range(many)]
        if self.aggregator.robust:
            moved = np.stack([self.aggregator(warm.updates[own]) for own in members])
        else:
            moved = np.stack([_mean(warm.updates, own, warm.weights) for own in members])
        labels = np.full(self.plan.clients, -1, np.int64)
        labels[warm.clients[rows]] = found.labels
        self.notes = {
            "clusters": many,
            "metric": self.settings.metric,
            "clusterer": self.settings.clusterer,
            "compare_seconds": compared,
            "silhouettes": {str(k): score for k, score in sorted(found.silhouettes.items())},
        }
        if self.settings.metric == "loss":
            own = columns == rows[:, None]  # whose model is whose
            if many == 1 and not self.clusters:
                _refuse_strangers(losses, untrained, own)
            profiles = np.stack([losses[found.labels == j].mean(axis=0) for j in range(many)])
            best = np.unique(profiles.argmin(axis=1))
            self.state = {_LANDMARKS: start + warm.updates[columns[best]], _PROFILES: profiles[:, best]}
            self.notes["evaluations"] = losses.size + len(rows)
        else:
            self.state = {_FIRST: start, _CENTRES: moved}
        self.state[_LABELS] = labels
        self.recorder.save_artifact(
            "distances", {"matrix": distances.astype(np.float32), "clients": warm.clients[rows], "labels": found.labels}
        )
        return np.asarray(start + self.server_lr * moved, np.float32)

    def _compare(self, start: Models, updates: Models, clients: list[int]) -> Steps[tuple[FloatArray, Indices]]:
        """(n, 1 + m) losses of the untrained model and of m of the n trained ones, and which these are."""
        columns = np.arange(len(updates))
        if 0 < self.settings.landmarks < len(updates):
            rng = self.streams.stream("landmarks", 1, self.attempt)
            columns = np.sort(rng.choice(len(updates), self.settings.landmarks, replace=False))
        first = self.state[_FIRST][0]
        losses = yield from self._losses(
            1 + len(columns), lambda i: start[0] + updates[columns[i - 1]] if i else first, clients
        )
        return losses, columns

    def _losses(
        self, many: int, model: Callable[[int], Models], clients: list[int], joined_late: bool = False
    ) -> Steps[FloatArray]:
        """(n, m) losses of ``model(0)``, ... on the data of n clients, NaN without a valid reply.

        Each model travels once to each client, and no more than a message of them is held.
        """
        table = np.full((len(clients), many), np.nan)
        place = {client: row for row, client in enumerate(clients)}
        for begin in range(0, many, self.settings.models_per_message):
            part = range(begin, min(begin + self.settings.models_per_message, many))
            models = np.stack([model(i) for i in part])
            if len(part) > 1 and models.nbytes > _MAX_BYTES:
                raise StrategyError(
                    f"models-per-message = {len(part)} makes messages of {models.nbytes / 1e9:.1f} GB; set it to "
                    f"{max(1, _MAX_BYTES * len(part) // models.nbytes)} or less"
                )
            self.recorder.report_progress(f"{len(clients)} clients compare {begin} of {many} models")
            request = LossesRequest(compared=len(part))
            released = yield from self.updates(
                request, models, clients=clients, joined_late=joined_late, reply_layout=losses_layout(len(part))
            )
            table[[place[client] for client in released.clients.tolist()], begin : part[-1] + 1] = released.updates
        return table

    # ---- clients that come later --------------------------------------------------------------------------

    def _place_late(self) -> Steps[None]:
        """Give a cluster to every client that is here and has none."""
        labels: Indices = self.state[_LABELS].copy()
        late = [client for client in self.present if labels[client] < 0]
        if not late:
            return
        if self.settings.metric == "loss":
            landmarks = self.state[_LANDMARKS]
            losses = yield from self._losses(len(landmarks), landmarks.__getitem__, late, joined_late=True)
            placed = np.array(late)[np.isfinite(losses).all(axis=1)]
            losses = losses[np.isfinite(losses).all(axis=1)]
            labels[placed] = np.abs(losses[:, None] - self.state[_PROFILES]).mean(axis=2).argmin(axis=1)
        else:
            warm = yield from self.updates(self.training(), self.state[_FIRST], clients=late, joined_late=True)
            placed = warm.clients
            for client, update in zip(placed, warm.updates, strict=True):
                labels[client] = _BETWEEN[self.settings.metric]([update, *self.state[_CENTRES]])[0, 1:].argmin()
        self.state = {**self.state, _LABELS: labels}
        self.notes["late"] = {str(client): int(labels[client]) for client in placed}


def _mean(updates: Models, rows: Indices, weights: FloatArray) -> FloatArray:
    """(d,) weighted mean of some updates."""
    total = np.zeros(updates.shape[1])
    for row in rows:
        total += weights[row] * updates[row]
    return np.asarray(total / weights[rows].sum())


def _refuse_strangers(losses: FloatArray, untrained: FloatArray, own: npt.NDArray[np.bool_]) -> None:
    """End a run in which no client gains from another.

    For most clients the best of all others' models gains less, over the untrained one, than half of what a client's own
    model usually does.

    Args:
        losses: (n, m) of m trained models.
        untrained: (n,) of the untrained model.
        own: (n, m) whose model is whose.
    """
    gains = untrained[:, None] - losses
    usual = float(np.median(gains[own])) if own.any() else 0.0
    alone = int(np.sum(np.where(own, -np.inf, gains).max(axis=1) < max(usual, 0.0) / 2))
    if 2 * alone > len(losses):
        raise StrategyError(
            f"no two clients are alike: {alone} of {len(losses)} clients gain less than half from any other client's "
            "model of what they gain from their own. Let each train alone (strategy = local), give the number of "
            "clusters, or train longer before clients are compared (warm-up-rounds, local-epochs)"
        )
