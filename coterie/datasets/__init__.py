"""Data sets, the shifts that make hidden groups of clients, and the split of one data set among clients."""

from coterie.datasets.federation import Federation, Shard, TestSet, assign_groups, federate, parse_groups
from coterie.datasets.registry import DATASETS, download, load
from coterie.datasets.shifts import LINES, SHIFTS, Shift
from coterie.datasets.sources import DataError, DatasetInfo, Source
from coterie.datasets.text import ALPHABET

__all__ = [
    "ALPHABET",
    "DATASETS",
    "LINES",
    "SHIFTS",
    "DataError",
    "DatasetInfo",
    "Federation",
    "Shard",
    "Shift",
    "Source",
    "TestSet",
    "assign_groups",
    "download",
    "federate",
    "load",
    "parse_groups",
]
