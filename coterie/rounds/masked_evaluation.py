"""A private evaluation whose accuracies and scores the server sees as sums: one masked round for each release.

The accuracy is one masked number of every client. A histogram of scores, if the plan has one, is the vector of a second
round. Each is charged before its first message leaves, as clients charge it before they reply.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from logging import WARNING
from typing import Any

from flwr.app import MetricRecord
from flwr.common.logger import log

from coterie.privacy import NothingReleasedError, Permit, Secure
from coterie.privacy.mechanisms.score_sums import ACCURACY, HISTOGRAM, ScoreSum
from coterie.rounds.evaluation import described
from coterie.rounds.masked_exchange import MaskedSum
from coterie.rounds.run_state import Models, Run, StrategyError
from coterie.wire import EvaluateRequest
from coterie.wire.messages import pack_models


class MaskedEvaluation:
    """A private evaluation of all k models by all clients; iterate over its masked rounds, and send each.

    Args:
        run: the run.
        request: to evaluate.
        number: of the round.
        models: (k, d).
        clients: all clients.
        assigned: whether the method assigns clusters.

    Attributes:
        metrics: what was released so far.

    Raises:
        StrategyError: the method assigns clusters, which the server must not know.
    """

    def __init__(
        self,
        run: Run,
        request: EvaluateRequest,
        number: int,
        models: Models,
        clients: Collection[int],
        *,
        assigned: bool = False,
    ) -> None:
        if assigned:
            raise StrategyError("mechanism secure hides labels from the server, and this method assigns them")
        assert isinstance(run.plan, Secure)
        self._run, self._plan, self._clients = run, run.plan, sorted(clients)
        self._request, self._models = replace(request, round=number), pack_models(models, run.state.layout)
        self.metrics: dict[str, Any] = {}

    def __iter__(self) -> Iterator[MaskedSum]:
        """Yield each masked round, and release its sum.

        Raises:
            BudgetError: a charge would exceed the budget.
        """
        for release in (ACCURACY, HISTOGRAM) if self._request.histogram else (ACCURACY,):
            scores, attempt = self._plan.scores(release), self._run.attempt
            permit = self._charged(release, scores)
            request = replace(self._request, histogram=release == HISTOGRAM)
            masked = MaskedSum(self._run, request, release, attempt, self._clients, self._models)
            yield masked
            permit.use_for(scores.event)
            self._count(masked)
            try:
                self._release(scores, masked, permit)
            except NothingReleasedError as reason:
                log(WARNING, "a private evaluation is skipped: %s; its charge stays", reason)

    def _charged(self, release: str, scores: ScoreSum) -> Permit:
        number, ledger = self._request.round, self._run.ledger
        if release == HISTOGRAM:
            return self._plan.charge_histogram(ledger, number)
        details: dict[str, Any] = {"for": "evaluation", "noise": self._plan.evaluation_noise}
        return ledger.charge_round(number, scores.event, **details)

    def _count(self, masked: MaskedSum) -> None:
        statistics = self._run.statistics
        statistics.evaluated += masked.survivors
        if masked.missing:
            statistics.unevaluated = statistics.unevaluated or masked.missing

    def _release(self, scores: ScoreSum, masked: MaskedSum, permit: Permit) -> None:
        """Add what a sum releases to the metrics.

        Raises:
            NothingReleasedError: there is no sum, or it is impossible.
        """
        if masked.missing:
            raise NothingReleasedError(masked.missing)
        scores.check_sum(masked.total, masked.survivors, masked.unremoved)
        if scores.histograms:
            self.metrics |= described(scores.histogram(masked.total, masked.survivors, masked.unremoved))
        else:
            self.metrics["accuracy"] = scores.accuracy(masked.total)
        self.metrics |= {"epsilon": permit.epsilon, "epsilon_rdp": self._run.ledger.spent("rdp")}

    @property
    def released(self) -> MetricRecord | None:
        """The metrics; None if nothing was released."""
        return MetricRecord(self.metrics) if self.metrics else None
