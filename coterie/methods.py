"""Every method by its name in a configuration. A new method is a file and a line here."""

from coterie.one_shot import FFCM, KFED, PPFCGAN
from coterie.strategies import (
    CFL,
    FCDPFL,
    IFCA,
    KMCDPFL,
    LCFL,
    RCDPFL,
    ClusteredStrategy,
    FedAvg,
    FedCAM,
    FedPer,
    FedProx,
    FeSEM,
    Local,
    Oracle,
)

STRATEGIES: dict[str, type[ClusteredStrategy]] = {
    method.name: method
    for method in (
        *(FedAvg, FedProx, FedPer, Local),
        *(IFCA, FeSEM, FedCAM, RCDPFL, FCDPFL, KMCDPFL, Oracle, LCFL, CFL),
        *(PPFCGAN, KFED, FFCM),
    )
}
