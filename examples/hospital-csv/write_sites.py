"""Write the tables of five sites into a folder: client-0.csv to client-4.csv.

    python examples/hospital-csv/write_sites.py [--raw] DIR

The records are those of scikit-learn's load_breast_cancer, raw, divided at random. The files look like a spreadsheet
program's in much of Europe: a byte order mark, semicolons, decimal commas, a column that is no feature. With --raw,
only the first site's does; the others have the names, codes and units of their own systems, which site-parts describes.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer

SITES = 5
NUMBERS = [str(name) for name in load_breast_cancer().feature_names]
Record = dict[str, str]


def plain(record: Record) -> Record:
    """A record as the schema has it."""
    return record


def american(record: Record) -> Record:
    """Codes of the diagnosis, decimal points, a column that nobody else has."""
    code = {"benign": "B", "malignant": "M"}[record["diagnosis"]]
    return {**_points(record), "diagnosis": code, "ward": "7"}


def german(record: Record) -> Record:
    """Names and codes in another language, diameters in place of radii."""
    renamed = {"diagnosis": "Befund", "mean radius": "Durchmesser", "mean area": "Fläche"}
    word = {"benign": "gutartig", "malignant": "bösartig"}[record["diagnosis"]]
    diameter = f"{2 * float(_points(record)['mean radius']):g}".replace(".", ",")
    record = {**record, "diagnosis": word, "mean radius": diameter}
    return {renamed.get(name, name): cell for name, cell in record.items()}


def sentinels(record: Record) -> Record:
    """-9 where a value is missing: every seventh patient's concavity."""
    missing = int(record["patient"][1:]) % 7 == 0
    return {**record, "worst concavity": "-9" if missing else record["worst concavity"]}


def small(record: Record) -> Record:
    """A column that the site does not record, and the diagnosis as a number."""
    record = {**record, "diagnosis": str(int(record["diagnosis"] == "malignant"))}
    del record["fractal dimension error"]
    return record


STYLES: tuple[Callable[[Record], Record], ...] = (plain, american, german, sentinels, small)


def _points(record: Record) -> Record:
    return {name: cell.replace(",", ".") if name in NUMBERS else cell for name, cell in record.items()}


def main(folder: Path, raw: bool = False) -> None:
    """Write one file per site."""
    data = load_breast_cancer()
    folder.mkdir(parents=True, exist_ok=True)
    order = np.random.default_rng(0).permutation(len(data.target))
    for site, records in enumerate(np.array_split(order, SITES)):
        style = STYLES[site] if raw else plain
        with (folder / f"client-{site}.csv").open("w", encoding="utf-8-sig", newline="") as file:
            rows = csv.writer(file, delimiter="," if style is american else ";")
            for line, record in enumerate(records):
                numbers = (f"{number:g}".replace(".", ",") for number in data.data[record])
                cells = {"patient": f"P{record:04d}", "diagnosis": str(data.target_names[data.target[record]])}
                cells = style({**cells, **dict(zip(NUMBERS, numbers, strict=True))})
                if line == 0:
                    rows.writerow(cells)
                rows.writerow(cells.values())


if __name__ == "__main__":
    *options, path = sys.argv[1:]
    main(Path(path), raw="--raw" in options)
