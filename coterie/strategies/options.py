"""Options of every strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from flwr.app import MetricRecord

from coterie.fields import AT_LEAST_0, GAN_PRECISIONS, PERSONAL_METHODS, REBALANCE_TRAIN, Bounded, OneOf
from coterie.privacy import Ledger, Streams
from coterie.rounds.aggregation import Aggregator
from coterie.rounds.averaging import Averaging
from coterie.rounds.client_registry import Roster, record_nothing
from coterie.rounds.evaluation import mean_of_clients
from coterie.rounds.recorder import Checkpoint, Recorder
from coterie.rounds.run_state import StrategyError
from coterie.strategies.reseeding import Reseeding
from coterie.strategies.server_optimizer import ServerOptimizer


@dataclass(frozen=True, kw_only=True)
class StrategyOptions(Bounded):  # large: the keywords of every strategy's constructor, declared once
    """Options of every strategy, which constructors also take by keyword.

    Attributes:
        clusters: number of clusters; 0: determined by the method, with the plan's as the maximum where it searches for
            it (``searches``); None: that of the plan, or 0 if it grows during a run (``grows``).
        ledger: records charges; None keeps them in memory.
        streams: randomness; None is secret randomness.
        server_lr: eta, step size of the server.
        server_optimizer: how models move by the released means of updates.
        reseeding: schedule of re-seeding models without clients; None: never.
        averaging: the released models to average; by default, a run returns the last ones.
        aggregator: aggregator of a cluster's updates. Others than the mean require a plan without privacy or at record
            level.
        rebalance_train: model that a client trains if rebalancing changes its cluster: of its "own" cluster or of the
            "assigned" one; the latter requires clients that redraw their labels.
        evaluate: "diagnostic", exact and outside every guarantee, or "private", noisy and charged; the plan must then
            include as many ``evaluations`` as :meth:`ClusteredStrategy.evaluations` returns.
        evaluate_every: number of rounds between evaluations; the last round is always evaluated. 0: never.
        evaluate_clients: number of clients that evaluate exactly, drawn once at random; 0: all.
        personalize: how clients fit the released model to their own records in evaluations; None: not at all.
        recorder: stores checkpoints and metrics.
        resume_from: a checkpoint of the same run.
        evaluate_metrics_aggr_fn: aggregates evaluation replies to one MetricRecord; default: mean over clients of every
            scalar. A :class:`~coterie.wire.Summary` receives valid replies only. If it raises, the evaluation has no
            metrics.
        registration_timeout: seconds to wait for all M clients before round 1, and later for the clients that a round
            requires.
        min_clients: number of registered clients that a round requires. At client level it applies to round 1 only:
            later the end of a run would reveal how many clients are present.
        min_replies: share of the requested replies that a round requires; clients without a reply receive the request a
            few more times. Not available at client level, where every round is charged and released regardless of
            replies.
        masks: whether clients mask their vectors, so that the server sees their sum alone; with mechanism secure only.
        roster: which client the key of each node is; None: as the nodes say.
        audit: called with an event and its fields, JSON-ready and never secret, when a client introduces itself, a node
            is ignored, or clients refuse.
        true_groups: (M,) group of every client, for methods that need it (``needs``).
        example_shape: shape of a record, for methods that need it.
        feature_range: public bound on the absolute value of a feature, for methods that need it.
        device: device on which the server trains, for methods that need it.
        precision: precision of matrix products of the server, for methods that need it.

    Raises:
        StrategyError: a value is none of the listed ones.
    """

    error = StrategyError

    clusters: Annotated[int | None, AT_LEAST_0] = None
    ledger: Ledger | None = None
    streams: Streams | None = None
    server_lr: float = 1.0
    server_optimizer: ServerOptimizer = field(default_factory=ServerOptimizer)
    reseeding: Reseeding | None = None
    averaging: Averaging = field(default_factory=Averaging)
    aggregator: Aggregator = field(default_factory=Aggregator)
    rebalance_train: Annotated[str, OneOf(REBALANCE_TRAIN)] = "own"
    evaluate: Annotated[str, OneOf(("diagnostic", "private"))] = "diagnostic"
    evaluate_every: int = 1
    evaluate_clients: int = 0
    personalize: Annotated[str | None, OneOf(PERSONAL_METHODS)] = None
    recorder: Recorder = field(default_factory=Recorder)
    resume_from: Checkpoint | None = None
    evaluate_metrics_aggr_fn: Callable[[Sequence[Any]], MetricRecord] = mean_of_clients
    registration_timeout: float = 60.0
    min_clients: int = 0
    min_replies: float = 0.0
    masks: bool = False
    roster: Roster | None = None
    audit: Callable[..., None] = record_nothing
    true_groups: Sequence[int] = ()
    example_shape: Sequence[int] = ()
    feature_range: float = 1.0
    device: str = "cpu"
    precision: Annotated[str, OneOf(GAN_PRECISIONS)] = "float32"
