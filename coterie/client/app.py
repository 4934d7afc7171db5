"""The Flower ClientApp: the verbs of :mod:`coterie.client.verbs`, for the one client of this node."""

from __future__ import annotations

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from coterie.messages import EVALUATE, IDENTITY, TRAIN


def _answer(message: Message, context: Context) -> Message:
    from coterie.client.verbs import VERBS, Client  # imports torch: a node that only says who it is need not

    node = context.node_config
    client_id = int(node["client-id"] if "client-id" in node else node["partition-id"])
    client = Client(client_id, str(node["state-dir"]) if "state-dir" in node else None)
    verb = message.metadata.message_type
    return Message(VERBS[verb](message.content, [client])[0], reply_to=message)


app = ClientApp()
for _verb, _register in ((TRAIN, app.train), (EVALUATE, app.evaluate), (IDENTITY, app.query)):
    _, _, _action = _verb.partition(".")
    (_register(_action) if _action else _register())(_answer)
