"""Clustered strategies for Flower, one file per paper."""

from coterie.clustering.clusterers import CLUSTERERS
from coterie.strategies.aggregation import AGGREGATORS, Aggregator
from coterie.strategies.averaging import Averaging
from coterie.strategies.base import (
    REBALANCE_TRAIN,
    Checkpoint,
    ClusteredStrategy,
    Phase,
    Recorder,
    Round,
    StrategyError,
)
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
from coterie.strategies.lcfl import LCFL, METRICS, WITHIN
from coterie.strategies.local import Local
from coterie.strategies.one_shot import OneShot
from coterie.strategies.oracle import Oracle
from coterie.strategies.ppfc_gan import PPFCGAN
from coterie.strategies.rc_dpfl import RCDPFL
from coterie.strategies.reseeding import Reseeding

#: Every strategy by its name in a configuration. A new method is a file and a line here.
STRATEGIES: dict[str, type[ClusteredStrategy]] = {
    method.name: method
    for method in (
        *(FedAvg, FedProx, FedPer, Local),
        *(IFCA, FeSEM, FedCAM, RCDPFL, FCDPFL, KMCDPFL, Oracle, LCFL, CFL),
        *(PPFCGAN, KFED, FFCM),
    )
}

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
    "REBALANCE_TRAIN",
    "STRATEGIES",
    "WITHIN",
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
    "Recorder",
    "Reseeding",
    "Round",
    "StrategyError",
]
