"""Sites of a run with their cluster and accuracy, and how accuracy differs between sites, groups or classes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import linear_sum_assignment

from coterie.report import formats
from coterie.report.runs import Run
from coterie.results import Diagnostics


@dataclass(frozen=True)
class Site:
    """A client with what is known about it.

    Attributes:
        client: its id.
        cluster: its cluster; None if it is not released or not known.
        accuracy: exact accuracy of its model on its held-out data; None if it is not known.
        personal: the same of the model that it fitted to its own records.
    """

    client: int
    cluster: int | None
    accuracy: float | None
    personal: float | None = None

    @property
    def label(self) -> str:
        """How a reader calls it."""
        return f"client {self.client}"


@dataclass(frozen=True)
class Spread:
    """Accuracy of parts of the data: sites, hidden groups, or classes.

    Attributes:
        part: singular name of the parts.
        worst: label of the part with the lowest accuracy; empty if it is not known.
        lowest: the lowest accuracy.
        disparity: highest minus lowest accuracy; None if it is not known.
        std: population standard deviation over the parts; None if it is not known.
        n: number of parts; None if it is not known.
    """

    part: str
    worst: str
    lowest: float
    disparity: float | None
    std: float | None
    n: int | None


def read_sites(run: Run) -> list[Site]:
    """Return the sites by client id; empty if neither clusters nor accuracies of single sites are known."""
    outcome = run.outcome
    sites = {site.client: Site(site.client, site.cluster, None) for site in outcome.sites}
    scores = outcome.diagnostics or Diagnostics()
    clients = scores.client_id or ()
    clusters = scores.client_cluster or (None,) * len(clients)
    own = scores.client_personal_accuracy or (None,) * len(clients)
    for client, accuracy, personal, cluster in zip(clients, scores.client_accuracy or (), own, clusters, strict=False):
        site = sites.get(client, Site(client, None, None))
        known = cluster if site.cluster is None else site.cluster
        sites[client] = replace(site, cluster=known, accuracy=accuracy, personal=personal)
    return [sites[client] for client in sorted(sites)]


def spread(run: Run, sites: Sequence[Site]) -> Spread | None:
    """Return how accuracy differs between sites, otherwise between hidden groups, or classes; None if unknown."""
    scores = run.scores
    if run.noisy:
        return None
    if run.clusters_records:
        # the share of each class in the cluster that it is matched to
        counts = np.array(scores.confusion or [[0]])
        inside = np.zeros(counts.shape[1])
        for cluster, label in zip(*linear_sum_assignment(-counts), strict=True):
            inside[label] = counts[cluster, label]
        sizes = counts.sum(axis=0)
        shares = [(float(inside[label] / sizes[label]), f"class {label}") for label in np.flatnonzero(sizes).tolist()]
        return _spread("class", shares) if shares else None
    accuracies = [(site.accuracy, site.label) for site in sites if site.accuracy is not None]
    if len(accuracies) > 1:
        return _spread("site", accuracies)
    groups = [
        (value, f"group {number}")
        for number, value in enumerate(scores.group_accuracy or ())
        if value is not None and math.isfinite(value)
    ]
    if len(groups) > 1:
        return _spread("group", groups)
    lowest, disparity = scores.worst_client_accuracy, scores.max_disparity
    if lowest is not None:
        return Spread("client", "", lowest, disparity, None, None)
    return None


def describe(found: Spread) -> str:
    """Describe the disparity in one phrase."""
    parts = []
    if found.disparity is not None:
        parts.append(f"disparity (best − worst) {_points(found.disparity)}")
    if found.std is not None:
        many = {"class": "classes"}.get(found.part, f"{found.part}s")
        parts.append(f"standard deviation {_points(found.std)} over {found.n} {many}")
    return "; ".join(parts)


def standard_error(sites: Sequence[Site]) -> float | None:
    """Return the standard error of the mean accuracy over sites; None with fewer than two."""
    accuracies = [site.accuracy for site in sites if site.accuracy is not None]
    return statistics.stdev(accuracies) / math.sqrt(len(accuracies)) if len(accuracies) > 1 else None


def _points(share: float) -> str:
    return f"{100 * share:.1f}{formats.NBSP}points"


def _spread(unit: str, accuracies: Sequence[tuple[float, str]]) -> Spread:
    values = [value for value, _ in accuracies]
    lowest, worst = min(accuracies, key=lambda pair: pair[0])
    return Spread(unit, worst, lowest, max(values) - lowest, statistics.pstdev(values), len(values))
