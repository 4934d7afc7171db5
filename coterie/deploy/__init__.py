"""Deployment of clients and servers: certificates and keys, client start-up, and status."""

from coterie.deploy.app import Bundle, bundle
from coterie.deploy.certificates import CreatedCertificates, add_nodes, create, renew_server
from coterie.deploy.edge import Check, Edge, checks, command, default_state_dir, environment, start
from coterie.deploy.errors import DeployError
from coterie.deploy.purge import Purged, purge
from coterie.deploy.status import Node, Run, Status, query_status

__all__ = [
    "Bundle",
    "Check",
    "CreatedCertificates",
    "DeployError",
    "Edge",
    "Node",
    "Purged",
    "Run",
    "Status",
    "add_nodes",
    "bundle",
    "checks",
    "command",
    "create",
    "default_state_dir",
    "environment",
    "purge",
    "query_status",
    "renew_server",
    "start",
]
