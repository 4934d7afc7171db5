"""Parts of a round: the exchange, its phases, the evaluation, and the client registry."""

from coterie.rounds.aggregation import AGGREGATORS, Aggregator
from coterie.rounds.averaging import Averaging
from coterie.rounds.client_registry import ClientRegistry, Roster, SimulatesClients, record_nothing
from coterie.rounds.evaluation import EvaluationExchange, mean_of_clients
from coterie.rounds.exchange import Exchange, MessageBatch, PartialSums, SupportsSums
from coterie.rounds.phases import Phase, PointsPhase, SumsPhase, UpdatesPhase
from coterie.rounds.recorder import Checkpoint, Recorder
from coterie.rounds.run_state import Run, RunState, Statistics, StrategyError

__all__ = [
    "AGGREGATORS",
    "Aggregator",
    "Averaging",
    "Checkpoint",
    "ClientRegistry",
    "EvaluationExchange",
    "Exchange",
    "MessageBatch",
    "PartialSums",
    "Phase",
    "PointsPhase",
    "Recorder",
    "Roster",
    "Run",
    "RunState",
    "SimulatesClients",
    "Statistics",
    "StrategyError",
    "SumsPhase",
    "SupportsSums",
    "UpdatesPhase",
    "mean_of_clients",
    "record_nothing",
]
