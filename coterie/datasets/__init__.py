"""Data sets, the shifts that make hidden groups of clients, and the split of one data set among clients."""

from coterie.datasets.federation import Federation, Shard, TestSet, assign_groups, federate, parse_groups
from coterie.datasets.shifts import SHIFTS, Shift
from coterie.datasets.sources import DATASETS, DataError, DatasetInfo, Source, download, load

__all__ = [
    "DATASETS",
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
