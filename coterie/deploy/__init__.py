"""Deployment of clients and servers: certificates and keys, the app bundle, and client start-up.

Names are imported lazily: a ClientApp imports the node configuration, and no library for certificates.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coterie.deploy.app_bundle import Bundle, bundle
    from coterie.deploy.certificates import (
        CreatedCertificates,
        add_nodes,
        create,
        remove_node,
        renew_authority,
        renew_node,
        renew_server,
        retire_authorities,
        sign_roster,
    )
    from coterie.deploy.edge import Check, Edge, checks, command, default_state_dir, environment, start
    from coterie.deploy.errors import DeployError
    from coterie.deploy.node import NodeConfig
    from coterie.deploy.trial import Trial

__all__ = [
    "Bundle",
    "Check",
    "CreatedCertificates",
    "DeployError",
    "Edge",
    "NodeConfig",
    "Trial",
    "add_nodes",
    "bundle",
    "checks",
    "command",
    "create",
    "default_state_dir",
    "environment",
    "remove_node",
    "renew_authority",
    "renew_node",
    "renew_server",
    "retire_authorities",
    "sign_roster",
    "start",
]

_MODULES = {
    "app_bundle": ("Bundle", "bundle"),
    "certificates": (
        "CreatedCertificates",
        "add_nodes",
        "create",
        "remove_node",
        "renew_authority",
        "renew_node",
        "renew_server",
        "retire_authorities",
        "sign_roster",
    ),
    "edge": ("Check", "Edge", "checks", "command", "default_state_dir", "environment", "start"),
    "errors": ("DeployError",),
    "node": ("NodeConfig",),
    "trial": ("Trial",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
