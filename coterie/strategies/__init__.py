"""Clustered strategies for Flower, one file per paper."""

from coterie.clustering.clusterers import CLUSTERERS
from coterie.rounds.aggregation import AGGREGATORS, Aggregator
from coterie.rounds.averaging import Averaging
from coterie.rounds.phases import Phase, PointsPhase, SumsPhase, UpdatesPhase
from coterie.rounds.recorder import Checkpoint, Recorder
from coterie.rounds.run_state import StrategyError
from coterie.strategies.cfl import CFL
from coterie.strategies.f_cdpfl import FCDPFL
from coterie.strategies.fedavg import FedAvg
from coterie.strategies.fedcam import FedCAM
from coterie.strategies.fedper import FedPer
from coterie.strategies.fedprox import FedProx
from coterie.strategies.fesem import FeSEM
from coterie.strategies.ffcm import FFCM
from coterie.strategies.ifca import IFCA
from coterie.strategies.kfed import KFED
from coterie.strategies.km_cdpfl import KMCDPFL
from coterie.strategies.lcfl import LCFL, METRICS
from coterie.strategies.local import Local
from coterie.strategies.method import Round, Steps
from coterie.strategies.one_shot import OneShot
from coterie.strategies.options import StrategyOptions
from coterie.strategies.oracle import Oracle
from coterie.strategies.ppfc_gan import PPFCGAN
from coterie.strategies.rc_dpfl import RCDPFL
from coterie.strategies.reseeding import Reseeding
from coterie.strategies.rr_cluster import RRCluster
from coterie.strategies.server_optimizer import SERVER_OPTIMIZERS, ServerOptimizer
from coterie.strategies.strategy import ClusteredStrategy

__all__ = [
    "AGGREGATORS",
    "CFL",
    "CLUSTERERS",
    "FCDPFL",
    "FFCM",
    "IFCA",
    "KFED",
    "KMCDPFL",
    "LCFL",
    "METRICS",
    "PPFCGAN",
    "RCDPFL",
    "SERVER_OPTIMIZERS",
    "Aggregator",
    "Averaging",
    "Checkpoint",
    "ClusteredStrategy",
    "FeSEM",
    "FedAvg",
    "FedCAM",
    "FedPer",
    "FedProx",
    "Local",
    "OneShot",
    "Oracle",
    "Phase",
    "PointsPhase",
    "RRCluster",
    "Recorder",
    "Reseeding",
    "Round",
    "ServerOptimizer",
    "Steps",
    "StrategyError",
    "StrategyOptions",
    "SumsPhase",
    "UpdatesPhase",
]
