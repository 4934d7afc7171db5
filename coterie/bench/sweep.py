"""A table of all combinations of some settings.

The first setting with several numbers gives the columns, otherwise the last one with several values.
"""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coterie.bench.cells import Done
from coterie.bench.table import BenchError, Column, Row, Table
from coterie.files import spreadsheet_cell
from coterie.server import ConfigError, applicable
from coterie.server.resolution import combine, declarations, method_of
from coterie.server.settings import RunSettings

# Columns of runs.csv, and the results that they hold.
_RESULTS = {
    "accuracy": "accuracy",
    "worst group accuracy": "worst_group_accuracy",
    "clustering accuracy": "clustering_accuracy",
    "groups found": "groups_found",
    "nmi": "nmi",
    "epsilon spent": "epsilon",
}
# Most seeds in a range.
_SEEDS = 1000
# Settings of a single run, or that have an option.
_OWN = ("seed", "out", "resume", "budget-file", "device", "data-dir")


def sweep(settings: Mapping[str, Any], seeds: Sequence[int]) -> Table:
    """Return the table of a sweep.

    Args:
        settings: a value, or a list of values, of every setting.
        seeds: of every combination.

    Raises:
        BenchError: a value or a seed is given twice, or a setting cannot be varied.
        ConfigError: a setting or a value does not exist.
    """
    fixed, axes = _divided(settings)
    if not seeds or len(set(seeds)) < len(seeds):
        raise BenchError(f"seeds = {', '.join(map(str, seeds)) or 'none'}: name each seed once, as in --seeds 0-4")
    every = [{**fixed, **dict(zip(axes, values, strict=True))} for values in itertools.product(*axes.values())]
    used = [applicable(combination) for combination in every]
    unused = set().union(*map(combine, every)) - set().union(*used)
    if unused:
        raise ConfigError(f"{', '.join(sorted(unused))}: no strategy of the sweep uses it; leave it out")
    for used_settings in used:  # each value alone; the runs check what they allow together
        declared = declarations(method_of(used_settings))
        for name, value in used_settings.items():
            declared[name].parse(value)
    numbers = [name for name, values in axes.items() if None not in map(_number, values)]
    of_columns = numbers[0] if numbers else next(reversed(axes), "")
    names = [name for name in axes if name != of_columns]
    combinations = [dict(zip(names, values, strict=True)) for values in itertools.product(*(axes[n] for n in names))]
    places = [{of_columns: value} for value in axes[of_columns]] if of_columns else [{}]
    positions = [_number(value) for value in axes[of_columns]] if numbers else []
    columns = tuple(
        Column(head, column_settings, x, tuned_at=head, setting=head)
        for column_settings, x in itertools.zip_longest(places, positions)
        for head in [_heading(column_settings) or "accuracy"]
    )
    return Table(
        name="sweep",
        title="Accuracy in %, mean ± standard deviation over seeds",
        source="",
        plot="lines" if numbers else "dots",
        axis=of_columns,
        seeds=tuple(seeds),
        settings=fixed,
        columns=columns,
        rows=tuple(
            Row(
                _heading(combination) or fixed.get("strategy", RunSettings.strategy),
                combination,
                (None,) * len(columns),
            )
            for combination in combinations
        ),
        grid={},
        tuning_settings={},
        tuning_seeds=(),
    )


def seeds_of(text: str) -> tuple[int, ...]:
    """Return seeds of a text such as ``0-4,7``.

    Raises:
        BenchError: the text has another form.
    """
    seeds: list[int] = []
    for seed_range in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", seed_range)
        if match is None:
            raise BenchError(f"--seeds {text}: must be numbers and ranges, as in 0-4 or 0,2,5")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < first + _SEEDS:
            raise BenchError(f"--seeds {text}: {seed_range} must be a range of 1 to {_SEEDS} seeds")
        seeds += range(first, last + 1)
    return tuple(seeds)


def write_runs(table: Table, done: Sequence[Done], path: Path) -> None:
    """Write a CSV file with one line per run: its settings, seed and results."""
    rows, columns = ({entry.name: entry.settings for entry in entries} for entries in (table.rows, table.columns))
    varied = [*dict.fromkeys(name for by_name in (rows, columns) for settings in by_name.values() for name in settings)]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*varied, "seed", *_RESULTS, "folder", "error"])
        writer.writeheader()
        for one in done:
            results = {name: (one.result or {}).get(key) for name, key in _RESULTS.items()}
            settings = {**rows[one.cell.row], **columns[one.cell.column], "seed": one.cell.seed}
            row = {**settings, **results, "folder": f"runs/{one.folder.name}", "error": one.error}
            writer.writerow({name: spreadsheet_cell(value) for name, value in row.items()})


def _divided(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    fixed: dict[str, Any] = {}
    axes: dict[str, list[Any]] = {}
    for name, value in settings.items():
        if name.rpartition(".")[2] in _OWN:
            raise BenchError(f"{name}: use --seeds, --out, --device and --data-dir of coterie sweep")
        values = value if isinstance(value, list) else [value]
        if not values or len({str(choice) for choice in values}) < len(values):
            raise BenchError(f"{name} = {value}: name each value once")
        if len(values) > 1:
            axes[name] = values
        else:
            (fixed[name],) = values
    return fixed, axes


def _heading(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in settings.items())


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None
