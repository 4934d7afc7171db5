"""Requests of a server, and what a deployed client replies."""

from flwr.app import ConfigRecord, Context, Message, RecordDict

from coterie.client.app import app
from coterie.engine.in_process import LocalGrid
from coterie.models import initialise
from coterie.wire.messages import Layout, pack_models

#: Settings of runs on clients' own images, and of one at record level in which a client has 24 records.
OWN = {"dataset": "own", "input-shape": "1x4x4", "num-classes": 2, "model": "linear", "device": "cpu"}
RECORDS = {**OWN, "clients": 3, "clusters": 1, "strategy": "fedavg", "privacy-unit": "record", "rounds": 2}
RECORDS |= {"samples-per-client": 24, "batch-size": 8, "epsilon": 4.0}


def request_of(config, **fields):
    """Content of a message in round 1 with the initial linear network, whose layout is returned too.

    Args:
        config: Configuration of the run.
        fields: Further fields of the request.
    """
    drawn = initialise("linear", *config.examples, 0)
    layout = Layout.of(drawn)
    plans = {"record-plans": config.plan.record_plans} if config.privacy.privacy_unit == "record" else {}
    record = ConfigRecord({**config.for_clients(), "round": 1, **plans, **fields})
    return RecordDict({"models": pack_models(layout.flatten(drawn)[None], layout), "config": record}), layout


def reply_of(node, content, message_type="train", run=1):
    """Content of a client's reply; a client without a budget trusts the server.

    Args:
        node: Node configuration.
        content: Content of the message.
        message_type: Type of the message.
        run: Id of the run.
    """
    LocalGrid(1)  # messages have a sender
    guarantee = {} if "epsilon" in node else {"guarantee": "trusted-server"}
    message = Message(content, dst_node_id=1, message_type=message_type)
    return app(message, Context(run, 1, {"client-id": 0, **guarantee, **node}, RecordDict(), {})).content
