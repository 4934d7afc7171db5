"""A small app with its own DP training, and a grid that runs ClientApps in this process."""

import itertools

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from coterie.engine.nodes import SingleProcessGrid

QUIET = [
    pytest.mark.filterwarnings("ignore:Secure RNG turned off"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
]
N, BATCH, STEPS = 40, 8, 5
TERMS = {"epsilon": 8.0, "delta": 1e-3, "num-examples": N}


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def records(count=N):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(count, 4, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long())


def private(model, noise=1.0, count=N, batch=BATCH, engine=None, lr=0.1, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    loader = DataLoader(records(count), batch_size=batch)
    return (engine or PrivacyEngine(accountant="rdp")).make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=noise, max_grad_norm=1.0, **options
    )


def epoch(model, optimizer, loader):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def dp_training(model, config):
    """The training of an honest app."""
    parts = private(model, config.get("noise", 1.0), int(config.get("count", N)))
    for _ in range(int(config.get("epochs", 1))):
        epoch(*parts)


def client_app(guard, train=dp_training, metrics=None, reply=None, make=net):
    """An app that trains ``make()`` by ``train(model, config)``, which may return another model to send.

    ``reply`` changes what it sends.
    """
    app = ClientApp(mods=[guard])

    @app.train()
    def _(message, context):
        model = make()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        trained = train(model, dict(message.content["config"]))
        model = trained if isinstance(trained, nn.Module) else model
        content = RecordDict(
            {
                "arrays": ArrayRecord(model.state_dict()),
                "metrics": MetricRecord({"num-examples": 17, "train_loss": 0.125} if metrics is None else metrics),
                "secrets": ConfigRecord({"text": "of a record"}),
            }
        )
        return Message(reply(content) if reply else content, reply_to=message)

    @app.evaluate()
    def _(message, context):
        content = RecordDict({"m": MetricRecord({"num-examples": 17, "accuracy": 0.75, "loss": 1.5})})
        return Message(content, reply_to=message)

    @app.query("records")
    def _(message, context):
        return Message(RecordDict({"x": ArrayRecord([records().tensors[0].numpy()])}), reply_to=message)

    return app


def identify():
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1


_IDS = itertools.count(1)


def message(kind="train", model=None, node=1, **config):
    if TaskIdentity._run_id is None:
        identify()
    arrays = ArrayRecord((model or net()).state_dict())
    content = RecordDict({"arrays": arrays, "config": ConfigRecord(config)})
    made = Message(content, dst_node_id=node, message_type=kind)
    made.metadata.__dict__["_message_id"] = str(next(_IDS))
    return made


def context(run=7, **node):
    return Context(run_id=run, node_id=1, node_config=node, state=RecordDict(), run_config={})


class InProcess(SingleProcessGrid):
    """Node i, from 1, is ``sites[i - 1]``: an app and its node configuration."""

    def __init__(self, sites):
        identify()
        super().__init__(len(sites))
        self.sites, self.sent = sites, []

    def _answers(self, requests):
        raise NotImplementedError

    def send_and_receive(self, messages, *, timeout=None):
        for each in messages:
            each.metadata.__dict__["_message_id"] = str(next(_IDS))
            node = each.metadata.dst_node_id
            self.sent.append((node, each.metadata.message_type))
            app, config = self.sites[node - 1]
            reply = app(each, context(**config))
            reply.metadata.__dict__["_src_node_id"] = node
            yield reply
