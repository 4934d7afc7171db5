"""Sites of a run with their cluster and accuracy, and how accuracy differs between sites, groups or classes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from coterie.report import formats
from coterie.report.runs import Run

# Characters of a name, which a site may have chosen.
_LONGEST_NAME = 80


@dataclass(frozen=True)
class Site:
    """A client with what is known about it.

    Attributes:
        client: its id.
        name: its name; empty if it has none.
        cluster: its cluster; None if it is not released or not known.
        accuracy: exact accuracy of its model on its held-out data; None if it is not known.
    """

    client: int
    name: str
    cluster: int | None
    accuracy: float | None

    @property
    def label(self) -> str:
        """The name, or the client's id."""
        return self.name or f"client {self.client}"


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
    """Return the sites by client id; empty if neither clusters nor accuracies of single sites are known.

    Entries that have another form, as in a damaged file, are left out.
    """
    found: dict[int, Site] = {}
    for entry in _entries((run.result or {}).get("sites")):
        client, cluster = _index(entry.get("client")), _index(entry.get("cluster"))
        if client is not None:
            name = entry.get("name")
            found[client] = Site(client, _printable(name) if isinstance(name, str) else "", cluster, None)
    for client, accuracy, cluster in _exact(run):
        known = found.get(client, Site(client, "", None, None))
        found[client] = Site(client, known.name, cluster if known.cluster is None else known.cluster, accuracy)
    return [found[client] for client in sorted(found)]


def spread(run: Run, sites: Sequence[Site]) -> Spread | None:
    """Return how accuracy differs between sites, otherwise between hidden groups, or classes; None if unknown."""
    outcome = run.outcome
    if run.noisy:
        return None
    if run.clusters_records:
        return _spread("class", _class_accuracies(outcome["confusion"]))
    known = [(site.accuracy, site.label) for site in sites if site.accuracy is not None]
    if len(known) > 1:
        return _spread("site", known)
    groups = [
        (value, f"group {number}")
        for number, value in enumerate(outcome["group_accuracy"] or ())
        if value is not None and math.isfinite(value)
    ]
    if len(groups) > 1:
        return _spread("group", groups)
    lowest, disparity = outcome.get("worst_client_accuracy"), outcome.get("max_disparity")
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
    known = [site.accuracy for site in sites if site.accuracy is not None]
    return statistics.stdev(known) / math.sqrt(len(known)) if len(known) > 1 else None


def _points(share: float) -> str:
    return f"{100 * share:.1f}{formats.NBSP}points"


def _spread(part: str, known: Sequence[tuple[float, str]]) -> Spread | None:
    if not known:
        return None
    values = [value for value, _ in known]
    lowest, worst = min(known, key=lambda each: each[0])
    return Spread(part, worst, lowest, max(values) - lowest, statistics.pstdev(values), len(values))


def _class_accuracies(confusion: Any) -> list[tuple[float, str]]:
    """Return the share of each class in the cluster that it is matched to."""
    if not confusion:
        return []
    counts = np.array(confusion)
    inside = np.zeros(counts.shape[1])
    for cluster, each in zip(*linear_sum_assignment(-counts), strict=True):
        inside[each] = counts[cluster, each]
    sizes = counts.sum(axis=0)
    return [(float(inside[each] / sizes[each]), f"class {each}") for each in np.flatnonzero(sizes).tolist()]


def _exact(run: Run) -> list[tuple[int, float | None, int | None]]:
    """Return (client, accuracy, cluster) from the exact scores; those of single clients only where they are kept."""
    exact = run.diagnostics or {}
    values, ids, clusters = (exact.get(f"client_{name}") for name in ("accuracy", "id", "cluster"))
    if not isinstance(values, list):
        return []
    if not isinstance(ids, list) or len(ids) != len(values):
        if len(values) != run.config.get("clients"):
            return []  # an older version, which lists evaluated clients without their ids
        ids = list(range(len(values)))
    if not isinstance(clusters, list) or len(clusters) != len(values):
        clusters = [None] * len(values)
    return [
        (client, float(value) if _is_share(value) else None, _index(cluster))
        for client, value, cluster in zip(ids, values, clusters, strict=True)
        if _index(client) is not None and (_is_share(value) or _index(cluster) is not None)
    ]


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _entries(values: Any) -> list[Mapping[str, Any]]:
    return [entry for entry in values if isinstance(entry, Mapping)] if isinstance(values, list) else []


def _index(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _printable(name: str) -> str:
    text = "".join(character if character.isprintable() else "�" for character in name)
    return text if len(text) <= _LONGEST_NAME else text[: _LONGEST_NAME - 1] + "…"
