"""A schema of a site's table, in parts: rows about patients, of whom some died; and runs on tables of sites."""

import csv
import json
from contextlib import closing

from coterie.server import RunConfig, RunFolder
from coterie.server.simulate import simulate


def label_column(*classes, column="outcome"):
    return f'[label]\ncolumn = "{column}"\nclasses = {json.dumps(classes)}\n'


def number_column(name, mean=0, scale=1, *rules):
    """A column of numbers with lines of rules."""
    return "\n".join([f'[[columns]]\nname = "{name}"\ntype = "number"\nmean = {mean}\nscale = {scale}', *rules, ""])


def category_column(name, values, *rules):
    """A column of categories with lines of rules."""
    values = json.dumps(values, ensure_ascii=False)
    return "\n".join([f'[[columns]]\nname = "{name}"\ntype = "category"\nvalues = {values}', *rules, ""])


OUTCOME = label_column("alive", "dead")
AGE = number_column("age", 50, 10, "range = [0, 100]")
SEX = category_column("sex", ["f", "m"])


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
