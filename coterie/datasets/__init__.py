"""Data sets, the distribution shifts that define hidden client groups, and the partition among clients."""

from coterie.datasets.catalog import DATASETS, download, load
from coterie.datasets.client_data import DataReport, describe, report
from coterie.datasets.facts import OWN_DATA, Declared, Facts, facts
from coterie.datasets.federation import Federation, Shard, TestSet, federate
from coterie.datasets.left_out import Finding, LeftOut, Loss
from coterie.datasets.own import OwnFederation, own_federation, own_shard
from coterie.datasets.partition import Partition, assign_groups, parse_groups
from coterie.datasets.schema import SchemaError, TableSchema
from coterie.datasets.shifts import LINES, SHIFTS, Shift
from coterie.datasets.sources import DataError, DatasetInfo, Source
from coterie.datasets.table_encoder import Table
from coterie.datasets.tables import read_table
from coterie.datasets.text import ALPHABET
from coterie.datasets.units import Units

__all__ = [
    "ALPHABET",
    "DATASETS",
    "LINES",
    "OWN_DATA",
    "SHIFTS",
    "DataError",
    "DataReport",
    "DatasetInfo",
    "Declared",
    "Facts",
    "Federation",
    "Finding",
    "LeftOut",
    "Loss",
    "OwnFederation",
    "Partition",
    "SchemaError",
    "Shard",
    "Shift",
    "Source",
    "Table",
    "TableSchema",
    "TestSet",
    "Units",
    "assign_groups",
    "describe",
    "download",
    "facts",
    "federate",
    "load",
    "own_federation",
    "own_shard",
    "parse_groups",
    "read_table",
    "report",
]
