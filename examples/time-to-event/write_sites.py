"""Write the tables of five sites into a folder: client-0.csv to client-4.csv.

    python examples/time-to-event/write_sites.py DIR

The records are the 2,139 patients of the trial ACTG 175 (S. Hammer et al., NEJM 335, 1996), as the package lifelines
ships them, divided at random. A patient's event is a fall of CD4 cells by half, AIDS, or death. Features are what was
known when the trial began.
"""

from __future__ import annotations

import csv
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import numpy as np

SITES = 5
BASELINE = [
    "age", "wtkg", "karnof", "cd40", "cd80", "preanti", "hemo", "homo", "drugs", "oprior", "race", "gender", "symptom",
    "treat",
]  # fmt: skip


def patients() -> list[dict[str, str]]:
    """The trial's table. The package is not imported, so that it needs none of its dependencies."""
    try:
        path = distribution("lifelines").locate_file("lifelines/datasets/ACTG175.csv")
    except PackageNotFoundError:
        sys.exit("the data come with a package: pip install --no-deps lifelines")
    with Path(str(path)).open(newline="") as file:
        return list(csv.DictReader(file))


def main(folder: Path, records: list[dict[str, str]]) -> None:
    """Write one file per site."""
    folder.mkdir(parents=True, exist_ok=True)
    order = np.random.default_rng(0).permutation(len(records))
    for site, own in enumerate(np.array_split(order, SITES)):
        with (folder / f"client-{site}.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow([*BASELINE, "days", "event"])
            rows.writerows(
                [*(records[i][name] for name in BASELINE), records[i]["days"], records[i]["cens"]] for i in own
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]), patients())
