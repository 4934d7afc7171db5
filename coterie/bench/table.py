"""What a table of a paper is made of: columns (settings), rows (methods), seeds, and how methods are tuned."""

from __future__ import annotations

import difflib
import itertools
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

Settings = Mapping[str, Any]

#: Ways to draw a table: values beside the paper's; lines over the columns' ``x``; scores over rounds; fitted lines;
#: bars of every group, and clustering over rounds; first updates in a plane; noise over batch sizes, without runs;
#: how one setting's clients were split.
PLOTS = ("dots", "lines", "curves", "pictures", "groups", "projections", "surfaces", "splits")

# Plots of what a score was in every round.
_OVER_ROUNDS = ("curves", "splits")

_HERE = Path(__file__).parent
# In a wheel beside this file; in a checkout at the repository's root.
_FOLDERS = (_HERE / "tables", _HERE.parents[1] / "benchmarks" / "tables")


# Scores that are no shares, and how the field writes some.
_INDICES = ("nmi", "kappa", "ari")
_NUMBERS = (*_INDICES, "groups_found", "f_loss", "mss", "switch_round", "clusters", "evaluations", "compare_seconds")
_NAMES = {"f_acc": "F_acc", "f_loss": "F_loss", "mss": "MSS", "nmi": "NMI", "kappa": "kappa", "ari": "ARI"}

#: Ways to cluster the data of all clients in one place: k-means, fuzzy c-means, the deep clustering network.
CENTRAL = ("km", "fcm", "dcn")


class BenchError(ValueError):
    """A table that cannot be read or run; the message states which and what to do."""


@dataclass(frozen=True)
class Column:
    """One setting of a table.

    Attributes:
        name: its head.
        settings: configuration keys.
        x: where it lies on the axis of a plot of lines.
        panel: which picture of a plot of lines it belongs to.
        tuned_at: name of the setting that methods are tuned in; its own unless another is named.
        setting: name of the setting, which the columns of several scores share.
        score: key of a run's result, or of what its method noted; ``accuracy@5`` is what it was after round 5.
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
        name: its head.
        settings: configuration keys; they win over the column's.
        paper: the paper's figure in every column, None where it has none.
        tune: keys that are tuned; ``settings`` hold what a quick table uses for them.
        columns: names of the columns that it has; empty: all.
        central: one of :data:`CENTRAL`, by which the data of all clients are clustered; empty: it is a federated run.
    """

    name: str
    settings: Settings
    paper: tuple[float | None, ...]
    tune: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    central: str = ""


@dataclass(frozen=True)
class Table:
    """A table: every row in every column on every seed is a run.

    Attributes:
        name: of its file.
        title: what it shows.
        source: paper and table.
        reference: hyper-parameters of the models, trained centrally for each group, to which F_acc and F_loss compare;
            empty: there are none.
        plot: one of :data:`PLOTS`.
        axis: what ``x`` is.
        seeds: of the runs.
        settings: configuration keys of every run.
        columns: its columns.
        rows: its rows.
        grid: values to try for each key that a row tunes.
        tuning_settings: keys of a tuning run; they set clients aside, whose data stand in for the test set.
        tuning_seeds: seeds of tuning runs, other than ``seeds``.
        quick: whether this is the short version.
        overrides: keys that win over all others, of the short version.
        like: name of the table whose runs it shares; its own, unless another is named.
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

    def column(self, setting: str) -> Column:
        """The first column of ``setting``."""
        return next(column for column in self.columns if column.setting == setting)

    def pairs(self) -> list[tuple[Row, Column]]:
        """Every row with every setting that it has, by the setting's first column: scores share their runs."""
        columns = {column.setting: column for column in reversed(self.columns)}
        first = [column for column in self.columns if columns[column.setting] is column]
        return [(r, c) for r in self.rows for c in first if not r.columns or c.name in r.columns]

    def candidates(self, row: Row) -> list[dict[str, Any]]:
        """Every combination of the values that ``row`` tunes."""
        values = [self.grid[key] for key in row.tune]
        return [dict(zip(row.tune, combination, strict=True)) for combination in itertools.product(*values)]


def score_name(score: str) -> str:
    """A score as people write it."""
    key, number = score_at(score)
    return _NAMES.get(key, key.replace("_", " ")) + ("" if number is None else f" after round {number}")


def decimals(column: Mapping[str, Any]) -> int:
    """Digits behind the point of a score, as a document's column has it: papers print NMI as 0.7179."""
    is_index = score_at(column.get("score", ""))[0] in _INDICES
    return 4 if is_index and not column.get("percent", False) else 2


def score_at(score: str) -> tuple[str, int | None]:
    """A score's key, and the round that it is of; None is the end."""
    key, at, number = score.partition("@")
    return key, int(number) if at else None


def table_names() -> list[str]:
    """Tables that come with Coterie."""
    return sorted(path.stem for folder in _FOLDERS for path in folder.glob("*.toml"))


def read_table(
    name: str, *, quick: bool = False, seeds: Sequence[int] = (), rows: Sequence[str] = (), columns: Sequence[str] = ()
) -> Table:
    """The table called ``name``, or in the TOML file ``name``.

    Args:
        name: see :func:`table_names`.
        quick: the short version that its file describes: fewer cells, no tuning.
        seeds: in place of the file's.
        rows: names of the rows to run; empty: all.
        columns: settings to run, or words with which their names begin; empty: all.

    Raises:
        BenchError: there is no such table, or its file is wrong.
    """
    path = _path(name)
    try:
        raw = _raw(path)
        raw["rows"] = [row for row in raw["rows"] if quick or not row.get("quick-only")]
        table = _table(path.stem, raw)
    except (KeyError, TypeError, ValueError) as error:
        raise BenchError(f"{path} does not describe a table: {error!r}") from error
    if quick:
        table = _quick(table, raw.get("quick", {}))
    if columns:
        table = _narrowed(table, columns)
    known = [row.name for row in table.rows]
    for row in rows:
        if row not in known:
            raise BenchError(f"{table.name} has no row {row!r}; its rows are {', '.join(map(repr, known))}")
    kept = tuple(row for row in table.rows if not rows or row.name in rows)
    return replace(table, seeds=tuple(seeds) or table.seeds, rows=kept)


