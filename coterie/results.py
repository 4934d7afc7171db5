"""What a run measures, as its folder stores it. Each file is written and read by one type.

====================  ============================================================
metrics.jsonl         :meth:`RoundRecord.to_json`, one line per round
diagnostics.jsonl     :meth:`RoundRecord.exact`, one line per evaluation
result.json           :class:`Outcome`
diagnostics.json      :class:`Diagnostics`
====================  ============================================================

The types decide what the privacy guarantee covers: exact scores are fields of :class:`Diagnostics`, and so is every
value that no other type declares.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from coterie.fields.json_record import Record, plain
from coterie.files import FileError, read_bytes, read_object, read_text, write_json
from coterie.tasks import Performance

CONFIG, METRICS, DIAGNOSTICS = "config.toml", "metrics.jsonl", "diagnostics.jsonl"
RESULT, LAST_DIAGNOSTICS = "result.json", "diagnostics.json"
_OUTSIDE = "exact scores, computed from clients' data without noise: the privacy guarantee does not cover them"
# Begin the names of scores with a value for each client.
_OF_CLIENTS = "client_"
_TRAFFIC = ("messages_down", "messages_up", "bytes_down", "bytes_up")

Numbers = tuple[float, ...]
Integers = tuple[int, ...]
R = TypeVar("R", bound="Record")


@dataclass(frozen=True, kw_only=True)
class Traffic(Record):
    """Messages and bytes of arrays to and from clients; None where participation is secret."""

    messages_down: int | None = None
    messages_up: int | None = None
    bytes_down: int | None = None
    bytes_up: int | None = None

    @staticmethod
    def total(records: Iterable[Traffic]) -> dict[str, int]:
        """Return the sums over records by field; only of fields that all records have."""
        counts = {name: [getattr(record, name) for record in records] for name in _TRAFFIC}
        return {name: sum(values) for name, values in counts.items() if values and None not in values}


@dataclass(frozen=True, kw_only=True)
class ScoreEstimates(Record):
    """Metrics that a released histogram of scores gives, with what its noise adds: covered by the guarantee.

    Attributes:
        roc_auc, average_precision, sensitivity_at_90, brier: as in :class:`Performance`, of all evaluated records, or
            of those that clipping leaves of a client at client level.
        positive_share: share of the positive class.
        errors: standard error of each by the noise alone; that of a sample of records comes on top.
        calibration: mean probability, share of the positive class and share of all records, by group of bins.
        classes: number of classes; of more than two, metrics are means of each class against all others.
    """

    roc_auc: float
    average_precision: float
    sensitivity_at_90: float
    brier: float
    positive_share: float
    errors: Mapping[str, float] = field(default_factory=dict)
    calibration: tuple[Any, ...] = ()
    classes: int = 2


@dataclass(frozen=True, kw_only=True)
class Diagnostics(Performance):  # large: one field per value of a record
    """Exact scores of an evaluation, which the privacy guarantee does not cover; None where not computed.

    The metrics of :class:`Performance` are those of a simulation's clients, each with the model of its cluster.

    Attributes:
        about: that the guarantee does not cover the scores.
        round: the evaluated round.
        accuracy: mean over clients, in [0, 1]; of records where the method clusters records.
        group_accuracy: one accuracy per true group.
        worst_group_accuracy: the lowest of them.
        clustering_accuracy: share of clients in the cluster that is matched to their group.
        groups_found: number of groups that have a cluster of their own.
        groups: number of true groups.
        evaluated_clients: number of clients, drawn at random; None: all.
        class_names: names of the classes, by the schema of the tables.
        evaluated_records: number of records of the metrics, counted once for each client that has them.
        nmi, kappa, ari: agreement of clusters with groups, or with classes.
        classes: number of classes, where the method clusters records.
        confusion: (clusters, groups or classes) counts; flat in diagnostics.jsonl.
        minority_accuracy, majority_accuracy: accuracy of the one smallest group, and of the others.
        worst_client_accuracy: the lowest accuracy of a client.
        max_disparity: largest difference between the accuracies of two clients.
        personal_accuracy, personal_worst_group_accuracy, personal_worst_client_accuracy: the same of the models that
            clients fitted to their own records.
        alone_accuracy, alone_worst_client_accuracy: mean and lowest accuracy of models that clients train alone.
        alone_clients, alone_seconds: number of these clients, and the time that it took.
        client_id: the evaluated clients; the next fields have a value for each.
        client_accuracy, client_cluster, client_group, client_loss: of their models on their data.
        client_personal_accuracy: of the models that they fitted to their own records.
        other: further scores, such as those of a user's aggregation function.
    """

    elsewhere: ClassVar[frozenset[str]] = frozenset({"other"})

    about: str | None = None
    round: int | None = None
    accuracy: float | None = None
    group_accuracy: Numbers | None = None
    worst_group_accuracy: float | None = None
    clustering_accuracy: float | None = None
    groups_found: int | None = None
    groups: int | None = None
    evaluated_clients: int | None = None
    class_names: tuple[str, ...] | None = None
    evaluated_records: int | None = None
    nmi: float | None = None
    kappa: float | None = None
    ari: float | None = None
    classes: int | None = None
    confusion: tuple[Any, ...] | None = None
    minority_accuracy: float | None = None
    majority_accuracy: float | None = None
    worst_client_accuracy: float | None = None
    max_disparity: float | None = None
    personal_accuracy: float | None = None
    personal_worst_group_accuracy: float | None = None
    personal_worst_client_accuracy: float | None = None
    alone_accuracy: float | None = None
    alone_worst_client_accuracy: float | None = None
    alone_clients: int | None = None
    alone_seconds: float | None = None
    client_id: Integers | None = None
    client_accuracy: tuple[float | None, ...] | None = None
    client_cluster: Integers | None = None
    client_group: Integers | None = None
    client_loss: Numbers | None = None
    client_personal_accuracy: Numbers | None = None
    other: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, scores: Mapping[str, Any]) -> Self:
        """Sort computed scores into the fields."""
        stored = {name: value for name, value in scores.items() if name in cls.stored()}
        return cls(**stored, other={name: value for name, value in scores.items() if name not in stored})

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Read stored scores.

        Raises:
            ValueError: a value has another type.
        """
        other = {name: value for name, value in document.items() if name not in cls.stored()}
        return replace(super().from_json(document), other=other)

    def to_json(self) -> dict[str, Any]:
        """Return all scores as JSON values."""
        return {**super().to_json(), **plain(self.other)}

    def last(self, round: int | None = None) -> Diagnostics:
        """Return the content of diagnostics.json: the scores of this class, not those that a user's function adds."""
        return replace(self, about=_OUTSIDE, round=round, other={})

    def without_clients(self) -> Diagnostics:
        """Return the scores without those that have a value for each client."""
        other = {name: value for name, value in self.other.items() if not name.startswith(_OF_CLIENTS)}
        dropped: dict[str, Any] = {name: None for name in self.stored() if name.startswith(_OF_CLIENTS)}
        return replace(self, **dropped, other=other)


