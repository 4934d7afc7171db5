"""How long does it take to read a table, and how much of that are its checks?

    python benchmarks/table_reading.py [--rows 1000000] [--other CHECKOUT]

Writes a CSV file of nine columns (numbers with gaps, a category, a boolean, a note of free text, a label), reads it by
a schema, and prints one JSON document with CPU seconds. "checks" are those of bytes that cannot be decoded,
zero bytes, lengths of lines, and numbers of cells: what finds damage and changes no table without it. ``--other`` reads
the same file with the code of another checkout, such as that of the last release.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NUMBERS = ("age", "bmi", "crp", "sodium", "potassium")
SCHEMA = "\n".join(
    [
        'version = 1\nignore = ["note"]\n[label]\ncolumn = "outcome"\nclasses = ["no", "yes"]',
        *(
            f'[[columns]]\nname = "{name}"\ntype = "number"\nmean = 50\nscale = 20\nmissing = "mean"'
            for name in NUMBERS
        ),
        '[[columns]]\nname = "stage"\ntype = "category"\nvalues = ["I", "II", "III", "IV"]',
        '[[columns]]\nname = "smoker"\ntype = "category"\nvalues = ["True", "False"]',
    ]
)


def write(path: Path, rows: int) -> None:
    """Write a table with gaps in one in 50 cells of one column, as sites have them."""
    rng = random.Random(0)
    with path.open("w") as file:
        file.write(f"{','.join(NUMBERS)},stage,smoker,note,outcome\n")
        for i in range(rows):
            numbers = [f"{rng.uniform(0, 100):.2f}" for _ in NUMBERS]
            numbers[2] = "" if i % 50 == 0 else numbers[2]
            category = ("I", "II", "III", "IV")[i % 4]
            file.write(
                f"{','.join(numbers)},{category},{i % 3 == 0},stable since day {i % 30},{('no', 'yes')[i % 2]}\n"
            )


def seconds_of(path: Path, checkout: Path) -> dict[str, Any]:
    """Read the table with the code of a checkout in a process of its own."""
    words = [sys.executable, __file__, "--read", str(path)]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(words, env=environment, cwd=checkout, capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def read(path: Path) -> dict[str, Any]:
    """Read the table once, and time it in CPU seconds."""
    from coterie.datasets import TableSchema, read_table

    schema = TableSchema.parse(SCHEMA)
    begin = time.process_time()
    table = read_table(path, schema)
    return {"cpu_seconds": round(time.process_time() - begin, 3), "records": len(table.y)}


def checks(path: Path) -> float:
    """CPU seconds of the checks of all blocks of a table, apart from reading it."""
    from coterie.datasets.schema import FileFormat
    from coterie.datasets.text_tables import MAX_LINE, UNDECODABLE, ZERO, _blocks, _opened, _reader

    total = 0.0

    def timed(check: Callable[[], object]) -> None:
        nonlocal total
        begin = time.process_time()
        check()
        total += time.process_time() - begin

    with _opened(path, FileFormat()) as file:
        for lines in _blocks(file, path):
            rows = list(_reader(iter(lines), ","))
            timed(lambda lines=lines: [mark in "".join(lines) for mark in (UNDECODABLE, ZERO)])  # type: ignore[misc]
            timed(lambda lines=lines: max(map(len, lines)) <= MAX_LINE)  # type: ignore[misc]
            timed(lambda rows=rows: set(map(len, rows)) and all(map(any, rows)))  # type: ignore[misc]
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--other", type=Path, help="another checkout of Coterie")
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.read:
        print(json.dumps(read(chosen.read)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.csv"
        write(path, chosen.rows)
        codes = {"this": ROOT} | ({"other": chosen.other.resolve()} if chosen.other else {})
        found: dict[str, Any] = {"rows": chosen.rows, "bytes": path.stat().st_size, "load_average": os.getloadavg()[0]}
        for name, checkout in codes.items():
            runs = [seconds_of(path, checkout) for _ in range(chosen.repeat)]
            found[name] = {**min(runs, key=lambda run: run["cpu_seconds"]), "all": [run["cpu_seconds"] for run in runs]}
        found["checks_cpu_seconds"] = round(min(checks(path) for _ in range(chosen.repeat)), 3)
        found["share_of_checks"] = round(found["checks_cpu_seconds"] / found["this"]["cpu_seconds"], 4)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    sys.path.insert(0, os.environ.get("PYTHONPATH", str(ROOT)).split(os.pathsep)[0])
    main()
