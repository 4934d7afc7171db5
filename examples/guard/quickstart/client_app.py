"""The ClientApp."""

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from quickstart.task import Net, load_data
from quickstart.task import test as test_fn
from quickstart.task import train as train_fn

app = ClientApp()


def prepare(msg, context):
    """Return the received model, and the client's loaders."""
    net = Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    return net, *load_data(context.node_config["partition-id"], context.node_config["num-partitions"])


@app.train()
def train(msg, context):
    """Train the model on the client's records."""
    net, loader, _ = prepare(msg, context)
    loss = train_fn(net, loader, context.run_config["local-epochs"], context.run_config["noise-multiplier"])
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(loader.dataset)})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=msg)


@app.evaluate()
def evaluate(msg, context):
    """Test the model on the client's held-out records."""
    net, _, loader = prepare(msg, context)
    metrics = MetricRecord({"accuracy": test_fn(net, loader), "num-examples": len(loader.dataset)})
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)
