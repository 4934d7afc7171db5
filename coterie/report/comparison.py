"""Comparison of runs: those that are equal but for the seed are repetitions, with mean and standard deviation."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.fields import finite
from coterie.report import formats
from coterie.report.configuration import differing_settings, used_settings
from coterie.report.runs import ReportError, Run, read_run
from coterie.results import Diagnostics

#: Scores of a comparison, with their headings; those of records only where runs cluster records.
SCORES = {
    "accuracy": "accuracy",
    "worst_group_accuracy": "worst group",
    "clustering_accuracy": "clustering accuracy",
    "epsilon": "ε",
    "seconds": "seconds",
}
RECORD_SCORES = {"accuracy": "accuracy", "nmi": "NMI", "kappa": "kappa", "ari": "adjusted Rand"}
_SHARES = ("accuracy", "worst_group_accuracy", "clustering_accuracy")
OUTSIDE = "* exact, from clients' data without noise: outside the guarantee"


@dataclass(frozen=True)
class Statistic:
    """Mean and sample standard deviation (n - 1) of a score over repetitions.

    Attributes:
        mean: None without values.
        std: None with fewer than two values, or if the mean is infinite.
        n: number of values.
    """

    mean: float | None
    std: float | None
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Statistic:
        """Summarise values; the mean is infinite if one of them is not finite."""
        if not values:
            return cls(None, None, 0)
        if not all(map(math.isfinite, values)):
            return cls(math.inf, None, len(values))
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


@dataclass(frozen=True)
class Row:
    """Repetitions of one configuration.

    Attributes:
        settings: the values of the settings that differ between rows; None if the runs do not use the setting.
        runs: the finished runs, in the given order.
        scores: statistics by the names of :data:`SCORES` and :data:`RECORD_SCORES`.
    """

    settings: Mapping[str, Any]
    runs: tuple[Run, ...]
    scores: Mapping[str, Statistic]

    @property
    def label(self) -> str:
        """The settings as text; method and data if none differs."""
        told = ", ".join(f"{key} = {formats.setting(value)}" for key, value in self.settings.items())
        return told or f"{self.runs[0].strategy} on {self.runs[0].dataset}"

    @property
    def seeds(self) -> list[int | None]:
        """The seed of each run; None for secret randomness."""
        return [_seed(run) for run in self.runs]

    @property
    def exact(self) -> bool:
        """Whether the scores include exact ones of private runs, which the guarantee does not cover."""
        return any(run.exact for run in self.runs)

    @property
    def noisy(self) -> bool:
        """Whether the accuracy is a private release."""
        return any(run.noisy for run in self.runs)


@dataclass(frozen=True)
class Comparison:
    """Rows of repetitions, and what is missing in them.

    Attributes:
        settings: names of the settings that differ between rows.
        scores: names of the scores, with their headings.
        rows: one per configuration.
        left_out: (run, reason) of runs that are in no row: unfinished or damaged.
        notes: (run, remark) of runs in rows.
    """

    settings: tuple[str, ...]
    scores: Mapping[str, str]
    rows: tuple[Row, ...]
    left_out: tuple[tuple[str, str], ...]
    notes: tuple[tuple[str, str], ...]

    def document(self) -> dict[str, Any]:
        """Return it as JSON values; an infinite mean is null."""
        return {
            "settings": list(self.settings),
            "rows": [
                {
                    "settings": dict(row.settings),
                    "runs": [str(run.path) for run in row.runs],
                    "seeds": row.seeds,
                    "repetitions": len(row.runs),
                    **{
                        name: {"mean": finite(statistic.mean), "std": statistic.std, "n": statistic.n}
                        for name, statistic in row.scores.items()
                    },
                    "certified": [run.certified for run in row.runs],
                    "outside_guarantee": [name for name in row.scores if row.exact and name in Diagnostics.stored()],
                }
                for row in self.rows
            ],
            "left_out": [{"run": run, "reason": reason} for run, reason in self.left_out],
            "notes": [{"run": run, "note": note} for run, note in self.notes],
        }

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Return headings and rows for a reader; an asterisk marks exact scores."""
        heads = ["", *self.settings, "runs", *self.scores.values()]
        rows = []
        for number, row in enumerate(self.rows, 1):
            values = [formats.setting(row.settings[name]) for name in self.settings]
            rows.append([str(number), *values, str(len(row.runs)), *(score_text(row, name) for name in self.scores)])
        return heads, rows


