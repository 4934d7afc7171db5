"""Write the tables of five sites into a folder: client-0.csv to client-4.csv.

    python examples/hospital-csv/write_sites.py DIR

The records are those of scikit-learn's load_breast_cancer, raw, divided at random. The files look like a spreadsheet
program's in much of Europe: a byte order mark, semicolons, decimal commas, a column that is no feature.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer

SITES = 5


def main(folder: Path) -> None:
    """Write one file per site."""
    data = load_breast_cancer()
    folder.mkdir(parents=True, exist_ok=True)
    order = np.random.default_rng(0).permutation(len(data.target))
    for site, records in enumerate(np.array_split(order, SITES)):
        with (folder / f"client-{site}.csv").open("w", encoding="utf-8-sig", newline="") as file:
            rows = csv.writer(file, delimiter=";")
            rows.writerow(["patient", "diagnosis", *data.feature_names])
            for record in records:
                diagnosis = data.target_names[data.target[record]]
                numbers = (f"{number:g}".replace(".", ",") for number in data.data[record])
                rows.writerow([f"P{record:04d}", diagnosis, *numbers])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