def _path(name: str) -> Path:
    """The file of the table ``name``."""
    path = (
        Path(name)
        if name.endswith(".toml")
        else next((folder / f"{name}.toml" for folder in _FOLDERS if (folder / f"{name}.toml").is_file()), None)
    )
    if path is None or not path.is_file():
        known = table_names()
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.3)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise BenchError(f"there is no table {name!r}{hint}; there are {', '.join(known)}, or a TOML file of your own.")
    return path


def _raw(path: Path) -> dict[str, Any]:
    """The contents of a file; a table that is like another takes what it lacks from that one."""
    own = tomllib.loads(path.read_text())
    if "like" not in own:
        return own
    other, rows = _raw(_path(own["like"])), {row["name"]: row for row in own["rows"]}
    both: dict[str, Any] = {**other, **own}
    both["rows"] = [{**row, "paper": [], **rows.get(row["name"], {})} for row in other["rows"]]
    return both


def _table(name: str, raw: Mapping[str, Any]) -> Table:
    columns, tuning = _columns_of(raw), raw.get("tuning", {})
    rows = tuple(_row_of(row, raw, [column.name for column in columns]) for row in raw["rows"])
    _check_names(raw, columns, rows)
    if set(raw["seeds"]) & set(tuning.get("seeds", ())):
        raise ValueError("tuning must not see the seeds that are reported")
    if tuning and not tuning["set"].get("validation-clients"):
        raise ValueError("tuning needs validation-clients: test data must not choose anything")
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
    )


def _columns_of(raw: Mapping[str, Any]) -> tuple[Column, ...]:
    """Return a column per setting and score."""
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
    """Return a row, with the paper's figures in the order of the table's columns."""
    own = tuple(row.get("columns", ()))
    figures = [None if figure == "-" else float(figure) for figure in row.get("paper", [])]
    width = len(own) or len(names)
    if len(figures) not in (0, width):
        raise ValueError(f"row {row['name']!r} has {len(figures)} figures of the paper for {width} columns")
    by_column = dict(zip(own or names, figures, strict=False))
    paper = tuple(by_column.get(name) for name in names)
    return Row(row["name"], _settings_of(row, raw), paper, tuple(row.get("tune", ())), own, row.get("central", ""))


def _check_names(raw: Mapping[str, Any], columns: Sequence[Column], rows: Sequence[Row]) -> None:
    """Raise ValueError for a name that the table does not define, or a plot that cannot draw it."""
    names, settings = [column.name for column in columns], [column.setting for column in columns]
    grid, plot = raw.get("tuning", {}).get("grid", {}), raw.get("plot", "dots")
    unknown = [column.tuned_at for column in columns if column.tuned_at not in settings]
    unknown += [name for row in rows for name in row.columns if name not in names]
    unknown += [key for row in rows for key in row.tune if key not in grid]
    unknown += [row.central for row in rows if row.central not in ("", *CENTRAL)]
    if unknown or plot not in PLOTS:
        raise ValueError(f"unknown column, tuned key, central or plot: {', '.join(unknown) or plot}")
    if plot in _OVER_ROUNDS and all("@" in column.score for column in columns):
        raise ValueError(f"plot {plot!r} draws a score over rounds: name one without '@'")
    if plot == "splits" and len(raw["columns"]) > 1:
        raise ValueError("plot 'splits' draws one setting: give one column")


def _settings_of(part: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    """What a row or column sets, and the set that it names."""
    common: dict[str, Any] = raw["sets"][part["with"]] if "with" in part else {}
    return {**common, **part.get("set", {})}


def _head(setting: str, score: str, scores: int) -> str:
    """Of a column: the setting where there are several, the score where there are several."""
    return ": ".join([*[setting] * bool(setting), *[score_name(score)] * (scores > 1)])


def _quick(table: Table, raw: Mapping[str, Any]) -> Table:
    """The table with the columns, rows, seeds and settings that its ``[quick]`` names, and without tuning."""
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


def _narrowed(table: Table, words: Sequence[str]) -> Table:
    """The table with the settings that ``words`` name, or whose names begin so."""
    known = list(dict.fromkeys(column.setting for column in table.columns))
    keep = set()
    for word in words:
        found = {word} & set(known) or {setting for setting in known if setting.startswith(word)}
        if not found:
            raise BenchError(f"{table.name} has no column {word!r}; its columns are {', '.join(map(repr, known))}")
        keep |= found
    for column in table.columns:
        if column.setting in keep and column.tuned_at not in keep:
            raise BenchError(f"{column.setting!r} is tuned in {column.tuned_at!r}: choose that column too")
    return _among(table, keep)


def _among(table: Table, settings: Collection[str]) -> Table:
    """The table with the columns of some settings."""
    places = [i for i, column in enumerate(table.columns) if column.setting in settings]
    return replace(
        table,
        columns=tuple(table.columns[i] for i in places),
        rows=tuple(replace(row, paper=tuple(row.paper[i] for i in places)) for row in table.rows),
    )
