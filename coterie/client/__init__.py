"""What a client does with the models that it receives: choose one, train it, evaluate it.

Names are imported when they are first used: the process that Flower starts for a message imports PyTorch only if the
message needs it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coterie.client.identity import Client
    from coterie.client.memory import ClientError, Memory
    from coterie.client.task import federation, torch_device
    from coterie.client.training import Hyper, losses, train
    from coterie.client.verbs import VERBS, Answer

__all__ = [
    "VERBS",
    "Answer",
    "Client",
    "ClientError",
    "Hyper",
    "Memory",
    "federation",
    "losses",
    "torch_device",
    "train",
]

_MODULES = {
    "identity": ("Client",),
    "memory": ("ClientError", "Memory"),
    "task": ("federation", "torch_device"),
    "training": ("Hyper", "losses", "train"),
    "verbs": ("VERBS", "Answer"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
