"""A schema of a site's table, in parts: rows about patients, of whom some died; and runs on tables of sites."""

import csv
from contextlib import closing

from coterie.server import RunConfig, RunFolder
from coterie.server.simulate import simulate

OUTCOME = """[label]
column = "outcome"
classes = ["alive", "dead"]
"""
AGE = """[[columns]]
name = "age"
type = "number"
mean = 50
scale = 10
range = [0, 100]
"""
SEX = """[[columns]]
name = "sex"
type = "category"
values = ["f", "m"]
"""


def settings_on(sites, **more):
    """Settings of a run on the tables and the schema of a folder."""
    places = {"data-dir": str(sites), "table-schema": str(sites / "schema.toml")}
    return {"dataset": "own", **places, "clients": 4, "strategy": "fedavg", "seed": 3, **more}


def simulated(path, values):
    """Simulate a run; its folder."""
    with closing(RunFolder.create(path, RunConfig(values))) as folder:
        simulate(folder, cores=1)
    return path


def rows_of(path):
    """The lines of a CSV file."""
    with path.open() as file:
        return [*csv.DictReader(file)]
