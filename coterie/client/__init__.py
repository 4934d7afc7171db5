"""Client side: handlers of requests, local training, DP-SGD, privacy budget, reply cache; apps of others in clusters.

This file imports nothing: a simulation of Flower looks up `coterie.client.app` in one thread while another imports the
ServerApp, and a package that two threads import at once can be seen half made.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coterie.client.clustered import ClusteredClientApp

__all__ = ["ClusteredClientApp"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from coterie.client import clustered

    return getattr(clustered, name)
