"""Read a run folder: settings, metrics of each round, and the privacy certificate."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from coterie.fields.settings import flat
from coterie.files import FileError, read_object
from coterie.privacy.certificate import epsilon_observers
from coterie.results import CONFIG, Diagnostics, Outcome, RoundRecord, Traffic, read_config, read_rounds
from coterie.tasks.named_tasks import of_metrics

_RESTORE = "; restore it from a copy, or delete it if it is a result: the run writes its results again when resumed"


class ReportError(ValueError):
    """No report of a run folder is possible; the message names the path and what to do."""


def clusters_records(strategy: object) -> bool:
    """Whether the clusters of a strategy are of records instead of clients."""
    from coterie.strategies.registry import STRATEGIES

    return strategy in STRATEGIES and STRATEGIES[str(strategy)].produces == "labels"


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
        result: `result.json` and `diagnostics.json`; None if the run is unfinished.
        unreadable_lines: number of incomplete lines of `metrics.jsonl` and `diagnostics.jsonl`, which are skipped.
    """

    path: Path
    config: Mapping[str, Any]
    versions: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    rounds: tuple[RoundRecord, ...] = ()
    certificate: Mapping[str, Any] = field(default_factory=dict)
    result: Outcome | None = None
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
        return self.unit != "none" and not self.noisy and self.scores.accuracy is not None

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
        value = self.certificate.get("epsilon", self.outcome.epsilon)
        return math.inf if value is None else float(value)

    @property
    def epsilon_observers(self) -> float | None:
        """ε against those who observe which clients take part, of a finished client-level run if it is larger."""
        return epsilon_observers(self.certificate) if self.finished else None

    @property
    def delta(self) -> float | None:
        """The δ of `epsilon`, if known."""
        for value in (self.certificate.get("delta"), self.outcome.delta, self.config.get("delta")):
            if isinstance(value, int | float):
                return float(value)
        return None

    @property
    def last_round(self) -> int:
        """The last finished round, at least 1."""
        return max((r.round for r in self.rounds), default=1)

    @property
    def accounted(self) -> bool:
        """Whether some round has a finite privacy loss."""
        return any(math.isfinite(r.epsilon) for r in self.rounds)

    @property
    def notes(self) -> Mapping[str, Any]:
        """The latest notes of the method."""
        noted = {key: value for r in self.rounds for key, value in r.notes.items()}
        return noted | dict(self.outcome.notes)

    @property
    def traffic(self) -> Mapping[str, int]:
        """Total messages and bytes, down to and up from clients; empty if not recorded."""
        return Traffic.total([r for r in self.rounds if r.bytes_up is not None])

    @property
    def outcome(self) -> Outcome:
        """The result; of an unfinished run, what its rounds state."""
        if self.result is not None:
            return self.result
        seconds = [r.seconds for r in self.rounds if r.seconds is not None]
        training = sum(seconds) if seconds else None
        per_round = None if training is None else training / len(seconds)
        return Outcome(rounds=len(self.rounds), seconds_training=training, seconds_per_round=per_round)

    @property
    def scores(self) -> Diagnostics:
        """The last scores, noisy or exact; None if unknown."""
        if self.result is None:
            last = next((r for r in reversed(self.rounds) if r.mean_accuracy is not None), RoundRecord(round=0))
            scores, accuracy = replace(last.scores, confusion=None), last.mean_accuracy
        else:
            scores, accuracy = self.result.diagnostics or Diagnostics(), self.result.accuracy
        groups = _count_groups(self.config.get("groups")) if scores.groups is None else scores.groups
        return replace(scores, groups=groups, accuracy=scores.accuracy if accuracy is None else accuracy)

    @property
    def score_name(self) -> str:
        """What the accuracies of the run are called: R² for real numbers."""
        return of_metrics(self.scores).score_name


def read_run(path: Path | str) -> Run:
    """Read the run folder `path`; unfinished and interrupted runs are supported.

    Raises:
        ReportError: `path` is not a run folder, or a file is damaged beyond an incomplete line of metrics.
    """
    path = Path(path)
    if not (path / CONFIG).exists():
        what = "has no config.toml" if path.is_dir() else "is not a folder" if path.exists() else "does not exist"
        raise ReportError(f"{path} is not a run folder: it {what}; give a folder written by `coterie run --out`")
    try:
        tables = read_config(path)
        rounds, unreadable_lines = read_rounds(path)
        certificate = read_object(path / "privacy.json") if (path / "privacy.json").exists() else {}
        result = Outcome.read(path)
    except FileError as error:
        raise ReportError(f"{error}{_RESTORE}") from None
    return Run(
        path=path,
        config={name.rpartition(".")[2]: value for name, value in flat(tables["config"]).items()},
        versions=tables.get("versions", {}),
        machine=tables.get("machine", {}),
        rounds=tuple(rounds),
        certificate=certificate,
        result=result,
        unreadable_lines=unreadable_lines,
    )


def _count_groups(groups: Any) -> int | None:
    """Count groups: `"4"` means four, `"2:1:1"` three."""
    text = str(groups or "")
    if ":" in text:
        return len(text.split(":"))
    return int(text) if text.isdecimal() else None
