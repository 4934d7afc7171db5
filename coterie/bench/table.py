"""Definition of a table: columns (settings), rows (methods), seeds, and tuning of methods."""

from __future__ import annotations

import difflib
import itertools
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

Settings = Mapping[str, Any]

#: Plot types, in this order: values next to published ones; lines over the columns' ``x``; scores over rounds; fitted
#: lines; bars per group, and clustering over rounds; projected first updates.
PLOTS = ("dots", "lines", "curves", "pictures", "groups", "projections")

_HERE = Path(__file__).parent
# Next to this file in a wheel; at the repository root in a checkout.
_FOLDERS = (_HERE / "tables", _HERE.parents[1] / "benchmarks" / "tables")


# Scores that are not shares, and display names.
_INDICES = ("nmi", "kappa", "ari", "roc_auc", "brier", "calibration_error", "rmse", "mae")
_NUMBERS = (*_INDICES, "groups_found", "f_loss", "mss", "switch_round", "clusters", "evaluations", "compare_seconds")
_NAMES = {"f_acc": "F_acc", "f_loss": "F_loss", "mss": "MSS", "nmi": "NMI", "kappa": "kappa", "ari": "ARI"}
_NAMES |= {"roc_auc": "AUC", "sensitivity_at_90": "sensitivity at 90 % specificity", "rmse": "RMSE", "mae": "MAE"}

#: Centralised clustering methods: k-means, fuzzy c-means, deep clustering network.
CENTRAL = ("km", "fcm", "dcn")


class BenchError(ValueError):
    """A table cannot be read or run; the message states which and what to do."""


@dataclass(frozen=True)
class Column:
    """One setting of a table.

    Attributes:
        name: column heading.
        settings: configuration keys.
        x: position on the axis of a line plot.
        panel: panel of a line plot.
        tuned_at: name of the setting used for tuning; defaults to its own.
        setting: name of the setting, shared by the columns of several scores.
        score: key of the result or of the method's notes; ``accuracy@5`` is the value after round 5.
        percent: whether the score is a share, shown in percent.
    """

    name: str
    settings: Settings
    x: float | None = None
    panel: str = ""
    tuned_at: str = ""
    setting: str = ""
    score: str = "accuracy"
    percent: bool = True


@dataclass(frozen=True)
class Row:
    """One method.

    Attributes:
        name: row heading.
        settings: configuration keys, which override those of the column.
        paper: published value in every column; None if there is none.
        tune: tuned keys; ``settings`` holds their values for the quick table.
        columns: settings of its columns; empty for all.
        central: centralised clustering method, one of :data:`CENTRAL`; empty for a federated run.
    """

    name: str
    settings: Settings
    paper: tuple[float | None, ...]
    tune: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    central: str = ""


@dataclass(frozen=True)
class Table:  # large: one field per key
    """A table: every row in every column on every seed is a run.

    Attributes:
        name: name of its file.
        title: title.
        source: paper and table.
        reference: hyper-parameters of the reference models of F_acc and F_loss, trained centrally for each group;
            empty if there are none.
        plot: one of :data:`PLOTS`.
        axis: label of ``x``.
        seeds: seeds of the runs.
        settings: configuration keys of every run.
        columns: its columns.
        rows: its rows.
        grid: values to try for each key that a row tunes.
        tuning_settings: keys of a tuning run, which holds out validation clients instead of the test set.
        tuning_seeds: seeds of tuning runs, disjoint from ``seeds``.
        quick: whether this is the quick version.
        overrides: keys of the quick version, which override all others.
        like: name of the table whose runs it shares; defaults to its own.
        quick_minutes: measured time of the quick version on two cores; None if it is unknown.
    """

    name: str
    title: str
    source: str
    plot: str
    axis: str
    seeds: tuple[int, ...]
    settings: Settings
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    grid: Mapping[str, Sequence[Any]]
    tuning_settings: Settings
    tuning_seeds: tuple[int, ...]
    reference: Settings = field(default_factory=dict)
    quick: bool = False
    overrides: Settings = field(default_factory=dict)
    like: str = ""
    quick_minutes: float | None = None

    def column(self, setting: str) -> Column:
        """Return the first column of ``setting``."""
        return next(column for column in self.columns if column.setting == setting)

    def pairs(self) -> list[tuple[Row, Column]]:
        """Return every row with the first column of each of its settings, because scores share runs."""
        columns = {column.setting: column for column in reversed(self.columns)}
        first = [column for column in self.columns if columns[column.setting] is column]
        return [(r, c) for r in self.rows for c in first if not r.columns or c.setting in r.columns]

    def candidates(self, row: Row) -> list[dict[str, Any]]:
        """Return all combinations of the tuned values of ``row``."""
        values = [self.grid[key] for key in row.tune]
        return [dict(zip(row.tune, combination, strict=True)) for combination in itertools.product(*values)]


