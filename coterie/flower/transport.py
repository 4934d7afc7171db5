"""How SuperNodes of the installed Flower speak to a SuperLink."""

from functools import cache
from importlib.metadata import version


@cache
def nodes_speak_http() -> bool:
    """Return whether they speak HTTP, as since Flower 1.40, and not gRPC."""
    major, minor = (int(number) for number in version("flwr").split(".")[:2])
    return (major, minor) >= (1, 40)
