"""Engines that run the app on one machine: in process, or on Flower's Ray simulation.

Names are imported lazily: worker processes start before this process imports PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coterie.engine.in_process import LocalGrid, SummingGrid
    from coterie.engine.ray import EngineError, run_on_ray
    from coterie.engine.workers import start_server, workers_for

__all__ = ["EngineError", "LocalGrid", "SummingGrid", "run_on_ray", "start_server", "workers_for"]

_MODULE_OF = {
    "LocalGrid": "in_process",
    "SummingGrid": "in_process",
    "EngineError": "ray",
    "run_on_ray": "ray",
    "start_server": "workers",
    "workers_for": "workers",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
