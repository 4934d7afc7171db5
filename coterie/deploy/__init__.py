"""Deployment of clients and servers: certificates and keys, the app bundle, and client start-up."""

from coterie.deploy.bundle import Bundle, bundle
from coterie.deploy.certificates import CreatedCertificates, add_nodes, create, renew_server
from coterie.deploy.edge import Check, Edge, checks, command, default_state_dir, environment, start
from coterie.deploy.errors import DeployError
from coterie.deploy.node import NodeConfig

__all__ = [
    "Bundle",
    "Check",
    "CreatedCertificates",
    "DeployError",
    "Edge",
    "NodeConfig",
    "add_nodes",
    "bundle",
    "checks",
    "command",
    "create",
    "default_state_dir",
    "environment",
    "renew_server",
    "start",
]
