"""The ClientApp: it chooses a model, trains it, and answers in Coterie's contract of messages."""

from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.nn.functional import cross_entropy

from coterie.wire import read_request
from coterie.wire.messages import pack_reply
from flower_app.task import Net, load_partition

app = ClientApp()


def chosen(models: Any, layout: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[Net, int]:
    """Return the model with the smallest loss, and its index."""
    networks = [Net() for _ in models]
    for network, vector in zip(networks, models, strict=True):  # load_state_dict refuses other parameters
        network.load_state_dict({k: torch.tensor(v) for k, v in layout.split(vector).items()})
    best = int(np.argmin([cross_entropy(network(x), y).item() for network in networks]))
    return networks[best], best


@app.query("identity")
def identity(message: Message, context: Context) -> Message:
    """Answer which client this is."""
    client = int(context.node_config["partition-id"])
    return Message(RecordDict({"reply": ConfigRecord({"client-id": client})}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Answer with the update of the chosen model, and with its cluster."""
    request, models, layout = read_request("train", message.content)  # refuses what is malformed
    client, lr = int(context.node_config["partition-id"]), float(message.content["config"]["lr"])
    x, y, _, _ = load_partition(client, int(context.node_config["num-partitions"]))
    network, best = chosen(models, layout, x, y)
    optimizer = torch.optim.SGD(network.parameters(), lr=lr)
    for batch in torch.randperm(len(y)).repeat(4).split(8):
        optimizer.zero_grad()
        cross_entropy(network(x[batch]), y[batch]).backward()
        optimizer.step()
    update = layout.flatten({k: v.detach() for k, v in network.state_dict().items()}) - models[best]
    label = best if request.cluster is None else request.cluster  # the server may have assigned the cluster
    redrawn = request.redraw_label(label, np.random.default_rng())
    reply = pack_reply(update, layout, client_id=client, round=request.round, label=label, redrawn_label=redrawn)
    return Message(reply, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Answer with the accuracy on held-out data, exact and outside the guarantee."""
    _, models, layout = read_request("evaluate", message.content)
    x, y, *test = load_partition(int(context.node_config["partition-id"]), int(context.node_config["num-partitions"]))
    accuracy = (chosen(models, layout, x, y)[0](test[0]).argmax(1) == test[1]).float().mean().item()
    return Message(RecordDict({"diagnostics": MetricRecord({"accuracy": accuracy})}), reply_to=message)
