"""The process of one message: a fork of a process that has imported :data:`LIBRARIES`.

Nothing of the app is imported before the fork. The child fetches the app (FAB) from its SuperNode, installs it and
imports its code from there, as Flower's program ``flwr-clientapp`` does.
"""

from __future__ import annotations

import contextlib
import random
import sys
from importlib import import_module
from typing import Any

#: Third-party modules that Flower and Coterie's ClientApp import for a training request.
LIBRARIES = (
    "flwr.supernode.runtime.run_clientapp",
    "flwr.clientapp",
    "httpcore",
    "h11",
    "torch",
    "dp_accounting.pld",
    "dp_accounting.rdp",
    "scipy.stats",
    "randomgen",
    "safetensors.numpy",
)


def preload() -> None:
    """Import the libraries; an app that needs a missing one reports the error."""
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):
            import_module(name)


def run(**options: Any) -> None:
    """Run the ClientApp for one message; ``options`` are those of Flower's `run_clientapp`.

    All children start with the state of their parent. The generators of Python and NumPy therefore get new seeds from
    the operating system, and the installed package ``coterie`` is forgotten: the app has a package of that name.
    """
    import numpy as np
    from flwr.supernode.runtime.run_clientapp import run_clientapp

    random.seed()
    np.random.seed()
    for name in [name for name in sys.modules if name.partition(".")[0] == "coterie"]:
        del sys.modules[name]
    run_clientapp(**options)