def score_name(score: str) -> str:
    """Return the display name of a score."""
    key, number = score_at(score)
    return _NAMES.get(key, key.replace("_", " ")) + ("" if number is None else f" after round {number}")


def decimals(column: Mapping[str, Any]) -> int:
    """Return the number of decimals of a score in a document's column: papers print NMI as 0.7179."""
    is_index = score_at(column.get("score", ""))[0] in _INDICES
    return 4 if is_index and not column.get("percent", False) else 2


def score_at(score: str) -> tuple[str, int | None]:
    """Return the key of a score and its round; None for the end of the run."""
    key, at, number = score.partition("@")
    return key, int(number) if at else None


def table_names() -> list[str]:
    """Return the names of the built-in tables."""
    return sorted(path.stem for folder in _FOLDERS for path in folder.glob("*.toml"))


def read_table(
    name: str, *, quick: bool = False, seeds: Sequence[int] = (), rows: Sequence[str] = (), columns: Sequence[str] = ()
) -> Table:
    """Read the built-in table ``name``, or the TOML file ``name``.

    Args:
        name: see :func:`table_names`.
        quick: use the quick version of the file: fewer cells, no tuning.
        seeds: replaces the seeds of the file.
        rows: names of the rows to run; empty for all.
        columns: settings to run, or prefixes of their names; empty for all.

    Raises:
        BenchError: the table does not exist, or its file is invalid.
    """
    path = _path(name)
    try:
        raw = _raw(path)
        raw["rows"] = [row for row in raw["rows"] if quick or not row.get("quick-only")]
        table = _table(path.stem, raw)
    except (KeyError, TypeError, ValueError) as error:
        raise BenchError(f"{path} is not a valid table: {error!r}") from error
    if quick:
        table = _quick(table, raw.get("quick", {}))
    if columns:
        settings = list(dict.fromkeys(column.setting for column in table.columns))
        keep = set()
        for word in columns:
            matches = {word} & set(settings) or {setting for setting in settings if setting.startswith(word)}
            if not matches:
                raise BenchError(
                    f"{table.name} has no column {word!r}; available columns: {', '.join(map(repr, settings))}"
                )
            keep |= matches
        for column in table.columns:
            if column.setting in keep and column.tuned_at not in keep:
                raise BenchError(f"{column.setting!r} is tuned in column {column.tuned_at!r}: add that column")
        table = _among(table, keep)
    row_names = [row.name for row in table.rows]
    for row in rows:
        if row not in row_names:
            raise BenchError(f"{table.name} has no row {row!r}; available rows: {', '.join(map(repr, row_names))}")
    kept = tuple(row for row in table.rows if not rows or row.name in rows)
    return replace(table, seeds=tuple(seeds) or table.seeds, rows=kept)


def _path(name: str) -> Path:
    path = (
        Path(name)
        if name.endswith(".toml")
        else next((folder / f"{name}.toml" for folder in _FOLDERS if (folder / f"{name}.toml").is_file()), None)
    )
    if path is None or not path.is_file():
        names = table_names()
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.3)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise BenchError(f"unknown table {name!r}{hint}; available: {', '.join(names)}, or a custom TOML file")
    return path


def _raw(path: Path) -> dict[str, Any]:
    """Return the contents of a file; a table that is ``like`` another inherits missing keys from it."""
    contents = tomllib.loads(path.read_text())
    if "like" not in contents:
        return contents
    other, rows = _raw(_path(contents["like"])), {row["name"]: row for row in contents["rows"]}
    both: dict[str, Any] = {**other, **contents}
    both["rows"] = [{**row, "paper": [], **rows.get(row["name"], {})} for row in other["rows"]]
    return both


