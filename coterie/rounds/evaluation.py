"""Evaluation: one exchange whose replies are diagnostics, outside every guarantee, or a private mean accuracy.

:func:`mean_of_clients` aggregates any scalars of a library user's clients, within bounds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from logging import WARNING
from typing import Any

from flwr.app import Message, MetricRecord, RecordDict
from flwr.common.logger import log

from coterie.logs import printable
from coterie.privacy import Permit
from coterie.privacy.score_histograms import ScoreHistogram
from coterie.results import RoundRecord
from coterie.rounds.exchange import MessageBatch
from coterie.rounds.run_state import Models, Run
from coterie.wire import EvaluateRequest, Request, Summary
from coterie.wire.messages import CONFIG, DIAGNOSTICS, SCORE_COUNTS, ReplyError, check_sender, diagnostics, parse

_MAX_KEYS = 100
_LONGEST_KEY = 100


class EvaluationExchange:
    """A request for diagnostics to registered clients, with all k models or each client's own.

    Args:
        run: the run.
        request: of the method.
        number: of the round.
        models: (k, d).
        assignments: see :class:`~coterie.rounds.exchange.MessageBatch`.
        aggregate: computes the metrics of all replies. A :class:`~coterie.wire.Summary` receives valid replies only.
        clients: the recipients.
    """

    def __init__(
        self,
        run: Run,
        request: Request,
        number: int,
        models: Models,
        assignments: Mapping[int, int] | None,
        aggregate: Callable[[Sequence[Any]], MetricRecord],
        clients: Collection[int],
    ) -> None:
        self._run, self._aggregate = run, aggregate
        self._permit: Permit | None = None
        if self._histogram(request) and run.plan.clients_keep_ledgers:  # before clients may reply, who charge, too
            self._permit = run.plan.charge_histogram(run.ledger, number)
        self.batch = MessageBatch(run, replace(request, round=number), models, assignments, clients)

    @staticmethod
    def _histogram(request: Request) -> bool:
        return isinstance(request, EvaluateRequest) and request.histogram

    def collect(
        self, replies: Iterable[Message], num_clusters: int, *, private: bool = False, optional: bool = False
    ) -> dict[int, Any]:
        """What :meth:`metrics` takes of every client with a valid reply.

        Args:
            replies: of the clients.
            num_clusters: k.
            private: whether the replies are for :meth:`release`.
            optional: whether replies state client and round and may lack diagnostics, which are then None.
        """
        valid: dict[int, Any] = {}
        statistics = self._run.statistics
        dropped = statistics.dropped.copy()
        for client, content in self.batch.replies(replies):
            try:
                valid[client] = self._read(client, content, num_clusters, private, optional)
            except ReplyError as error:
                self.batch.reject(client, str(error))
        statistics.evaluated += len(valid)
        if self.batch.messages and len(valid) < len(self.batch.messages):
            reason = next(iter(statistics.dropped - dropped), "no client replied")
            statistics.unevaluated = statistics.unevaluated or reason
        return valid

    def _read(self, client: int, content: RecordDict, num_clusters: int, private: bool, optional: bool) -> Any:
        if optional:
            parse(check_sender, content, client_id=client, round=self.batch.request.round)
            if DIAGNOSTICS not in content:
                return None
        record = parse(diagnostics, content)
        if private or not isinstance(self._aggregate, Summary):
            return content
        return parse(
            self._aggregate.reply.parse,
            record,
            client_id=client,
            num_clusters=num_clusters,
            num_clients=self._run.plan.clients,
            assigned=self.batch.messages[client].content[CONFIG].get("cluster"),
        )

    def metrics(self, contents: Sequence[Any]) -> MetricRecord | None:
        """Metrics of valid replies; None if there are none or the aggregation fails."""
        if not contents:
            return None
        try:
            return self._aggregate(contents)
        except Exception as error:
            text = printable(f"{type(error).__name__}: {error}")
            log(WARNING, "evaluate_metrics_aggr_fn failed, this evaluation has no metrics: %s", text)
            return None

    def release(self, contents: Mapping[int, RecordDict]) -> MetricRecord:
        """The noisy mean accuracy of all clients, and a noisy histogram of scores if requested; each is charged.

        At record level there is a histogram alone, from which the accuracy follows.

        Raises:
            BudgetError: the charge would exceed the budget.
        """
        run, number, attempt = self._run, self.batch.request.round, self._run.attempt
        counts = {client: diagnostics(content).get(SCORE_COUNTS) for client, content in contents.items()}
        if run.plan.clients_keep_ledgers:
            assert self._permit is not None
            histogram = run.plan.release_histogram(self._permit, counts, run.streams, attempt)
            spent = {"epsilon": self._permit.epsilon, "epsilon_rdp": run.ledger.spent("rdp")}
            return MetricRecord({"accuracy": histogram.accuracy, **described(histogram), **spent})
        counts |= dict.fromkeys(self.batch.unusable)
        values = [diagnostics(content).get("accuracy") for content in contents.values()]
        accuracies = [float(value) if isinstance(value, int | float) else math.nan for value in values]
        accuracies += [math.nan] * len(self.batch.unusable)
        details: dict[str, Any] = {"for": "evaluation", "noise": run.plan.evaluation_noise}
        permit = run.ledger.charge_round(number, run.plan.evaluation_event(), **details)
        accuracy = run.plan.release_evaluation(permit, accuracies, run.streams, attempt)
        released: dict[str, Any] = {"accuracy": accuracy}
        if self._histogram(self.batch.request):
            permit = run.plan.charge_histogram(run.ledger, number)
            released |= described(run.plan.release_histogram(permit, counts, run.streams, attempt))
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
