"""The process of one message: forked from a server process that has imported :data:`LIBRARIES`.

Nothing of the app is imported before the fork. The child fetches the app (FAB) from its SuperNode, installs it and
imports its code from there, as Flower's program ``flwr-clientapp`` does.
"""

from __future__ import annotations

import logging
import random
import sys
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
    "opacus",
    "opacus.validators",
)


def run(**options: Any) -> None:
    """Run the ClientApp for one message; ``options`` are those of Flower's `run_clientapp`.

    All children start with the state of the server process. The generators of Python and NumPy therefore get new seeds
    from the operating system, and the installed package ``coterie`` is forgotten: the app has a package of that name.
    Opacus gives the root logger a handler when it is imported, by which Flower's lines would appear twice.
    """
    import numpy as np
    from flwr.supernode.runtime.run_clientapp import run_clientapp

    random.seed()
    np.random.seed()
    logging.getLogger().handlers.clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "coterie"]:
        del sys.modules[name]
    run_clientapp(**options)
