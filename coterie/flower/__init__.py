"""Code that replaces or calls private parts of Flower in a run, one module for each object.

:mod:`coterie.deploy` has the code for Flower's programs. :data:`PRIVATE` lists the parts of both, and :func:`check`
compares them with the installed version, which each program does before it does anything else.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from importlib.metadata import version
from typing import Any, NamedTuple

from coterie.flower.transport import nodes_speak_http
from coterie.site.errors import DeployError

#: Versions of Flower that Coterie is tested with, as pyproject.toml has them.
SUPPORTED = ">=1.39,<1.43"


class PrivatePart(NamedTuple):
    """A part of Flower without a public interface.

    Attributes:
        name: dotted name in Flower.
        parameters: names of its parameters, as far as Coterie relies on them.
        user: module below `coterie` that replaces or calls it.
        reason: what Coterie does with it, and why.
        over_http: whether it is only needed where nodes speak HTTP, since Flower 1.40.
    """

    name: str
    parameters: tuple[str, ...]
    user: str
    reason: str
    over_http: bool = False


_BACKOFF = "shortens the first pause before Flower asks again for the content of a message"
_PULL = "pins the app of a run, and polls sooner during a run"
_WAKE = "ends the wait for a task or a reply when there is one"
_LOST = "replies to messages whose ClientApp has ended without a reply"
_STATE = "flwr.supernode.nodestate.in_memory_nodestate.InMemoryNodeState"
_NODE = "authenticates nodes"
_INFLATE = "pulls replies one by one, so that a malformed reply loses no other"

#: What Coterie replaces, or calls although it is private.
PRIVATE = (
    PrivatePart(
        "flwr.supercore.inflatable.inflatable_utils.pull_objects", ("initial_backoff",), "flower.backoff", _BACKOFF
    ),
    PrivatePart(
        "flwr.supercore.inflatable.inflatable_utils.pull_and_inflate_object_from_tree",
        ("initial_backoff",),
        "flower.backoff",
        _BACKOFF,
    ),
    PrivatePart(
        "flwr.superlink.cli.flower_superlink.generic_create_grpc_server",
        ("servicer_and_add_fn", "max_message_length", "certificates"),
        "deploy.superlink",
        "limits the messages of the Fleet API, and requires certificates of clients",
    ),
    PrivatePart(
        "flwr.superlink.main.create_app",
        ("config", "superlink_lifespan_class"),
        "deploy.client_port",
        "serves the Fleet API on a port of its own",
        over_http=True,
    ),
    PrivatePart("flwr.supercore.constant.FLEET_HTTP_PUBLIC_KEY_HEADER", (), "deploy.fleet", _NODE, over_http=True),
    PrivatePart("flwr.supercore.constant.FLEET_HTTP_SIGNATURE_HEADER", (), "deploy.fleet", _NODE, over_http=True),
    PrivatePart(
        "flwr.supercore.primitives.asymmetric.verify_signature",
        ("public_key", "message", "signature"),
        "deploy.client_port",
        _NODE,
        over_http=True,
    ),
    PrivatePart(
        "flwr.superlink.routers.fleet.router.router", (), "deploy.client_port", "has its paths", over_http=True
    ),
    PrivatePart(
        "flwr.supernode.fleet_http_connection.FleetHttpClient.from_server_address",
        ("server_address", "insecure", "root_certificates", "interceptors"),
        "deploy.supernode",
        "presents the certificate of the node",
        over_http=True,
    ),
    PrivatePart(
        "flwr.supernode.start_client_internal._pull_and_store_message",
        ("state", "object_store", "receive", "get_run", "get_fab"),
        "deploy.supernode",
        _PULL,
    ),
    PrivatePart(
        "flwr.supernode.start_client_internal._insert_message",
        ("msg", "state", "store"),
        "deploy.supernode",
        "replies with an error to a run whose app is not the pinned one",
    ),
    PrivatePart("flwr.supernode.start_client_internal.FAB_VERIFICATION_ERROR", (), "deploy.supernode", "that error"),
    PrivatePart(
        "flwr.supernode.start_client_internal._push_messages", (), "deploy.supernode", "runs after the wait that ends"
    ),
    PrivatePart("flwr.supernode.start_client_internal.time.sleep", (), "deploy.supernode", _WAKE),
    PrivatePart(
        "flwr.supernode.start_client_internal.subprocess.Popen",
        (),
        "deploy.supernode",
        "starts Coterie's SuperExec, which imports PyTorch once",
    ),
    PrivatePart(
        "flwr.superlink.cli.flower_superlink.subprocess.Popen",
        (),
        "deploy.superexec_watch",
        "notices the end of the SuperExec of a server",
    ),
    PrivatePart(
        "flwr.superlink.servicer.runtime.runtime_handlers.acquire_task",
        (),
        "deploy.superexec_watch",
        "says when the SuperExec of a server is stopped",
    ),
    PrivatePart(f"{_STATE}.finish_task", ("task_id",), "deploy.supernode", _LOST),
    PrivatePart(f"{_STATE}._on_task_tokens_expired", ("tasks",), "deploy.supernode", _LOST),
    PrivatePart(f"{_STATE}._store_error_replies", ("run_ids", "error"), "deploy.supernode", _LOST),
    PrivatePart("flwr.supernode.servicer.runtime.runtime_handlers.acquire_task", (), "deploy.supernode", _WAKE),
    PrivatePart("flwr.supernode.servicer.runtime.runtime_handlers.push_messages", (), "deploy.supernode", _WAKE),
    PrivatePart("flwr.supernode.servicer.runtime.runtime_handlers.push_object", (), "deploy.supernode", _WAKE),
    PrivatePart(
        "flwr.supercore.superexec.run_superexec.get_executor", (), "deploy.superexec", "forks a process for a message"
    ),
    PrivatePart(
        "flwr.supercore.superexec.run_superexec.time.sleep", (), "deploy.superexec", "starts a message without a pause"
    ),
    PrivatePart(
        "flwr.supercore.superexec.executor.subprocess_executor.subprocess.Popen",
        (),
        "deploy.superexec",
        "says how the process of an app ended",
    ),
    PrivatePart(
        "flwr.supernode.runtime.run_clientapp.install_from_fab",
        (),
        "deploy.clientapp",
        "uses an app that is already imported",
    ),
    PrivatePart(
        "flwr.supernode.runtime.run_clientapp.get_load_client_app_fn",
        (),
        "deploy.clientapp",
        "gives random generators new seeds after the import of an app",
    ),
    PrivatePart("flwr.superlink.grid.http_grid.HttpGrid.pull_messages", ("message_ids",), "flower.grid", _INFLATE),
    PrivatePart("flwr.superlink.grid.http_grid.HttpGrid.push_messages", ("messages",), "flower.grid", "calls it again"),
    PrivatePart(
        "flwr.superlink.grid.http_grid.HttpGrid.send_and_receive",
        ("messages", "timeout"),
        "flower.grid",
        "sends lost requests again",
    ),
    PrivatePart(
        "flwr.supercore.task_identity.TaskIdentity", (), "engine.nodes", "names the sender of messages in a simulation"
    ),
    PrivatePart("flwr.common.serde.recorddict_to_proto", (), "client.reply_cache", "stores a reply as Flower sends it"),
    PrivatePart("flwr.common.serde.recorddict_from_proto", (), "client.reply_cache", "reads it"),
)


def check(*users: str) -> None:
    """Check that the installed Flower has the private parts that some modules rely on.

    Args:
        users: modules, as :attr:`PrivatePart.user` names them.

    Raises:
        DeployError: it lacks a part, or one has other parameters; a line for each.
    """
    parts = [part for part in PRIVATE if part.user in users and (nodes_speak_http() or not part.over_http)]
    if problems := [problem for part in parts if (problem := _problem(part))]:
        raise DeployError(
            f"flwr {version('flwr')} is not supported: install flwr{SUPPORTED}\n"
            + "\n".join(f"  {it}" for it in problems)
        )


def find(name: str) -> Any:
    """Return a part of Flower by its dotted name. Raises ImportError or AttributeError if there is none."""
    module, attributes = name, list[str]()
    while True:
        try:
            part = import_module(module)
            break
        except ModuleNotFoundError:
            module, _, attribute = module.rpartition(".")
            if not module:
                raise
            attributes.insert(0, attribute)
    for attribute in attributes:
        part = getattr(part, attribute)
    return part


def _problem(part: PrivatePart) -> str:
    """Return how a part differs from what its user relies on; empty if it does not."""
    try:
        found = find(part.name)
    except (ImportError, AttributeError):
        return f"it has no {part.name} (coterie.{part.user} {part.reason})"
    if not part.parameters:
        return ""
    missing = set(part.parameters) - set(inspect.signature(found).parameters)
    names = ", ".join(name for name in part.parameters if name in missing)
    return f"{part.name} has no parameter {names} (coterie.{part.user} {part.reason})" if missing else ""
