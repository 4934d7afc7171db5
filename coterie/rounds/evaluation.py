"""Evaluation: phases whose replies are diagnostics, outside every guarantee, or scores that are released privately.

:func:`mean_of_clients` aggregates any scalars of a library user's clients, within bounds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from logging import WARNING
from typing import Any, ClassVar, cast

from flwr.app import MetricRecord, RecordDict
from flwr.common.logger import log

from coterie.logs import printable
from coterie.privacy import Contributions, Event, Permit, Secure
from coterie.privacy.mechanisms.score_sums import ACCURACY, HISTOGRAM
from coterie.privacy.score_histograms import ScoreHistogram
from coterie.privacy.secure_aggregation.integers import Integers
from coterie.results import RoundRecord
from coterie.rounds.phases import IntArray, Phase
from coterie.rounds.run_state import Run
from coterie.wire import EvaluateRequest, LabelRequest, Request, Summary
from coterie.wire.messages import DIAGNOSTICS, SCORE_COUNTS, Reply, ReplyError, check_sender, diagnostics, parse

_MAX_KEYS = 100
_LONGEST_KEY = 100


class EvaluationReplies(Contributions):
    """What clients replied to an evaluation, or the masked sum of it.

    Args:
        cohort: (m,) client of every slot.

    Attributes:
        replies: of each client.
        unusable: number of clients whose reply cannot be used.
        masked: sum, number of clients, and number of those whose surplus of noise is inside; None without masks.
    """

    def __init__(self, cohort: IntArray) -> None:
        super().__init__(0)
        self._cohort = cohort
        self.replies: dict[int, Any] = {}
        self.unusable = 0
        self.masked: tuple[Integers, int, int] | None = None

    def add(self, slot: int, label: Any, redrawn_label: Any, update: Any) -> None:
        """Add the reply of one client."""
        self.replies[int(self._cohort[slot])] = update

    def add_null(self) -> None:
        """Count a client whose reply cannot be used."""
        self.unusable += 1

    def add_vectors(self, total: Integers, survivors: int, unremoved: int) -> None:
        """Store a masked sum."""
        self.masked = total, survivors, unremoved


@dataclass(frozen=True)
class EvaluatePhase(Phase[EvaluationReplies, MetricRecord | None]):
    """Diagnostics of clients, exact and outside every guarantee.

    Attributes:
        aggregate: computes the metrics of all replies. A :class:`~coterie.wire.Summary` receives valid replies only.
    """

    trains: ClassVar[bool] = False

    aggregate: Callable[[Sequence[Any]], MetricRecord] = field(kw_only=True)

    def completed(self, run: Run, number: int) -> Request:
        """The request of this round."""
        return replace(self.request, round=number)

    def charges(self, run: Run, request: Request, cohort: IntArray) -> Counter[Event]:
        """None."""
        return Counter()

    def container(self, run: Run, cohort: IntArray, number: int) -> EvaluationReplies:
        """Replies by client."""
        return EvaluationReplies(cohort)

    def read(self, run: Run, request: Request, client: int, content: RecordDict) -> Reply:
        """The content, or what a :class:`~coterie.wire.Summary` takes."""
        record, reply = parse(diagnostics, content), content
        if isinstance(self.aggregate, Summary):
            reply = parse(
                self.aggregate.reply.parse,
                record,
                client_id=client,
                num_clusters=self.num_clusters(run),
                num_clients=run.plan.clients,
                assigned=None if self.assignments is None else self.assignments[client],
            )
        return Reply(client, 0, 0, cast(Any, reply))

    def num_clusters(self, run: Run) -> int:
        """Number of clusters in a reply."""
        return run.plan.num_clusters

    def release(self, run: Run, permit: Permit, contributions: EvaluationReplies, attempt: int) -> MetricRecord | None:
        """Metrics of valid replies; None if there are none or the aggregation fails."""
        replies = [reply for reply in contributions.replies.values() if reply is not None]
        if not replies:
            return None
        try:
            return self.aggregate(replies)
        except Exception as error:
            text = printable(f"{type(error).__name__}: {error}")
            log(WARNING, "evaluate_metrics_aggr_fn failed, this evaluation has no metrics: %s", text)
            return None


@dataclass(frozen=True)
class LabelPhase(EvaluatePhase):
    """Labels of the clients' records, which stay there; replies may lack diagnostics."""

    def read(self, run: Run, request: Request, client: int, content: RecordDict) -> Reply:
        """See :class:`EvaluatePhase`; replies state client and round."""
        parse(check_sender, content, client_id=client, round=request.round)
        if DIAGNOSTICS not in content:
            return Reply(client, 0, 0, cast(Any, None))
        return super().read(run, request, client, content)

    def num_clusters(self, run: Run) -> int:
        """Number of labels."""
        assert isinstance(self.request, LabelRequest)
        return self.request.labels

    def release(self, run: Run, permit: Permit, contributions: EvaluationReplies, attempt: int) -> MetricRecord:
        """The number of clients that labelled their records, and the scores of those that report counts."""
        scores = super().release(run, permit, contributions, attempt) or MetricRecord()
        scores["clients_labelled"] = len(contributions.replies)
        return scores