@dataclass(frozen=True, kw_only=True)
class RoundRecord(Traffic):  # large: one field per value of a record
    """One round. All fields but `scores` are released, charged, or no secret.

    Attributes:
        round: the round, from 1.
        epsilon: privacy loss up to and including this round; infinite without privacy.
        epsilon_rdp: the same by the RDP accountant.
        histogram: released noisy size of each cluster; None when none were released.
        clip_norm: the clip norm, where it adapts.
        reseeded: pairs (from, to): after this round, model `to` became a perturbed copy of `from`.
        notes: notes of the method.
        seconds: duration.
        seconds_total: duration of the run so far, without interruptions.
        clients_present: number of connected clients.
        clients_labelled: number of clients that labelled their records.
        replies: `asked`, `accepted`, and `dropped` by reason.
        accuracy: private noisy mean accuracy; None where the round has none.
        score_histogram: released noisy counts of held-out records by label and bin of the score; None without.
        score_noise: standard deviation of the noise of a count, by label.
        scores: exact scores.
    """

    always: ClassVar[frozenset[str]] = frozenset({"epsilon", "epsilon_rdp", "reseeded"})
    elsewhere: ClassVar[frozenset[str]] = frozenset({"scores"})

    round: int
    epsilon: float = math.inf
    epsilon_rdp: float = math.inf
    histogram: Numbers | None = None
    clip_norm: float | None = None
    reseeded: tuple[Integers, ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)
    seconds: float | None = None
    seconds_total: float | None = None
    clients_present: int | None = None
    clients_labelled: int | None = None
    replies: Mapping[str, Any] | None = None
    accuracy: float | None = None
    score_histogram: Numbers | None = None
    score_noise: Numbers | None = None
    scores: Diagnostics = Diagnostics()

    @classmethod
    @cache
    def server_keys(cls, noisy: bool = False) -> frozenset[str]:
        """Return the names of values that the server computes; ``noisy``: the accuracy is a private release."""
        return frozenset(cls.stored()) - (set() if noisy else {"accuracy"})

    @classmethod
    def of(cls, line: Mapping[str, Any], *, noisy: bool = False) -> RoundRecord:
        """Sort the metrics of a round; what is not known to be released is an exact score."""
        released = {name: value for name, value in line.items() if name in cls.server_keys(noisy)}
        return cls(**released, scores=Diagnostics.of({n: value for n, value in line.items() if n not in released}))

    @staticmethod
    def joined(released: Iterable[Mapping[str, Any]], exact: Iterable[Mapping[str, Any]]) -> list[RoundRecord]:
        """Read the lines of both files, by round; the last line of a round counts, and so do only released rounds.

        Raises:
            ValueError: a value is missing or has another type.
        """
        scores = {line.get("round"): Diagnostics.from_json(line) for line in exact}
        rounds = {read.round: read for read in map(RoundRecord.from_json, released)}
        return [
            replace(rounds[number], scores=replace(scores.get(number, Diagnostics()), round=None))
            for number in sorted(rounds)
        ]

    @property
    def mean_accuracy(self) -> float | None:
        """Mean accuracy of the clients: noisy, otherwise exact."""
        return self.scores.accuracy if self.accuracy is None else self.accuracy

    @property
    def origins(self) -> Integers:
        """After this round, the previous index of each model, -1 for a copy; empty if no search took place."""
        return tuple(self.notes.get("origins") or ())

    @property
    def dropped(self) -> int | None:
        """Number of dropped replies; None where it is secret."""
        return None if self.replies is None else sum(self.replies["dropped"].values())

    def exact(self) -> dict[str, Any]:
        """Return the line of diagnostics.jsonl; empty without scores. Values of single clients are not stored."""
        scores = self.scores.without_clients().to_json()
        return {"round": self.round, **scores} if scores else {}


