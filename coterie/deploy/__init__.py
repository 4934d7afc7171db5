"""Clients and servers on machines of their own: their certificates and keys, and how a client is started."""

from coterie.deploy.certificates import Made, add_nodes, create, renew_server
from coterie.deploy.edge import Check, Edge, checks, command, default_state_dir, environment, start
from coterie.deploy.errors import DeployError

__all__ = [
    "Check",
    "DeployError",
    "Edge",
    "Made",
    "add_nodes",
    "checks",
    "command",
    "create",
    "default_state_dir",
    "environment",
    "renew_server",
    "start",
]
