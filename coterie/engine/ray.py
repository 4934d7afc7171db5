"""The Ray engine: Flower's simulation of the same ServerApp and ClientApp, without a SuperLink."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp


class EngineError(RuntimeError):
    """An engine is not installed."""


def run_on_ray(main: Callable[[Grid], None], clients: int) -> None:
    """Call ``main`` with a grid of ``clients`` simulated nodes; its exceptions propagate.

    Raises:
        EngineError: Ray is not installed.
    """
    if importlib.util.find_spec("ray") is None:
        raise EngineError("the Ray engine requires Ray: pip install 'coterie[simulation]', or use --engine local")
    from flwr.simulation import run_simulation

    from coterie.client.app import app as client_app

    server_app = ServerApp()

    @server_app.main()
    def _main(grid: Grid, context: Context) -> None:
        main(grid)

    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    with warnings.catch_warnings():
        # Flower recommends `flwr run`, which needs a SuperLink and an app folder, and runs the same simulation.
        warnings.simplefilter("ignore", DeprecationWarning)
        run_simulation(server_app, client_app, num_supernodes=clients)
