"""The Flower ClientApp: validates a message, and calls its handler in :mod:`coterie.client.handlers`."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from logging import ERROR, INFO, WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.logger import log

from coterie import logs
from coterie import models as networks
from coterie.client.identity import Client, identity_reply
from coterie.client.state import ClientError
from coterie.datasets import DATASETS, OWN_DATA, DataError, Declared, facts
from coterie.wire.messages import CENTROIDS, CHARGED_REQUESTS, EVALUATE, GAN, IDENTITY, LABEL, LOSSES, TRAIN

if TYPE_CHECKING:
    from coterie.client.cohort import Cohort
    from coterie.client.handlers import ReplyOrError


def _handle(message: Message, context: Context) -> Message:
    began = time.monotonic()
    node = context.node_config
    deployed = "client-id" in node
    client = _deployed(node) if deployed else Client(int(node["partition-id"]))
    group = message.metadata.group_id  # of messages of a round: its number
    logs.install(
        run=str(context.run_id),
        node=str(context.node_id),
        client=node.get("client-id", node.get("partition-id")),
        round=int(group) if group.isdigit() else None,
    )
    message_type, content = message.metadata.message_type, message.content
    try:
        reply = identity_reply(client) if message_type == IDENTITY else _reply_to(message_type, content, client, node)
        if deployed and message_type != IDENTITY and isinstance(reply, RecordDict):
            from coterie.flower.sizes import fix_size

            fix_size(reply)
    except Exception as error:
        if isinstance(error, ClientError) or not deployed:
            raise
        # Flower sends the text of an exception to the server, and the text may contain data.
        log(ERROR, "client %s: %s", client.client_id, error, exc_info=True)
        raise ClientError(f"client {client.client_id} failed; see its own log for details") from None
    finally:
        _wait(began, node)
    if isinstance(reply, ClientError):
        raise reply
    return Message(reply, reply_to=message)


def _deployed(node: Mapping[str, Any]) -> Client:
    """Return the client of a node configuration.

    Raises:
        ClientError: the configuration contradicts itself.
    """
    if ("epsilon" in node) != ("delta" in node):
        raise ClientError("epsilon and delta form one budget: set both or neither in the node configuration")
    budget = (float(node["epsilon"]), float(node["delta"])) if "epsilon" in node else None
    if budget and not (0 < budget[0] < math.inf and 0 < budget[1] < 1):
        raise ClientError("a budget requires a finite epsilon above 0 and a delta between 0 and 1")
    for key in ("data", "budget-file", "schema"):
        if key in node and not os.path.isabs(str(node[key])):
            raise ClientError(f"{key} in the node configuration must be an absolute path")
    declared = _declared(node)
    if budget and "data" in node and declared is None:
        raise ClientError(
            "a client with a budget must declare its data, so that rejections reveal nothing about them: set "
            "input-shape and num-classes, or schema, in the node configuration (coterie client --input-shape "
            "--num-classes, or --schema)"
        )
    return Client(
        int(node["client-id"]),
        str(node.get("state-dir", "")),
        budget,
        diagnostics=str(node.get("diagnostics", "")).lower() == "true",
        data=str(node["data"]) if "data" in node else None,
        declared=declared,
        budget_file=str(node["budget-file"]) if "budget-file" in node else None,
    )


def _declared(node: Mapping[str, Any]) -> Declared | None:
    """Return what the owner of the data declares about them; None: nothing.

    Raises:
        ClientError: the declaration contradicts itself, or has errors. Those of a schema are in the client's own log,
            since its path may name private data by mistake.
    """
    if "schema" in node:
        if clash := {"input-shape", "num-classes", "value-range"} & node.keys():
            raise ClientError(f"node configuration: schema and {min(clash)} exclude each other; leave out one of them")
        try:
            return Declared.load(Path(str(node["schema"])))
        except DataError as error:
            log(ERROR, "%s", error)
            raise ClientError("node configuration: the schema has errors; see the client's own log") from None
    if ("input-shape" in node) != ("num-classes" in node):
        raise ClientError("input-shape and num-classes declare the data: set both or neither in the node configuration")
    if "input-shape" not in node:
        return None
    try:
        return Declared.parse(str(node["input-shape"]), node["num-classes"], str(node.get("value-range", "")))
    except DataError as error:
        raise ClientError(f"node configuration: {error}") from None


def _validated(message_type: str, content: RecordDict, client: Client, node: Mapping[str, Any]) -> Cohort:
    """Parse a request, and validate it against bounds and the node configuration; drop the server's data path.

    This does not read the client's data: neither text nor time of a rejection depends on them.

    Raises:
        ClientError: a field is out of bounds, the request is for other data, or it names code that is not allowed.
    """
    from coterie.client.cohort import Cohort
    from coterie.wire import RequestError

    who = f"client {client.client_id} rejects the request"
    try:
        # LOSSES: a diverged model of another client gets the largest loss
        cohort = Cohort.of(message_type, content, [client], finite=message_type != LOSSES)
    except RequestError as error:
        raise ClientError(f"{who}: {error}") from None
    config = cohort.config
    if config.dataset == OWN_DATA and client.data is None:
        raise ClientError(
            f"{who}: the run uses the clients' own data, but no data are configured; set data in the node configuration"
        )
    # An entry point is code, too; an unknown name gets the same reply, which does not reveal what is installed.
    for key, value, known in (
        ("dataset", config.dataset, (*DATASETS, OWN_DATA)),
        ("model", config.model, networks.MODELS),
        ("features", config.features, networks.FEATURES),
    ):
        if value not in known and value not in str(node.get("code", "")).split():
            raise ClientError(
                f"{who}: {key} = {value!r} names code chosen by the server; to allow it, list it under code in the "
                "node configuration"
            )
    if client.data is not None and client.declared is None and config.table_schema:
        raise ClientError(
            f"{who}: the run reads tables by a schema, but the node configuration declares none; set schema (coterie "
            "client --schema)"
        )
    if client.data is not None and client.declared is not None:
        declared = client.declared
        asked = facts(config.dataset, config.input_shape, config.num_classes, None, config.table_schema)
        if (asked.shape, asked.num_classes, asked.fingerprint) != (
            declared.shape,
            declared.num_classes,
            declared.fingerprint,
        ):
            raise ClientError(f"{who}: it is for {asked}, but the node configuration declares {declared}")
    return replace(cohort, config=replace(config, data_dir=""))


def _reply_to(message_type: str, content: RecordDict, client: Client, node: Mapping[str, Any]) -> ReplyOrError:
    """Return the reply: the cached one if the request was charged before, otherwise a new one."""
    from coterie.client.handlers import HANDLERS, handle  # imports PyTorch
    from coterie.client.reply_cache import ReplyCache

    if not client.deployed:
        return handle(message_type, content, [client])[0]
    cohort = _validated(message_type, content, client, node)
    if not (client.folder and message_type in CHARGED_REQUESTS and cohort.plans):
        return HANDLERS[message_type](cohort)[0]
    cache = ReplyCache(Path(client.folder), client.client_id)
    with cache.lock():
        if (cached := cache.get(message_type, content)) is not None:
            log(INFO, "client %s replays the cached reply to a repeated request", client.client_id)
            return cached
        reply = HANDLERS[message_type](cohort)[0]
        if isinstance(reply, RecordDict):
            cache.put(message_type, content, reply)
        return reply


def _wait(began: float, node: Mapping[str, Any]) -> None:
    """Delay the reply to ``reply-seconds`` of the node configuration, so that its time reveals less."""
    least = float(node.get("reply-seconds", 0.0))
    taken = time.monotonic() - began
    if least and taken > least:
        log(WARNING, "a reply took %.3g s, longer than reply-seconds = %g: increase reply-seconds", taken, least)
    time.sleep(max(0.0, least - taken))


app = ClientApp()
_KINDS = {"train": app.train, "query": app.query, "evaluate": app.evaluate}
for _message_type in (TRAIN, GAN, CENTROIDS, LOSSES, EVALUATE, LABEL, IDENTITY):
    _kind, _, _action = _message_type.partition(".")
    (_KINDS[_kind](_action) if _action else _KINDS[_kind]())(_handle)
