"""Clustered strategies for Flower, one file per paper."""

from coterie.strategies.base import Checkpoint, ClusteredStrategy, Phase, Recorder, Round, StrategyError
from coterie.strategies.fedavg import FedAvg
from coterie.strategies.ifca import IFCA
from coterie.strategies.reseeding import Reseeding

#: Every strategy by its name in a configuration. A new method is a file and a line here.
STRATEGIES: dict[str, type[ClusteredStrategy]] = {method.name: method for method in (FedAvg, IFCA)}

__all__ = [
    "IFCA",
    "STRATEGIES",
    "Checkpoint",
    "ClusteredStrategy",
    "FedAvg",
    "Phase",
    "Recorder",
    "Reseeding",
    "Round",
    "StrategyError",
]
