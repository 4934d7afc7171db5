"""Rounds of a run: one exchange, the loop, and the client registry."""

from coterie.rounds.aggregation import AGGREGATORS, Aggregator
from coterie.rounds.averaging import Averaging
from coterie.rounds.client_registry import ClientRegistry, SimulatesClients
from coterie.rounds.context import RunContext, Statistics, StrategyError
from coterie.rounds.evaluation import EvaluationExchange, mean_of_clients
from coterie.rounds.exchange import Exchange, MessageBatch, PartialSums, SupportsSums
from coterie.rounds.loop import RoundsStrategy, await_clients, run_rounds
from coterie.rounds.phases import Phase, PointsPhase, SumsPhase, UpdatesPhase
from coterie.rounds.recorder import Checkpoint, NullRecorder, Recorder

__all__ = [
    "AGGREGATORS",
    "Aggregator",
    "Averaging",
    "Checkpoint",
    "ClientRegistry",
    "EvaluationExchange",
    "Exchange",
    "MessageBatch",
    "NullRecorder",
    "PartialSums",
    "Phase",
    "PointsPhase",
    "Recorder",
    "RoundsStrategy",
    "RunContext",
    "SimulatesClients",
    "Statistics",
    "StrategyError",
    "SumsPhase",
    "SupportsSums",
    "UpdatesPhase",
    "await_clients",
    "mean_of_clients",
    "run_rounds",
]
