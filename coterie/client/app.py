"""The Flower ClientApp: the verbs of :mod:`coterie.client.verbs`, for the one client of this node."""

from __future__ import annotations

import os
from collections.abc import Mapping
from logging import ERROR, INFO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.logger import log

from coterie import logs
from coterie.messages import CENTROIDS, CONFIG, EVALUATE, GAN, IDENTITY, LABEL, LOSSES, PAID, TRAIN

if TYPE_CHECKING:
    from coterie.client import Answer, Client


def _answer(message: Message, context: Context) -> Message:
    from coterie.client import Client, ClientError  # imports torch: a node that only says who it is need not

    node = context.node_config
    if "client-id" in node:  # a real one: no server tells it what to read, import or write
        if ("epsilon" in node) != ("delta" in node):
            raise ClientError("a client's budget is epsilon and delta: set both in its node configuration, or neither")
        budget = (float(node["epsilon"]), float(node["delta"])) if "epsilon" in node else None
        diagnostics = str(node.get("diagnostics", "")).lower() == "true"
        data = str(node["data"]) if "data" in node else None
        client = Client(int(node["client-id"]), str(node.get("state-dir", "")), budget, diagnostics, data)
        content = _harmless(message.content, node)
    else:
        client, content = Client(int(node["partition-id"])), message.content
    group = message.metadata.group_id  # of messages of a round: its number
    logs.install(
        run=str(context.run_id),
        node=str(context.node_id),
        client=node.get("client-id", node.get("partition-id")),
        round=int(group) if group.isdigit() else None,
    )
    verb = message.metadata.message_type
    try:
        answer = _answered(verb, content, client)
    except Exception as error:
        if isinstance(error, ClientError) or client.folder is None:
            raise
        # Flower sends the server what an exception says, and one about data may quote them.
        log(ERROR, "client %s: %s", client.client_id, error, exc_info=True)
        raise ClientError(f"client {client.client_id} failed; its own log says why") from None
    if isinstance(answer, ClientError):
        raise answer
    return Message(answer, reply_to=message)


def _answered(verb: str, content: RecordDict, client: Client) -> Answer:
    """What the verb says; the same again, and unpaid, to the same question that was paid for."""
    from coterie.client import VERBS
    from coterie.client.answers import Answers

    if not (client.folder and verb in PAID and content[CONFIG].get("record-plans", "[]") != "[]"):
        return VERBS[verb](content, [client])[0]
    answers = Answers(Path(client.folder), client.client_id)
    with answers.alone():
        if (said := answers.to(verb, content)) is not None:
            log(INFO, "client %s is asked the same again, and says the same", client.client_id)
            return said
        answer = VERBS[verb](content, [client])[0]
        if isinstance(answer, RecordDict):
            answers.keep(verb, content, answer)
        return answer


def _harmless(content: RecordDict, node: Mapping[str, Any]) -> RecordDict:
    """What a server asks of a deployed client, without the path of data.

    Raises:
        ClientError: it asks for own data that there are not, or for code that the node configuration does not list.
    """
    from coterie.client import ClientError
    from coterie.datasets import OWN_DATA

    if CONFIG not in content:
        return content
    who, config = f"client {node['client-id']} refuses", content[CONFIG]
    if "data" in node and not os.path.isabs(str(node["data"])):
        raise ClientError(f"{who}: data in its node configuration must be an absolute path")
    if config["dataset"] == OWN_DATA and "data" not in node:
        raise ClientError(
            f"{who}: the run is on clients' own data, and it has none; set data in its node configuration"
        )
    for key in ("dataset", "model"):
        if ":" in config[key] and config[key] not in str(node.get("code", "")).split():
            raise ClientError(
                f"{who}: {key} = {config[key]!r} is code of the server's choice; to allow it, name it in code of the "
                "client's node configuration"
            )
    return RecordDict({**content, CONFIG: ConfigRecord({**config, "data-dir": ""})})


app = ClientApp()
_KINDS = {"train": app.train, "query": app.query, "evaluate": app.evaluate}
for _verb in (TRAIN, GAN, CENTROIDS, LOSSES, EVALUATE, LABEL, IDENTITY):
    _kind, _, _action = _verb.partition(".")
    (_KINDS[_kind](_action) if _action else _KINDS[_kind]())(_answer)
