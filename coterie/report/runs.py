"""Read a run folder: settings, metrics of each round, and the privacy certificate."""

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coterie.files import FileError, read_bytes, read_object
from coterie.report.evidence import Node, read_tree
from coterie.settings import with_current_names

_OUTCOME = (
    "accuracy",
    "nmi",
    "kappa",
    "ari",
    "worst_group_accuracy",
    "group_accuracy",
    "clustering_accuracy",
    "groups_found",
    "evaluated_clients",
    "confusion",
    "epsilon",
    "delta",
    "rounds",
    "seconds_total",
    "seconds_training",
    "seconds_per_round",
)


# Exact scores, which older versions wrote to `result.json`.
_EXACT = (
    "accuracy",
    "worst_group_accuracy",
    "group_accuracy",
    "clustering_accuracy",
    "groups_found",
    "groups",
    "evaluated_clients",
    "nmi",
    "kappa",
    "ari",
    "classes",
    "confusion",
    "minority_accuracy",
    "majority_accuracy",
    "worst_client_accuracy",
    "max_disparity",
    "client_accuracy",
    "client_group",
    "client_loss",
    "f_acc",
    "f_loss",
)

_RESTORE = "; restore it from a copy, or delete it if it is a result: the run writes its results again when resumed"
_TRAFFIC = ("messages_down", "messages_up", "bytes_down", "bytes_up")


class ReportError(ValueError):
    """No report of a run folder is possible; the message names the path and what to do."""


def clusters_records(strategy: object) -> bool:
    """Whether the clusters of a strategy are of records instead of clients."""
    from coterie.strategies.registry import STRATEGIES

    return strategy in STRATEGIES and STRATEGIES[str(strategy)].produces == "labels"