@dataclass(frozen=True, kw_only=True)
class Site(Record):
    """A client whose cluster may be published."""

    client: int
    cluster: int | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome(Traffic):  # large: one field per value of a record
    """The result of a run: released values, cost and time.

    Attributes:
        strategy, dataset, seed, evaluate: as configured; no seed means secret randomness.
        accuracy: private noisy mean accuracy; None without one.
        estimates: metrics that the released histogram of scores gives; None without one, or if noise hides it.
        clients_labelled: number of clients that labelled their records.
        notes: the latest notes of the method.
        epsilon, delta: the certified guarantee; None: no bound.
        epsilon_rdp: ``epsilon`` by the RDP accountant.
        certified: whether the guarantee is certified.
        rounds: number of completed rounds.
        skipped_rounds: rounds that were charged, released nothing, and are never repeated, because of a crash or
            because too few clients stayed.
        charges: number of charges.
        seconds_total: duration, without interruptions.
        seconds_training: the part of it in rounds.
        seconds_per_round: mean over rounds.
        peak_rss_mb: peak memory.
        out: the run folder.
        sites: the clients whose cluster may be published or that have a name.
        diagnostics: exact scores of the last evaluation; None without any.
    """

    always: ClassVar[frozenset[str]] = frozenset(
        {"seed", "notes", "epsilon", "epsilon_rdp", "delta", "seconds_per_round"}
    )
    elsewhere: ClassVar[frozenset[str]] = frozenset({"diagnostics"})

    strategy: str | None = None
    dataset: str | None = None
    seed: int | None = None
    evaluate: str | None = None
    accuracy: float | None = None
    estimates: ScoreEstimates | None = None
    clients_labelled: int | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)
    epsilon: float | None = None
    epsilon_rdp: float | None = None
    delta: float | None = None
    certified: bool = False
    rounds: int | None = None
    skipped_rounds: Integers = ()
    charges: int | None = None
    seconds_total: float | None = None
    seconds_training: float | None = None
    seconds_per_round: float | None = None
    peak_rss_mb: float | None = None
    out: str | None = None
    sites: tuple[Site, ...] = ()
    diagnostics: Diagnostics | None = None

    @classmethod
    def read(cls, folder: str | Path) -> Outcome | None:
        """Read result.json and diagnostics.json of a run folder; None if the run has no result.

        Raises:
            FileError: a file is damaged.
        """
        outcome = _read_file(cls, Path(folder) / RESULT)
        exact = _read_file(Diagnostics, Path(folder) / LAST_DIAGNOSTICS)
        return outcome and replace(outcome, diagnostics=exact)

    def write(self, folder: Path) -> None:
        """Write result.json, and before it diagnostics.json if there are exact scores.

        Raises:
            OSError: a file cannot be written.
        """
        if self.diagnostics is not None:
            write_json(folder / LAST_DIAGNOSTICS, self.diagnostics.to_json())
        write_json(folder / RESULT, self.to_json())

    @property
    def document(self) -> dict[str, Any]:
        """The result, with the exact scores or None as "diagnostics"; JSON-ready."""
        return {**self.to_json(), "diagnostics": self.diagnostics and self.diagnostics.to_json()}

    @property
    def values(self) -> dict[str, Any]:
        """Notes, scores and results by name; JSON-ready."""
        exact = {} if self.diagnostics is None else self.diagnostics.to_json()
        return {**plain(self.notes), **self.to_json(), **exact}


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.toml of a run folder: the tables "config", "versions" and "machine".

    Raises:
        FileError: it cannot be read, or the folder is of an earlier version.
    """
    path = folder / CONFIG
    try:
        tables = tomllib.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path} is not valid TOML: {error}") from None
    if not isinstance(tables.get("config"), dict):
        raise FileError(f"{path} has no [config] table, so {folder} is not a run folder")
    version = str(tables.get("versions", {}).get("coterie", ""))
    if version.startswith("0.1."):
        raise FileError(f"{folder} was written by Coterie {version}; this version reads folders of 0.2 and later")
    return tables


def read_rounds(folder: Path) -> tuple[list[RoundRecord], int]:
    """Read the rounds of a run folder in order, and the number of lines that cannot be read.

    Raises:
        FileError: a file cannot be read.
    """
    lines: dict[str, list[dict[str, Any]]] = {METRICS: [], DIAGNOSTICS: []}
    unreadable = 0
    for name, readable in lines.items():
        file = folder / name
        text = read_bytes(file).decode("utf-8", errors="replace") if file.exists() else ""
        for line in filter(str.strip, text.splitlines()):
            try:
                document = json.loads(line)
                RoundRecord.joined([document], [document])
                readable.append(document)
            except (ValueError, AttributeError, RecursionError):
                unreadable += 1
    return RoundRecord.joined(*lines.values()), unreadable


def _read_file(record_type: type[R], path: Path) -> R | None:
    if not path.exists():
        return None
    try:
        return record_type.from_json(read_object(path))
    except ValueError as error:
        raise FileError(f"{path} cannot be read: {error}") from None