def read_runs(paths: Sequence[Path]) -> tuple[list[Run], list[tuple[str, str]]]:
    """Read several run folders; return the readable ones, and (path, reason) of the others.

    Raises:
        ReportError: a run is given twice, or none can be read.
    """
    seen: dict[Path, Path] = {}
    runs, damaged = [], []
    for path in paths:
        if path.resolve() in seen:
            raise ReportError(f"{path} is the same run as {seen[path.resolve()]}; name each run once")
        seen[path.resolve()] = path
        try:
            runs.append(read_run(path))
        except ReportError as error:
            damaged.append((str(path), str(error)))
    if not runs:
        raise ReportError(damaged[0][1] if damaged else "no runs given; give at least one run folder")
    return runs, damaged


def compare(runs: Sequence[Run], damaged: Sequence[tuple[str, str]] = ()) -> Comparison:
    """Compare runs, at least one; `damaged` are (path, reason) of runs that could not be read."""
    finished = [run for run in runs if run.finished]
    settings = differing_settings([run.config for run in finished])
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in finished:
        used = used_settings(run.config)
        groups.setdefault(tuple(used.get(key) for key in settings), []).append(run)
    scores = SCORES
    if any(run.clusters_records for run in runs):
        records = all(run.clusters_records for run in runs)
        scores = {**RECORD_SCORES, "epsilon": "ε", "seconds": "seconds"} if records else {**SCORES, **RECORD_SCORES}
    scored = [run for run in runs if run.scores.accuracy is not None and not run.clusters_records]
    if scored:
        scores = {**scores, "accuracy": " or ".join(dict.fromkeys(run.score_name for run in scored))}
    rows = [
        Row(
            dict(zip(settings, values, strict=True)),
            tuple(members),
            {
                name: Statistic.of([value for run in members if (value := _score(run, name)) is not None])
                for name in scores
            },
        )
        for values, members in groups.items()
    ]
    left_out = []
    for run in runs:
        if not run.finished:
            planned = f" of {run.config['rounds']}" if run.config.get("rounds") is not None else ""
            left_out.append((str(run.path), f"unfinished: {len(run.rounds)}{planned} rounds"))
    notes = []
    for row in rows:
        notes += [
            (str(run.path), f"no accuracy: evaluate = {run.config.get('evaluate', 'unknown')}")
            for run in row.runs
            if run.scores.accuracy is None
        ]
        first: dict[int, Run] = {}
        for run in row.runs:
            seed = _seed(run)
            if seed is not None and seed in first:
                notes.append((str(run.path), f"seed {seed} as in {first[seed].path}: no independent repetition"))
            elif seed is not None:
                first[seed] = run
    return Comparison(tuple(settings), scores, tuple(rows), (*left_out, *damaged), tuple(notes))


def score_text(row: Row, name: str) -> str:
    """Format mean ± standard deviation of a score of a row."""
    statistic = row.scores[name]
    if statistic.mean is None:
        return formats.MISSING
    if name == "seconds":
        text = f"{statistic.mean:.2f}"
    else:
        text = (formats.percent if name in _SHARES else formats.epsilon if name == "epsilon" else formats.index)(
            statistic.mean
        )
    if statistic.std is not None:
        spread = 100 * statistic.std if name in _SHARES else statistic.std
        places = 1 if name in _SHARES else 2 if name in ("epsilon", "seconds") else 4
        number, _, unit = text.partition(formats.NBSP)
        text = f"{number} ± {spread:.{places}f}" + (formats.NBSP + unit if unit else "")
    if statistic.n < len(row.runs):
        text += f" ({statistic.n} of {len(row.runs)})"
    if row.noisy and name == "accuracy":
        return f"{text} (noisy)"
    return text + "*" * (row.exact and name in Diagnostics.stored())


def _score(run: Run, name: str) -> float | None:
    if name == "epsilon":
        return run.epsilon
    value = run.outcome.seconds_total if name == "seconds" else getattr(run.scores, name)
    return finite(value)


def _seed(run: Run) -> int | None:
    seed = run.config.get("seed")
    return seed if isinstance(seed, int) else None