@dataclass(frozen=True)
class Round:
    """One line of `metrics.jsonl`, with that of `diagnostics.jsonl` for the same round.

    Attributes:
        number: the round, from 1.
        seconds: duration.
        epsilon: privacy spent up to and including this round; infinite without privacy.
        histogram: the released noisy size of each of the k clusters, or None when none were released.
        accuracy: mean accuracy over clients in [0, 1]; None where the round was not evaluated, as below.
        worst_group_accuracy: the lowest of `group_accuracy`.
        group_accuracy: one accuracy per true group.
        clustering_accuracy: share of clients in the cluster matched to their group.
        groups_found: how many groups have a cluster of their own.
        reseeded: pairs (from, to): after this round, model `to` became a perturbed copy of `from`.
        origins: after this round, the previous index of each model, -1 for a copy; empty if no search took place.
        notes: notes of the method for this round.
        traffic: `messages_down`, `messages_up`, `bytes_down` and `bytes_up`; empty if not recorded.
    """

    number: int
    seconds: float | None = None
    epsilon: float = math.inf
    histogram: tuple[float, ...] | None = None
    accuracy: float | None = None
    worst_group_accuracy: float | None = None
    group_accuracy: tuple[float, ...] | None = None
    clustering_accuracy: float | None = None
    groups_found: int | None = None
    reseeded: tuple[tuple[int, int], ...] = ()
    origins: tuple[int, ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)
    traffic: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """Contents of a run folder, finished or not.

    Attributes:
        path: the folder.
        config: the resolved settings, by the last part of their names.
        versions: name to version.
        machine: device, cores, git commit.
        rounds: the finished rounds in order; the last line of a round that was repeated after a crash.
        certificate: `privacy.json`; empty if there is none.
        result: `result.json`; None if the run is unfinished.
        diagnostics: exact scores, `diagnostics.json`; None if there are none.
        unreadable_lines: number of incomplete lines of `metrics.jsonl` and `diagnostics.jsonl`, which are skipped.
    """

    path: Path
    config: Mapping[str, Any]
    versions: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    rounds: tuple[Round, ...] = ()
    certificate: Mapping[str, Any] = field(default_factory=dict)
    result: Mapping[str, Any] | None = None
    diagnostics: Mapping[str, Any] | None = None
    unreadable_lines: int = 0

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.path.resolve().name

    @property
    def strategy(self) -> str:
        """The configured strategy."""
        return str(self.config.get("strategy", "unknown strategy"))

    @property
    def dataset(self) -> str:
        """The configured data set."""
        return str(self.config.get("dataset", "unknown data"))

    @property
    def clusters_records(self) -> bool:
        """Whether the run clusters records, in one round, from points that clients send."""
        return clusters_records(self.strategy)

    @property
    def clustered(self) -> bool:
        """Whether the method has clusters of clients; True for methods that this version does not have."""
        from coterie.strategies.registry import STRATEGIES

        method = STRATEGIES.get(self.strategy)
        return method is None or method.clustered

    @property
    def finished(self) -> bool:
        """Whether the run wrote its result."""
        return self.result is not None

    @property
    def unit(self) -> str:
        """Privacy unit: `client`, `record` or `none`."""
        return str(self.certificate.get("unit") or self.config.get("privacy-unit") or "none")

    @property
    def noisy(self) -> bool:
        """Whether accuracies are private releases, limited to the noisy mean over all clients."""
        return self.config.get("evaluate") == "private"

    @property
    def exact(self) -> bool:
        """Whether a private run also has exact scores, which the guarantee does not cover."""
        return self.unit != "none" and not self.noisy and self.outcome["accuracy"] is not None

    @property
    def certified(self) -> bool:
        """Whether the run ended with a certified guarantee."""
        return self.unit != "none" and self.finished and bool(self.certificate.get("certified"))

    @property
    def epsilon(self) -> float:
        """Privacy loss: from the certificate of a finished run, otherwise the loss so far."""
        if self.unit == "none":
            return math.inf
        if not self.finished:
            return self.rounds[-1].epsilon if self.rounds else 0.0
        value = self.certificate.get("epsilon", self.outcome["epsilon"])
        return math.inf if value is None else float(value)

    @property
    def delta(self) -> float | None:
        """The δ of `epsilon`, if known."""
        for value in (self.certificate.get("delta"), self.outcome["delta"], self.config.get("delta")):
            if isinstance(value, int | float):
                return float(value)
        return None

    @property
    def last_round(self) -> int:
        """The last finished round, at least 1."""
        return max((r.number for r in self.rounds), default=1)

    @property
    def accounted(self) -> bool:
        """Whether some round has a finite privacy loss."""
        return any(math.isfinite(r.epsilon) for r in self.rounds)

    @property
    def notes(self) -> Mapping[str, Any]:
        """The latest notes of the method."""
        noted = {key: value for r in self.rounds for key, value in r.notes.items()}
        return noted | ((self.result or {}).get("notes") or {})

    @property
    def tree(self) -> tuple[Node, ...]:
        """Tree of cluster splits in order of birth; empty for methods without splits."""
        return read_tree(self.notes)

    @property
    def traffic(self) -> Mapping[str, int]:
        """Total messages and bytes, down to and up from clients; empty if not recorded."""
        counted = [r.traffic for r in self.rounds if r.traffic]
        return {key: sum(each[key] for each in counted) for key in _TRAFFIC} if counted else {}

    @property
    def outcome(self) -> Mapping[str, Any]:
        """Result and exact scores, None if unknown; scores of the last evaluated round if the run is unfinished."""
        known = dict.fromkeys(_OUTCOME) | {"groups": _count_groups(self.config.get("groups"))}
        if self.result is not None:
            found = {**self.result, **(self.diagnostics or {})}
            return known | {key: value for key, value in found.items() if value is not None}
        last = next((r for r in reversed(self.rounds) if r.accuracy is not None), Round(0))
        seconds = [r.seconds for r in self.rounds if r.seconds is not None]
        return known | {
            "accuracy": last.accuracy,
            "worst_group_accuracy": last.worst_group_accuracy,
            "group_accuracy": last.group_accuracy,
            "clustering_accuracy": last.clustering_accuracy,
            "groups_found": last.groups_found,
            "rounds": len(self.rounds),
            "seconds_training": sum(seconds) if seconds else None,
            "seconds_per_round": sum(seconds) / len(seconds) if seconds else None,
        }


