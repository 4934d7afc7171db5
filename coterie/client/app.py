"""The Flower ClientApp: the verbs of :mod:`coterie.client.verbs`, for the one client of this node."""

from __future__ import annotations

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from coterie import logs
from coterie.messages import CENTROIDS, EVALUATE, GAN, IDENTITY, LABEL, LOSSES, TRAIN


def _answer(message: Message, context: Context) -> Message:
    from coterie.client import VERBS, Client, ClientError  # imports torch: a node that only says who it is need not

    node = context.node_config
    group = message.metadata.group_id  # of messages of a round: its number
    logs.install(
        run=str(context.run_id),
        node=str(context.node_id),
        client=node.get("client-id", node.get("partition-id")),
        round=int(group) if group.isdigit() else None,
    )
    if "client-id" in node:  # a real one: no server tells it where on its disk to write
        if ("epsilon" in node) != ("delta" in node):
            raise ClientError("a client's budget is epsilon and delta: set both in its node configuration, or neither")
        budget = (float(node["epsilon"]), float(node["delta"])) if "epsilon" in node else None
        diagnostics = str(node.get("diagnostics", "")).lower() == "true"
        client = Client(int(node["client-id"]), str(node.get("state-dir", "")), budget, diagnostics)
    else:
        client = Client(int(node["partition-id"]))
    verb = message.metadata.message_type
    answer = VERBS[verb](message.content, [client])[0]
    if isinstance(answer, ClientError):
        raise answer
    return Message(answer, reply_to=message)


app = ClientApp()
_KINDS = {"train": app.train, "query": app.query, "evaluate": app.evaluate}
for _verb in (TRAIN, GAN, CENTROIDS, LOSSES, EVALUATE, LABEL, IDENTITY):
    _kind, _, _action = _verb.partition(".")
    (_KINDS[_kind](_action) if _action else _KINDS[_kind]())(_answer)
