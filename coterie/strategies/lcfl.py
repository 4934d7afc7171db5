"""LCFL: loss-based clustered federated learning.

E. Gu, Y. Chen, H. Wen, X. Cai, D. Han: LCFL, clustered federated learning based on local loss (papers/lcfl),
Algorithm 1. Two clients are close if the model of each has a low loss on the data of the other; the server receives no
gradients.

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
- All clients start from one model (line 3): different initial models would differ independently of the data.
- The T steps of line 2 are the local epochs of a round, which is the first one.
- Clients send losses, from which the server computes the differences of line 8, which reveal less. Messages contain
  ``models_per_message`` models; each model is sent once to each client.
- ``landmarks = L``: every client evaluates the same L randomly drawn models instead of all M. The distance of two
  clients is that of their losses on these models (Equation (6) over all landmarks instead of i and j); with L = M it
  is that of line 13.
- ``warm_up_rounds``: rounds of FedAvg before line 1. The paper's tables report equal figures for LCFL and FedAvg after
  5 of 60 iterations; Algorithm 1 does not explain this, but such rounds do.
- Line 17 starts from the mean of the members' warmed-up models (section II-B) and is FedAvg.
- If k is not given, all clients may form one cluster (clusterers.py). The run ends if no two clients are similar: for
  most clients, the gain from any other client's model is less than half of the typical gain from a client's own model.
- A client without a reply joins later: it reports its losses on the best model of each cluster and joins the cluster
  whose members have the closest mean losses; with other metrics, the cluster with the closest mean update.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

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
from coterie.fields import CLUSTERS
from coterie.fields.settings import Settings, setting
from coterie.rounds.run_state import StrategyError
from coterie.strategies.method import Models, Round, Steps
from coterie.strategies.strategy import ClusteredStrategy
from coterie.wire import LossesRequest
from coterie.wire.messages import losses_layout

_DISTANCES: dict[str, Callable[[Updates], FloatArray]] = {
    "params": parameter_distances,
    "gradcos": lambda updates: 1 - cosines(updates),
}

#: Distances between clients: Equations (2) and (1), and one minus the cosine similarity of CFL.
METRICS = ("loss", *_DISTANCES)

_LABELS, _FIRST, _LANDMARKS, _PROFILES, _CENTRES = "labels", "first", "landmarks", "profiles", "centres"
# Maximum size of the models in one message, in bytes.
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
    clusterer: str = setting(
        "k-medoids", "clustering algorithm on the distances", choices=CLUSTERERS, custom="clusterer", tuned=True
    )
    landmarks: int = setting(0, "models that every client evaluates, L; 0: all pairs", at_least=0, tuned=True)
    warm_up_rounds: int = setting(0, "rounds of FedAvg before clients are compared", at_least=0, tuned=True)
    models_per_message: int = setting(32, "models in one message to be evaluated", within=CLUSTERS)


class LCFL(ClusteredStrategy):
    """Clusters clients by the losses of their first models on each other's data."""

    name: ClassVar[str] = "lcfl"
    title: ClassVar[str] = "clustering by losses on each other's first models; then FedAvg"
    paper: ClassVar[str] = "LCFL, Algorithm 1"
    units: ClassVar[tuple[str, ...]] = ("none", "record")
    releases: ClassVar[tuple[str, ...]] = ("losses", "updates")
    row_wise: ClassVar[bool] = False
    equal_start: ClassVar[bool] = True
    finds_clusters: ClassVar[bool] = True
    robust: ClassVar[bool] = True
    settings_class: ClassVar[type[Settings]] = LCFLSettings
    settings: LCFLSettings

    def check(self) -> None:
        """Require rounds after the warm-up, a clusterer that takes the number of clusters, and averaging afterwards."""
        super().check()
        warm_up, rounds, averaging = self.settings.warm_up_rounds, self.plan.rounds, self.options.averaging
        if not warm_up < rounds:
            raise StrategyError(f"warm-up-rounds = {warm_up} must be less than rounds = {rounds}")
        try:
            check_clusterer(self.settings.clusterer, self.clusters or None)
        except ValueError as error:
            raise StrategyError(str(error)) from None
        if averaging.begins_after(rounds) < warm_up:
            raise StrategyError(
                f"average-last = {averaging.last:g} begins before the clustering in round {warm_up + 1}: set it "
                f"to at most {1 - warm_up / rounds:g}"
            )

    @property
    def fewest_clients(self) -> int:
        """A pair, and one for each cluster."""
        return max(2, self.clusters)

    def round(self, number: int, models: Models) -> Round:
        """Lines 1 to 15 in the first round, line 17 in all others."""
        if number == 1:
            self.state = {_FIRST: models[:1]}  # untrained
        if number <= self.settings.warm_up_rounds:
            released = yield from self.sums(self.training(), models[:1])
            return self.step(models[:1], released)[:1]  # FedAvg
        if _LABELS not in self.state:
            return (yield from self._cluster_clients(models[:1]))  # lines 1-15
        yield from self._place_late()
        released = yield from self.sums(self.training(), models, to=self.assignments(number))
        return self.step(models, released)  # line 17

    def assignments(self, number: int) -> Mapping[int, int] | None:
        """Line 15, from the round of clustering on."""
        if _LABELS not in self.state:
            return None
        return {i: int(label) for i, label in enumerate(self.state[_LABELS]) if label >= 0}

    @classmethod
    def released_losses(cls, clients: int, settings: Settings) -> dict[str, int]:
        """The compared models: all or the landmarks, and the untrained one."""
        assert isinstance(settings, LCFLSettings)
        compared = min(settings.landmarks or clients, clients) + 1 if settings.metric == "loss" else 0
        return {"compared": compared, "models_per_message": settings.models_per_message}

    # ---- lines 1 to 15 ------------------------------------------------------------------------------------

    def _cluster_clients(self, start: Models) -> Round:
        """Train, compare and cluster all clients; return (k, d) means of the members' models."""
        warm = yield from self.updates(self.training(), start, clients=range(self.plan.clients))  # lines 1-5
        started = time.perf_counter()
        if self.settings.metric == "loss":
            losses, columns = yield from self._compare(start, warm.updates, warm.clients.tolist())  # lines 6-11
            rows = np.flatnonzero(np.isfinite(losses).all(axis=1))  # of clients that reported all
            untrained, losses = losses[rows, 0], losses[rows, 1:]
        else:
            rows = np.arange(len(warm.updates))
        if len(rows) < self.fewest_clients:
            raise StrategyError(
                f"only {len(rows)} of {self.plan.clients} clients could be compared, too few for clustering; check why "
                "the other clients failed, or reduce clusters"
            )
        if self.settings.metric != "loss":
            distances = _DISTANCES[self.settings.metric](warm.updates)
        elif len(columns) == len(warm.updates):  # all pairs
            distances = loss_distances(losses[:, rows])  # lines 12-14
        else:
            distances = profile_distances(losses)
        compared = time.perf_counter() - started
        try:
            clustering = cluster(distances, self.settings.clusterer, self.clusters or None)  # line 15
        except ValueError as error:  # of a user's function
            raise StrategyError(str(error)) from error
        many = int(clustering.labels.max()) + 1
        members = [rows[clustering.labels == j] for j in range(many)]
        if (aggregator := self.options.aggregator).robust:
            moved = np.stack([aggregator(warm.updates[indices]) for indices in members])
        else:
            moved = np.stack([_mean(warm.updates, indices, warm.weights) for indices in members])
        labels = np.full(self.plan.clients, -1, np.int64)
        labels[warm.clients[rows]] = clustering.labels
        self.notes = {
            "clusters": many,
            "metric": self.settings.metric,
            "clusterer": self.settings.clusterer,
            "compare_seconds": compared,
            "silhouettes": {str(k): score for k, score in sorted(clustering.silhouettes.items())},
        }
        if self.settings.metric == "loss":
            is_own = columns == rows[:, None]  # the client's own model
            if many == 1 and not self.clusters:
                _check_similarity(losses, untrained, is_own)
            profiles = np.stack([losses[clustering.labels == j].mean(axis=0) for j in range(many)])
            best = np.unique(profiles.argmin(axis=1))
            self.state = {_LANDMARKS: start + warm.updates[columns[best]], _PROFILES: profiles[:, best]}
            self.notes["evaluations"] = losses.size + len(rows)
        else:
            self.state = {_FIRST: start, _CENTRES: moved}
        self.state[_LABELS] = labels
        self.recorder.save_artifact(
            "distances",
            {"matrix": distances.astype(np.float32), "clients": warm.clients[rows], "labels": clustering.labels},
        )
        return self.moved(start, moved, np.zeros((many, 2)), restart=True)

    def _compare(self, start: Models, updates: Models, clients: list[int]) -> Steps[tuple[FloatArray, Indices]]:
        """(n, 1 + m) losses of the untrained model and of m of the n trained ones, and the indices of these."""
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

        Each model is sent once to each client; memory holds the models of one message.
        """
        table = np.full((len(clients), many), np.nan)
        rows = {client: row for row, client in enumerate(clients)}
        for begin in range(0, many, self.settings.models_per_message):
            chunk = range(begin, min(begin + self.settings.models_per_message, many))
            models = np.stack([model(i) for i in chunk])
            if len(chunk) > 1 and models.nbytes > _MAX_BYTES:
                raise StrategyError(
                    f"models-per-message = {len(chunk)} leads to messages of {models.nbytes / 1e9:.1f} GB; set it to "
                    f"{max(1, _MAX_BYTES * len(chunk) // models.nbytes)} or less"
                )
            self.recorder.report_progress(f"{len(clients)} clients compare {begin} of {many} models")
            request = LossesRequest(compared=len(chunk))
            released = yield from self.updates(
                request, models, clients=clients, joined_late=joined_late, reply_layout=losses_layout(len(chunk))
            )
            table[[rows[client] for client in released.clients.tolist()], begin : chunk[-1] + 1] = released.updates
        return table

    # ---- late clients -------------------------------------------------------------------------------------

    def _place_late(self) -> Steps[None]:
        """Assign a cluster to every registered client without one."""
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
                labels[client] = _DISTANCES[self.settings.metric]([update, *self.state[_CENTRES]])[0, 1:].argmin()
        self.state = {**self.state, _LABELS: labels}
        self.notes["late"] = {str(client): int(labels[client]) for client in placed}


def _mean(updates: Models, rows: Indices, weights: FloatArray) -> FloatArray:
    """(d,) weighted mean of some updates."""
    total = np.zeros(updates.shape[1])
    for row in rows:
        total += weights[row] * updates[row]
    return np.asarray(total / weights[rows].sum())


def _check_similarity(losses: FloatArray, untrained: FloatArray, is_own: npt.NDArray[np.bool_]) -> None:
    """Check that clients benefit from each other.

    They do not if, for most clients, the best other model improves the loss of the untrained one by less than half of
    the median improvement of a client's own model.

    Args:
        losses: (n, m) of m trained models.
        untrained: (n,) of the untrained model.
        own: (n, m) whether a model is the client's own.

    Raises:
        StrategyError: they do not.
    """
    gains = untrained[:, None] - losses
    usual = float(np.median(gains[is_own])) if is_own.any() else 0.0
    alone = int(np.sum(np.where(is_own, -np.inf, gains).max(axis=1) < max(usual, 0.0) / 2))
    if 2 * alone > len(losses):
        raise StrategyError(
            f"no two clients are similar: for {alone} of {len(losses)} clients, the gain from any other client's model "
            "is less than half of the typical gain from a client's own. Use strategy = local, set the number of "
            "clusters, or train longer before clients are compared (warm-up-rounds, local-epochs)"
        )