def read_run(path: Path | str) -> Run:
    """Read the run folder `path`; unfinished and interrupted runs are supported.

    Raises:
        ReportError: `path` is not a run folder, or a file is damaged beyond an incomplete line of metrics.
    """
    path = Path(path)
    if not (path / "config.toml").exists():
        what = "has no config.toml" if path.is_dir() else "is not a folder" if path.exists() else "does not exist"
        raise ReportError(f"{path} is not a run folder: it {what}; give a folder written by `coterie run --out`")
    try:
        tables = tomllib.loads(_text(path / "config.toml"))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ReportError(f"{path / 'config.toml'} is not valid TOML: {error}") from error
    if not isinstance(tables.get("config"), dict):
        raise ReportError(f"{path / 'config.toml'} has no [config] table, so {path} is not a run folder")
    lines, unreadable_lines = read_rounds(path)
    outcome = read_outcome(path)
    diagnostics = None if outcome is None else outcome.pop("diagnostics")
    return Run(
        path=path,
        config={name.rpartition(".")[2]: value for name, value in with_current_names(tables["config"]).items()},
        versions=tables.get("versions", {}),
        machine=tables.get("machine", {}),
        rounds=tuple(_parse_round(line) for line in lines),
        certificate=_read_object(path / "privacy.json") or {},
        result=outcome,
        diagnostics=diagnostics,
        unreadable_lines=unreadable_lines,
    )


def _read_object(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        return read_object(path)
    except FileError as error:
        raise ReportError(f"{error}{_RESTORE}") from None


def _bytes(path: Path) -> bytes:
    try:
        return read_bytes(path)
    except FileError as error:
        raise ReportError(f"{error}{_RESTORE}") from None


def _text(path: Path) -> str:
    try:
        return _bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ReportError(f"{path} cannot be read: it is not text ({error.reason}){_RESTORE}") from None


def read_outcome(path: str | Path) -> dict[str, Any] | None:
    """Read `result.json`, with `diagnostics.json` or None as "diagnostics"; None if there is no result.

    Exact scores, which older versions wrote to `result.json`, are removed from it.
    """
    path = Path(path)
    result, exact = _read_object(path / "result.json"), _read_object(path / "diagnostics.json")
    if result is None:
        return None
    released = ("accuracy",) if result.get("evaluate") == "private" else ()
    old = {key: result.pop(key) for key in _EXACT if key in result and key not in released}
    if exact is None and any(value is not None for value in old.values()):
        exact = old
    return {**result, "diagnostics": exact}


def read_rounds(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the lines of all rounds in order, each with its exact scores, and the number of incomplete lines."""
    rounds: dict[int, dict[str, Any]] = {}
    unreadable = 0
    for name in ("metrics.jsonl", "diagnostics.jsonl"):  # older versions wrote all into the first
        file = path / name
        lines = _bytes(file).decode("utf-8", errors="replace").splitlines() if file.exists() else []
        read: dict[int, dict[str, Any]] = {}
        for text in filter(str.strip, lines):
            try:
                line = json.loads(text)
                read[_parse_round(line).number] = line
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
                unreadable += 1
        for number, line in read.items():
            if name == "metrics.jsonl" or number in rounds:  # ignore scores of unfinished rounds
                rounds[number] = rounds.get(number, {}) | line
    return [rounds[number] for number in sorted(rounds)], unreadable


def _parse_round(line: Mapping[str, Any]) -> Round:
    spent, sizes, groups = line.get("epsilon"), line.get("histogram"), line.get("group_accuracy")
    found = line.get("groups_found")
    return Round(
        number=int(line["round"]),
        seconds=_finite(line.get("seconds")),
        epsilon=math.inf if spent is None else float(spent),
        histogram=None if sizes is None else tuple(_or_nan(size) for size in sizes),
        accuracy=_finite(line.get("accuracy")),
        worst_group_accuracy=_finite(line.get("worst_group_accuracy")),
        group_accuracy=None if groups is None else tuple(_or_nan(group) for group in groups),
        clustering_accuracy=_finite(line.get("clustering_accuracy")),
        groups_found=None if found is None else int(found),
        reseeded=tuple((int(source), int(target)) for source, target in line.get("reseeded") or ()),
        origins=tuple(int(origin) for origin in (line.get("notes") or {}).get("origins") or ()),
        notes=dict(line.get("notes") or {}),
        traffic={key: int(line[key]) for key in _TRAFFIC} if all(key in line for key in _TRAFFIC) else {},
    )


def _finite(value: Any) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _or_nan(value: Any) -> float:
    return math.nan if value is None else float(value)


def _count_groups(groups: Any) -> int | None:
    """Count groups: `"4"` means four, `"2:1:1"` three."""
    text = str(groups or "")
    if ":" in text:
        return len(text.split(":"))
    return int(text) if text.isdecimal() else None
