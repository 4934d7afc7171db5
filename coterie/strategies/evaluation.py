"""Metrics of evaluation replies: any scalars of a library user's clients, within bounds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from flwr.app import MetricRecord, RecordDict

from coterie.messages import ReplyError, diagnostics

_MOST_KEYS = 100
_LONGEST_KEY = 100

#: Keys of a round's metrics that the server computes: released, charged, or no secret.
SERVER_KEYS = frozenset(
    {
        "round",
        "epsilon",
        "epsilon_rdp",
        "histogram",
        "reseeded",
        "notes",
        "seconds",
        "messages_down",
        "messages_up",
        "bytes_down",
        "bytes_up",
        "clients_present",
        "clients_labelled",
        "replies",
    }
)


def mean_of_clients(contents: Sequence[RecordDict]) -> MetricRecord:
    """Unweighted mean over clients of every scalar diagnostic.

    Numbers that are not finite and keys that the server sets itself are ignored. So are keys of more than 100
    characters or with control characters, and all but the 100 keys that most clients report.
    """
    values: dict[str, list[float]] = {}
    for content in contents:
        for key, value in _scalars(content).items():
            values.setdefault(key, []).append(value)
    counts = Counter({key: len(values[key]) for key in sorted(values)})
    shares = {key: [value / count for value in values[key]] for key, count in counts.most_common(_MOST_KEYS)}
    return MetricRecord({key: sum(parts) for key, parts in shares.items()})


def _scalars(content: RecordDict) -> dict[str, float]:
    try:
        reported = diagnostics(content)
    except ReplyError:
        return {}
    found: dict[str, float] = {}
    for key, value in reported.items():
        usable = key not in SERVER_KEYS and len(key) <= _LONGEST_KEY and key.isprintable()
        if usable and isinstance(value, int | float) and math.isfinite(value) and len(found) < _MOST_KEYS:
            found[key] = float(value)
    return found
