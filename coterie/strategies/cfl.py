"""CFL: clustered federated learning by recursive bipartition of the clients.

F. Sattler, K.-R. Mueller, W. Samek: Clustered Federated Learning (papers/cfl; NeurIPS 2019 workshop; the long version
is IEEE TNNLS 32, 2021, arXiv:1910.01991). At a stationary point of FedAvg, clients with congruent data have updates
near zero, and other clients have updates in different directions: the angles between updates separate them.

    Algorithm 1, FederatedLearning(theta, c)
     1  repeat
     2      for i in c in parallel do
     3          Delta theta_i <- SGD_n(theta, D_i) - theta
     4      theta <- theta + sum over i in c of |D_i| / |D_c| Delta theta_i
     5  until || sum over i in c of |D_i| / |D_c| Delta theta_i || < eps_1
     6  return theta

    Algorithm 2, ClusteredFederatedLearning(theta, c)
     7  theta* <- FederatedLearning(theta, c)
     8  alpha_ij <- cosine of the latest updates of i and j, for i, j in c
     9  if max over i in c of || Delta theta_i || >= eps_2 then
    10      c_1, c_2 <- argmin over bipartitions of c of (max over i in c_1, j in c_2 of alpha_ij)
    11      ClusteredFederatedLearning(theta*, c_1) and (theta*, c_2)
    12  else theta_i* <- theta* for i in c

Line 10 is exact in O(n^2): single linkage merges the halves last.

Deviations from the paper
- All clusters train in parallel, round by round; |D_i| are public weights (equal without privacy).
- No cluster is split or stopped in the first ``first_split`` rounds, and clusters of two clients are not split, as in
  the authors' public notebook. The notebook bisects by complete linkage; this implementation follows line 10.
- Norms of updates depend on network, data and steps, so no fixed eps_1 and eps_2 suit all settings: with smaller steps,
  the notebook's 0.4 and 1.6 end a run before its first split. By default they are 0.2 and 0.5 times the largest update
  norm of the first round and scale with the step size; a cluster stops when the norm of its mean update is below 0.01
  times that norm.
- Clients with similar data that train for many steps on few records diverge, and line 9 would split them repeatedly.
  The halves must therefore be coherent: the mean similarity within each half exceeds the largest similarity between
  them, which does not hold for such clients.
- A cluster is split or stopped only in a round in which all of its members reply. A stopped cluster no longer trains;
  the run ends when all clusters have stopped.
- ``clusters`` limits the number of clusters; 0 means no limit, as in the paper.
- A client that joins late descends the tree (long version, section 5): at each split it trains from that theta* and
  joins the half whose mean direction is closer to its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from logging import WARNING
from typing import Any, ClassVar

import numpy as np
from flwr.common.logger import log

from coterie.clustering.distances import FloatArray, Indices, cosines
from coterie.fields.settings import Settings, setting
from coterie.privacy import ReleasedUpdates
from coterie.rounds.run_state import StrategyError
from coterie.strategies.method import Models, Round, Steps
from coterie.strategies.strategy import ClusteredStrategy

# Defaults of eps_1, eps_2 and the stopping threshold, in units of the largest update norm of the first round.
_RELATIVE_THRESHOLDS = (0.2, 0.5, 0.01)
_TREE, _LEAF, _ANCHORS, _SIDES, _UNIT = "tree", "leaf", "anchors", "sides", "unit"
SPLIT, STATIONARY = "split", "stationary"
_END_REASONS = (None, SPLIT, STATIONARY)
# Minimum margin of the mean similarity within a half over the largest between the halves.
_GAP = 0.05
# Rounds between two stored similarity matrices without a split, and the maximum number of clients for them.
_STORE_EVERY, _STORE_MAX_CLIENTS = 10, 200


@dataclass(frozen=True)
class Node:
    """A cluster in the tree of splits.

    Attributes:
        parent: number of the cluster it was split from; None at the root.
        born: round at the end of which it was created.
        cluster: index of its model; None after it was split.
        ended: round in which it was split or stopped; None while it trains.
        end_reason: "split" or "stationary"; None while it trains.
        similarity: the largest similarity between its two halves; None if it was not split.
    """

    parent: int | None
    born: int
    cluster: int | None
    ended: int | None = None
    end_reason: str | None = None
    similarity: float | None = None


@dataclass(frozen=True)
class CFLSettings(Settings):
    """Settings of CFL."""

    table: ClassVar[str] = "cfl"

    stationary_norm: float | None = setting(
        None,
        "norm of a cluster's mean update below which it may be split, eps_1; auto: 0.2 times the largest norm of "
        "the first round",
        above=0,
        at_most=1e12,
        tuned=True,
    )
    incongruent_norm: float | None = setting(
        None,
        "norm of a client's update from which its cluster is split, eps_2; auto: 0.5 times the largest norm of the "
        "first round",
        above=0,
        at_most=1e12,
        tuned=True,
    )
    first_split: int = setting(20, "rounds in which no cluster is split or stopped", at_least=0, tuned=True)


class CFL(ClusteredStrategy):
    """Starts with one model; splits a stationary cluster whose clients still have large updates."""

    name: ClassVar[str] = "cfl"
    title: ClassVar[str] = "recursive bipartition by the directions of updates"
    paper: ClassVar[str] = "Sattler et al. 2019, 2021"
    units: ClassVar[tuple[str, ...]] = ("none", "record")
    row_wise: ClassVar[bool] = False
    finds_clusters: ClassVar[bool] = True
    grows: ClassVar[bool] = True
    settings_class: ClassVar[type[Settings]] = CFLSettings
    settings: CFLSettings

    def check(self) -> None:
        """Require full participation: a split compares all clients of a cluster."""
        super().check()
        if self.plan.rate != 1:
            raise StrategyError(
                f"cfl compares all clients of a cluster: set sampling-rate to 1, not {self.plan.rate:g}"
            )

    def initial_models(self, models: Models) -> Models:
        """One model."""
        return super().initial_models(models)[:1]

    def round(self, number: int, models: Models) -> Round:
        """Lines 2 to 4 in all clusters, then lines 5 and 8 to 12 in stationary ones."""
        if number == 1:
            self._store_tree([Node(None, 0, 0)], np.full(self.plan.clients, -1, np.int64))
        yield from self._place_late()
        before, previous, leaf = self.assignments(number), self.nodes, self.state[_LEAF].copy()
        nodes = previous.copy()
        training = [n for n, node in enumerate(nodes) if node.ended is None]
        of_training = {client: cluster for client, cluster in before.items() if leaf[client] in training}
        released = yield from self.updates(self.training(), models, to=of_training)  # lines 2-3
        stationary, incongruent, converged = self._norms(number, released.updates)
        models, leaves, norms = models.copy(), leaf[released.clients], {}
        for n in training:
            node, rows = nodes[n], np.flatnonzero(leaves == n)
            if node.cluster is None or not len(rows):
                continue
            updates, clients = released.updates[rows], released.clients[rows]
            mean = np.average(updates, axis=0, weights=released.weights[rows])
            models[node.cluster] += self.options.server_lr * mean  # line 4
            moved, longest = float(np.linalg.norm(mean)), float(np.linalg.norm(updates, axis=1).max())
            norms[str(node.cluster)] = [moved, longest]
            waits = number <= self.settings.first_split or len(rows) < np.sum(leaf == n)
            if waits or not moved < stationary:  # line 5
                continue
            if longest < incongruent:  # line 12
                if moved < converged:
                    nodes[n] = replace(node, ended=number, end_reason=STATIONARY)
            elif len(rows) > 2 and not 0 < self.clusters <= len(models):
                alike = cosines(updates)  # line 8
                side, closest = bipartition(alike)  # line 10
                if not _coherent(alike, side, closest):
                    self._warn(node.cluster)
                    continue
                leaf[clients] = len(nodes) + side
                nodes[n] = replace(node, cluster=None, ended=number, end_reason=SPLIT, similarity=closest)
                nodes += [Node(n, number, node.cluster), Node(n, number, len(models))]  # line 11
                models = np.concatenate([models, models[node.cluster, None]])
                lengths = np.linalg.norm(updates, axis=1, keepdims=True)
                directions = updates / np.where(lengths > 0, lengths, 1.0)
                self._store_split(models[-1], [directions[side == half].mean(axis=0) for half in (0, 1)])
        split = len(nodes) > len(previous)
        changed = nodes != previous or number == 1 or "late" in self.notes
        self._store_tree(nodes, leaf)
        if changed:
            self.notes["tree"] = self._tree_notes()
        self.notes |= {"clusters": len(models), "norms": norms}
        if split or self.finished or (number % _STORE_EVERY == 0 and self.plan.clients <= _STORE_MAX_CLIENTS):
            self._save_similarities(number, released, leaves, before)
        return models

    def _norms(self, number: int, updates: Models) -> list[float]:
        """eps_1, eps_2 and the stopping threshold of this round: configured, or relative to the first round."""
        if number == 1:
            self.state[_UNIT] = np.array([max((np.linalg.norm(update) for update in updates), default=0.0)])
        unit = float(self.state[_UNIT][0]) * self.step_size(number)
        first, second = self.settings.stationary_norm, self.settings.incongruent_norm
        thresholds = zip((first, second, first), _RELATIVE_THRESHOLDS, strict=True)
        return [factor * unit if norm is None else norm for norm, factor in thresholds]

    @cached_property
    def _warned(self) -> set[int]:
        return set()

    def _warn(self, cluster: int) -> None:
        """Warn once per cluster that it cannot be split."""
        if cluster not in self._warned:
            log(
                WARNING,
                "cluster %s is stationary and its clients have large updates, but it has no coherent bipartition and "
                "is not split: either no two clients are similar (use strategy = local), or all clients are similar "
                "and train for many steps on few records",
                cluster,
            )
        self._warned.add(cluster)

    def assignments(self, number: int) -> Mapping[int, int]:
        """The model of every client in the tree."""
        nodes = self.nodes
        return {i: int(nodes[n].cluster or 0) for i, n in enumerate(self.state[_LEAF].tolist()) if n >= 0}

    @property
    def finished(self) -> bool:
        """Line 12 for all clusters."""
        return _TREE in self.state and all(node.ended is not None for node in self.nodes)

    # ---- the tree -----------------------------------------------------------------------------------------

    @property
    def nodes(self) -> list[Node]:
        """All clusters, in order of creation: the children of split number s are 2s + 1 and 2s + 2."""
        nodes = []
        for row in self.state[_TREE].tolist():
            parent, born, cluster, ended, end_reason, similarity = (None if np.isnan(value) else value for value in row)
            whole = [None if value is None else int(value) for value in (parent, cluster, ended)]
            nodes.append(
                Node(whole[0], int(born or 0), whole[1], whole[2], _END_REASONS[int(end_reason or 0)], similarity)
            )
        return nodes

    def _store_tree(self, nodes: list[Node], leaf: Indices) -> None:
        """Store the tree and the leaf of every client; -1 for clients without one."""
        rows = [(n.parent, n.born, n.cluster, n.ended, _END_REASONS.index(n.end_reason), n.similarity) for n in nodes]
        self.state = {**self.state, _TREE: np.array(rows, np.float64), _LEAF: leaf}

    def _store_split(self, model: Models, directions: list[FloatArray]) -> None:
        """Store the model and the mean directions of a split, by which late clients are placed."""
        anchors, sides = model[None], np.stack(directions)[None].astype(np.float32)
        if _ANCHORS in self.state:
            anchors = np.concatenate([self.state[_ANCHORS], anchors])
            sides = np.concatenate([self.state[_SIDES], sides])
        self.state = {**self.state, _ANCHORS: anchors, _SIDES: sides}

    def _tree_notes(self) -> list[dict[str, Any]]:
        """The tree with the clients of every cluster, JSON-ready."""
        nodes = self.nodes
        clients = [np.flatnonzero(self.state[_LEAF] == n).tolist() for n in range(len(nodes))]
        for n in range(len(nodes) - 1, 0, -1):  # children come after their parents
            clients[int(nodes[n].parent or 0)] += clients[n]
        return [
            {
                "node": n,
                "parent": node.parent,
                "born": node.born,
                "cluster": node.cluster,
                "ended": node.ended,
                "why": node.end_reason,
                "similarity": node.similarity,
                "clients": sorted(clients[n]),
            }
            for n, node in enumerate(nodes)
        ]

    def _save_similarities(
        self, number: int, released: ReleasedUpdates, leaves: Indices, before: Mapping[int, int]
    ) -> None:
        """Store the similarities of the round's updates within each cluster."""
        many = self.plan.clients
        matrix = np.full((many, many), np.nan, np.float32)
        for n in np.unique(leaves):
            rows = np.flatnonzero(leaves == n)
            matrix[np.ix_(released.clients[rows], released.clients[rows])] = cosines(released.updates[rows])
        labels = np.array([before.get(client, -1) for client in range(many)], np.int64)
        self.recorder.save_artifact(
            f"similarities-{number:04d}", {"matrix": matrix, "clients": np.arange(many), "labels": labels}
        )

    # ---- late clients -------------------------------------------------------------------------------------

    def _place_late(self) -> Steps[None]:
        """Assign a leaf to every registered client without one."""
        nodes, leaf = self.nodes, self.state[_LEAF].copy()
        at = {client: 0 for client in self.present if leaf[client] < 0}
        for s in range(len(nodes) // 2):  # splits, the first one first
            children = (2 * s + 1, 2 * s + 2)
            here = [client for client, n in at.items() if n == nodes[children[0]].parent]
            if not here:
                continue
            released = yield from self.updates(
                self.training(), self.state[_ANCHORS][s, None], clients=here, joined_late=True
            )
            at = {client: n for client, n in at.items() if client not in here}
            for client, update in zip(released.clients.tolist(), released.updates, strict=True):
                at[client] = children[cosines([update, *self.state[_SIDES][s]])[0, 1:].argmax()]
        if at:
            leaf[list(at)] = list(at.values())
            self._store_tree(nodes, leaf)
            self.notes["late"] = sorted(at)


def bipartition(similarities: FloatArray) -> tuple[Indices, float]:
    """The bipartition with the smallest maximum similarity between the halves, Equation (6), and that similarity.

    Its halves are the last two clusters that single linkage merges.

    Args:
        similarities: (n, n), symmetric; n is at least 2.

    Returns:
        (n,) 0 for the half of the first client, 1 for the other; and the largest similarity between the halves.
    """
    from scipy.cluster.hierarchy import cut_tree, linkage  # slow to import

    pairs = similarities[np.triu_indices(len(similarities), 1)]
    halves = cut_tree(linkage(pairs.max() - pairs, "single"), 2)[:, 0]
    side = (halves != halves[0]).astype(np.int64)
    return side, float(similarities[np.ix_(side == 0, side == 1)].max())


def _coherent(similarities: FloatArray, side: Indices, closest: float) -> bool:
    """Whether the mean similarity within each half exceeds the largest similarity between the halves."""
    for half in (0, 1):
        within = similarities[np.ix_(side == half, side == half)]
        if len(within) > 1 and not within[~np.eye(len(within), dtype=bool)].mean() > closest + _GAP:
            return False
    return True