def _table(name: str, raw: Mapping[str, Any]) -> Table:
    columns, tuning = _columns_of(raw), raw.get("tuning", {})
    rows = tuple(_row_of(row, raw, [column.name for column in columns]) for row in raw["rows"])
    _check_names(raw, columns, rows)
    if set(raw["seeds"]) & set(tuning.get("seeds", ())):
        raise ValueError("tuning must not use the reported seeds")
    if tuning and not tuning["set"].get("validation-clients"):
        raise ValueError("tuning requires validation-clients, because test data must not be used for selection")
    return Table(
        name=name,
        title=raw["title"],
        source=raw["source"],
        plot=raw.get("plot", "dots"),
        axis=raw.get("axis", ""),
        seeds=tuple(raw["seeds"]),
        settings=raw.get("set", {}),
        columns=columns,
        rows=rows,
        grid=tuning.get("grid", {}),
        tuning_settings=tuning.get("set", {}),
        tuning_seeds=tuple(tuning.get("seeds", ())),
        reference=raw.get("reference", {}),
        like=Path(raw.get("like", name)).name.removesuffix(".toml"),
        quick_minutes=raw.get("quick", {}).get("minutes"),
    )


def _columns_of(raw: Mapping[str, Any]) -> tuple[Column, ...]:
    scores = raw.get("scores", [raw.get("score", "accuracy")])
    return tuple(
        Column(
            name,
            _settings_of(c, raw),
            c.get("x"),
            c.get("panel", ""),
            c.get("tuned-at", c["name"]),
            c["name"],
            score,
            score_at(score)[0] not in _NUMBERS,
        )
        for c in raw["columns"]
        for score in scores
        for name in [_head(c["name"] if len(raw["columns"]) > 1 or len(scores) == 1 else "", score, len(scores))]
    )


def _row_of(row: Mapping[str, Any], raw: Mapping[str, Any], names: Sequence[str]) -> Row:
    columns = tuple(row.get("columns", ()))
    figures = [None if figure == "-" else float(figure) for figure in row.get("paper", [])]
    width = len(columns) or len(names)
    if len(figures) not in (0, width):
        raise ValueError(f"row {row['name']!r} has {len(figures)} published values for {width} columns")
    by_column = dict(zip(columns or names, figures, strict=False))
    paper = tuple(by_column.get(name) for name in names)
    return Row(row["name"], _settings_of(row, raw), paper, tuple(row.get("tune", ())), columns, row.get("central", ""))


def _check_names(raw: Mapping[str, Any], columns: Sequence[Column], rows: Sequence[Row]) -> None:
    """Raise ValueError for an undefined name or an unsuitable plot type."""
    settings = [column.setting for column in columns]
    grid, plot = raw.get("tuning", {}).get("grid", {}), raw.get("plot", "dots")
    unknown = [column.tuned_at for column in columns if column.tuned_at not in settings]
    unknown += [name for row in rows for name in row.columns if name not in settings]
    unknown += [key for row in rows for key in row.tune if key not in grid]
    unknown += [row.central for row in rows if row.central not in ("", *CENTRAL)]
    if unknown or plot not in PLOTS:
        raise ValueError(f"unknown column, tuned setting, central method or plot: {', '.join(unknown) or plot}")
    if plot == "curves" and all("@" in column.score for column in columns):
        raise ValueError("plot 'curves' shows scores over rounds and requires a score without '@'")


def _settings_of(entry: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    common: dict[str, Any] = raw["sets"][entry["with"]] if "with" in entry else {}
    return {**common, **entry.get("set", {})}


def _head(setting: str, score: str, scores: int) -> str:
    return ": ".join([*[setting] * bool(setting), *[score_name(score)] * (scores > 1)])


def _quick(table: Table, raw: Mapping[str, Any]) -> Table:
    """Return the table with the columns, rows, seeds and settings of its ``[quick]`` section, without tuning."""
    table = _among(table, raw.get("columns", [column.setting for column in table.columns]))
    chosen = raw.get("rows", [row.name for row in table.rows])
    return replace(
        table,
        columns=tuple(replace(column, tuned_at=column.setting) for column in table.columns),
        rows=tuple(replace(row, tune=()) for row in table.rows if row.name in chosen),
        seeds=tuple(raw.get("seeds", table.seeds[:1])),
        overrides=raw.get("set", {}),
        quick=True,
    )


def _among(table: Table, settings: Collection[str]) -> Table:
    places = [i for i, column in enumerate(table.columns) if column.setting in settings]
    return replace(
        table,
        columns=tuple(table.columns[i] for i in places),
        rows=tuple(replace(row, paper=tuple(row.paper[i] for i in places)) for row in table.rows),
    )
