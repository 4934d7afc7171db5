"""Client side: handlers of requests, local training, DP-SGD, privacy budget, reply cache.

Names are imported lazily: the process that Flower starts for a message imports PyTorch only if the message needs it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coterie.client.backend import train
    from coterie.client.cohort import federation, torch_device
    from coterie.client.handlers import HANDLERS, ReplyOrError, handle, train_and_sum
    from coterie.client.identity import Client
    from coterie.client.scores import losses
    from coterie.client.sgd import LocalTrainingConfig
    from coterie.client.state import ClientError, StateFile

__all__ = [
    "HANDLERS",
    "Client",
    "ClientError",
    "LocalTrainingConfig",
    "ReplyOrError",
    "StateFile",
    "federation",
    "handle",
    "losses",
    "torch_device",
    "train",
    "train_and_sum",
]

_MODULES = {
    "identity": ("Client",),
    "state": ("ClientError", "StateFile"),
    "cohort": ("federation", "torch_device"),
    "scores": ("losses",),
    "sgd": ("LocalTrainingConfig",),
    "backend": ("train",),
    "handlers": ("HANDLERS", "ReplyOrError", "handle", "train_and_sum"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
