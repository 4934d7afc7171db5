"""Engines that run the app on one machine: in process, or on Flower's Ray simulation."""

from coterie.engine.local import LocalGrid, SummingGrid, workers_for
from coterie.engine.ray import EngineError, run_on_ray
from coterie.engine.workers import start_server

__all__ = ["EngineError", "LocalGrid", "SummingGrid", "run_on_ray", "start_server", "workers_for"]