@dataclass(frozen=True)
class ScoresPhase(EvaluatePhase):
    """The noisy mean accuracy of all clients, and a noisy histogram of scores if requested; each is charged.

    At record level there is a histogram alone, from which the accuracy follows. A masked round releases one of them.
    """

    @property
    def masked_release(self) -> str:
        """The requested sum."""
        return HISTOGRAM if isinstance(self.request, EvaluateRequest) and self.request.histogram else ACCURACY

    def charged_first(self, run: Run) -> bool:
        """At record level."""
        return run.plan.clients_keep_ledgers

    def charge(self, run: Run, request: Request, cohort: IntArray, *, before_sending: bool) -> Permit:
        """Charge the accuracy; the histogram where it is released alone."""
        plan = run.plan
        if plan.clients_keep_ledgers or (run.masks and self.masked_release == HISTOGRAM):
            return plan.charge_histogram(run.ledger, request.round)
        details: dict[str, Any] = {"for": "evaluation", "noise": plan.evaluation_noise}
        return run.ledger.charge_round(request.round, plan.evaluation_event(), **details)

    def read(self, run: Run, request: Request, client: int, content: RecordDict) -> Reply:
        """The diagnostics."""
        return Reply(client, 0, 0, cast(Any, parse(diagnostics, content)))

    def release(self, run: Run, permit: Permit, contributions: EvaluationReplies, attempt: int) -> MetricRecord:
        """See the class.

        Raises:
            BudgetError: the charge of the histogram would exceed the budget.
            NothingReleasedError: mechanism secure has too few replies, or an impossible sum.
        """
        plan, replies = run.plan, contributions.replies
        counts = {client: reply.get(SCORE_COUNTS) for client, reply in replies.items()}
        if contributions.masked is not None:
            assert isinstance(plan, Secure)
            scores, (total, survivors, unremoved) = plan.scores(self.masked_release), contributions.masked
            permit.use_for(scores.event)
            scores.check_sum(total, survivors, unremoved)
            if scores.histograms:
                released = described(scores.histogram(total, survivors, unremoved))
            else:
                released = {"accuracy": scores.accuracy(total)}
        elif plan.clients_keep_ledgers:
            histogram = plan.release_histogram(permit, counts, run.streams, attempt)
            released = {"accuracy": histogram.accuracy, **described(histogram)}
        else:
            values = [reply.get("accuracy") for reply in replies.values()]
            accuracies = [float(value) if isinstance(value, int | float) else math.nan for value in values]
            accuracies += [math.nan] * contributions.unusable
            released = {"accuracy": plan.release_evaluation(permit, accuracies, run.streams, attempt)}
            if self.masked_release == HISTOGRAM:
                permit = plan.charge_histogram(run.ledger, permit.round)
                counts |= {-1 - null: None for null in range(contributions.unusable)}  # zeros, of no client's id
                released |= described(plan.release_histogram(permit, counts, run.streams, attempt))
        return MetricRecord({**released, "epsilon": permit.epsilon, "epsilon_rdp": run.ledger.spent("rdp")})


def described(histogram: ScoreHistogram) -> dict[str, Any]:
    """Return the metrics of a released histogram."""
    return {"score_histogram": histogram.counts.ravel().tolist(), "score_noise": histogram.deviations.tolist()}


def mean_of_clients(contents: Sequence[RecordDict]) -> MetricRecord:
    """Unweighted mean over clients of every scalar diagnostic.

    Numbers that are not finite and keys that the server sets itself are ignored. So are keys of more than 100
    characters or with control characters, and all but the 100 keys that most clients report.
    """
    values: dict[str, list[float]] = {}
    for content in contents:
        for key, value in _scalars(content).items():
            values.setdefault(key, []).append(value)
    counts = Counter({key: len(values[key]) for key in sorted(values)})
    shares = {key: [value / count for value in values[key]] for key, count in counts.most_common(_MAX_KEYS)}
    return MetricRecord({key: sum(parts) for key, parts in shares.items()})


def _scalars(content: RecordDict) -> dict[str, float]:
    try:
        reported = diagnostics(content)
    except ReplyError:
        return {}
    scalars: dict[str, float] = {}
    for key, value in reported.items():
        usable = key not in RoundRecord.server_keys() and len(key) <= _LONGEST_KEY and key.isprintable()
        if usable and isinstance(value, int | float) and math.isfinite(value) and len(scalars) < _MAX_KEYS:
            scalars[key] = float(value)
    return scalars
