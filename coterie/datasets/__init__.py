"""Data sets, the distribution shifts that define hidden client groups, and the partition among clients."""

from coterie.datasets.federation import Federation, Shard, TestSet, assign_groups, federate, parse_groups
from coterie.datasets.own import OWN_DATA, Declared, Facts, OwnFederation, describe, facts, own_federation, own_shard
from coterie.datasets.registry import DATASETS, download, load
from coterie.datasets.shifts import LINES, SHIFTS, Shift
from coterie.datasets.sources import DataError, DatasetInfo, Source
from coterie.datasets.text import ALPHABET

__all__ = [
    "ALPHABET",
    "DATASETS",
    "LINES",
    "OWN_DATA",
    "SHIFTS",
    "DataError",
    "DatasetInfo",
    "Declared",
    "Facts",
    "Federation",
    "OwnFederation",
    "Shard",
    "Shift",
    "Source",
    "TestSet",
    "assign_groups",
    "describe",
    "download",
    "facts",
    "federate",
    "load",
    "own_federation",
    "own_shard",
    "parse_groups",
]
