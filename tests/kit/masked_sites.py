"""Sites of a federation with a roster, each a deployed client, and the server's side of a masked round."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

from coterie.cli.audit_log import read_audit_log
from coterie.client.app import app
from coterie.client.state import ClientError
from coterie.engine.in_process import LocalGrid
from coterie.models import initialise
from coterie.privacy import PLANS, read_ledger
from coterie.privacy.secure_aggregation import MaskingClient, to_modulus, unmasked_sum
from coterie.server import RunConfig
from coterie.wire.masked import (
    OpenRequest,
    SignedKey,
    SurvivorsRequest,
    UnmaskRequest,
    opened_fields,
    read_masked,
    read_opening,
    read_shares,
    read_signature,
    task_digest,
)
from coterie.wire.messages import CONFIG, IDENTITY, MODELS, REPLY, Layout, pack_models
from coterie.wire.requests import MaskedEvaluateRequest, MaskedTrainRequest
from kit.deployed import OWN

STEPS = ("train.open", "train.masked", "train.survivors", "train.unmask")
SHAPE, CLASSES, RECORDS, CLUSTERS = (1, 4, 4), 2, 24, 2
LAYOUT = Layout.of(initialise("linear", SHAPE, CLASSES, 0))
CONFIGURED = RunConfig(
    {
        **OWN,
        "clients": 10,
        "clusters": CLUSTERS,
        "strategy": "ifca",
        "privacy-unit": "none",
        "batch-size": 8,
        "rounds": 3,
    }
).for_clients()
MODELS_SENT = np.random.default_rng(7).normal(size=(CLUSTERS, LAYOUT.size)).astype(np.float32)


def plan_of(clients=10, **changes):
    """A plan whose every round has all clients."""
    numbers = {
        "clients": clients,
        "num_clusters": CLUSTERS,
        "sampling_rate": 1.0,
        "rounds": 3,
        "epsilon": 8.0,
        "delta": 1e-4,
        "clip_norm": 1.0,
    }
    return PLANS["secure"].calibrated(**{**numbers, **changes})


class Sites:
    """The machines of all clients: data, state, and what leaves them.

    Args:
        path: an empty folder.
        pki: certificates, keys and roster, as coterie certs makes them.
        clients: how many.
        node: further keys of every node configuration.
    """

    def __init__(self, path, pki, clients, **node):
        LocalGrid(1)  # messages have a sender
        self.path, self.run = path, 5
        self.nodes = {}
        rng = np.random.default_rng(3)
        for client in range(clients):
            folder = path / f"site-{client}"
            (folder / "data").mkdir(parents=True)
            x, y = rng.integers(0, 256, (RECORDS, *SHAPE)).astype(np.int64), np.arange(RECORDS) % 2
            np.savez(folder / "data" / "train.npz", x=x, y=y)
            self.nodes[client] = {
                "client-id": client,
                "data": str(folder / "data"),
                "state-dir": str(folder / "state"),
                "input-shape": "1x4x4",
                "num-classes": CLASSES,
                "roster": str(pki / "roster.json"),
                "key": str(pki / "nodes" / f"node-{client}.key"),
                "guarantee": "masked-sums",
                "min-cohort": 6,
                "min-corrupt": 1,
                **node,
            }

    def ask(self, client, message_type, content):
        """Return the reply to a message, as a ClientApp that has just been started gives it."""
        message = Message(content, dst_node_id=1, message_type=message_type)
        return app(message, Context(self.run, 1, self.nodes[client], RecordDict(), {})).content

    def refusal(self, client, message_type, content):
        """Return the text of an error; whatever else leaves is a failure."""
        with pytest.raises(ClientError) as refused:
            self.ask(client, message_type, content)
        assert refused.value.__cause__ is None
        return str(refused.value)

    def key(self, client):
        """Return the signed key in the identity reply."""
        return SignedKey.from_record(self.ask(client, IDENTITY, RecordDict()).config_records[REPLY])

    def state(self, client, ending):
        """Return a file of a client's state folder."""
        return self.path / f"site-{client}" / "state" / f"client-{client}.{ending}"

    def charges(self, client):
        """Return the charges of a client."""
        own, budget = (
            self.state(client, "ledger.jsonl"),
            self.path / f"site-{client}" / "data" / ".coterie-budget.jsonl",
        )
        return next((read_ledger(path)[1] for path in (budget, own) if path.exists()), [])

    def log(self, client):
        """Return the audit log of a client."""
        return read_audit_log(self.state(client, "audit.jsonl"))[0]


@dataclass
class Server:
    """The server's side of one round; a hostile one changes what it sends.

    Attributes:
        sites: of all clients.
        plan: of the run.
        number: of the round.
        attempt: of the round.
        keys: signed keys of the cohort.
        following: their keys for a later round.
        layout: of a model.
        shared: number of its leading parameters that all clusters share.
        models: that are sent.
        training: fields of requests to train, or to evaluate.
        release: what the round releases.
    """

    sites: Sites
    plan: object
    number: int = 1
    attempt: int = 0
    keys: dict = field(default_factory=dict)
    layout: Layout = LAYOUT
    shared: int = 0
    models: object = field(default_factory=lambda: MODELS_SENT)
    training: dict = field(default_factory=dict)
    release: str = "training"
    openings: dict = field(default_factory=dict)
    following: dict = field(default_factory=dict)
    vectors: dict = field(default_factory=dict)
    views: dict = field(default_factory=dict)
    signatures: dict = field(default_factory=dict)
    shares: dict = field(default_factory=dict)

    def __post_init__(self):
        members = self.plan.members(self.number) if self.release == "training" else range(self.plan.clients)
        self.cohort = [int(client) for client in members]
        self.keys = self.keys or {client: self.sites.key(client) for client in self.cohort}

    @property
    def bound(self):
        return {"run": "run", "round": self.number, "attempt": self.attempt}

    @property
    def open_request(self):
        keys = [self.keys[client] for client in self.cohort]
        return OpenRequest(
            **self.bound,
            release=self.release,
            plan=json.dumps(self.plan.terms()),
            parameters=self.layout.size,
            shared=self.shared,
            cohort=tuple(self.cohort),
            **OpenRequest.key_lists(keys),
        )

    @property
    def second(self):
        """Type of the message of step 2."""
        return "train.masked" if self.release == "training" else "evaluate.masked"

    @property
    def round(self):
        return self.open_request.masked_round(self.plan)

    @property
    def next_keys(self):
        """Signed keys of the cohort for a later round."""
        return {**self.keys, **self.following}

    # ---- the messages ------------------------------------------------------------------------------------------------

    def open_content(self, **changes):
        request = self.open_request
        return RecordDict({CONFIG: ConfigRecord({**CONFIGURED, **(replace(request, **changes)).to_record()})})

    def train_content(self, client, models=None, config=(), **changes):
        models = self.models if models is None else models
        if self.release == "training":
            request = MaskedTrainRequest(**self.bound, **opened_fields(self.openings, client), **self.training)
        else:
            asked = {"private": True, "histogram": self.release == "histogram", **self.training}
            request = MaskedEvaluateRequest(**self.bound, **opened_fields(self.openings, client), **asked)
        record = {**CONFIGURED, **replace(request, **changes).to_record(), **dict(config)}
        return RecordDict({MODELS: pack_models(models, self.layout), CONFIG: ConfigRecord(record)})

    def survivors_content(self, survivors=None, **changes):
        listed = tuple(sorted(self.vectors) if survivors is None else survivors)
        views = {"view_signatures": tuple(self.views.get(client, b"") for client in listed)}
        request = SurvivorsRequest(**{**self.bound, **views, **changes}, survivors=listed)
        return RecordDict({CONFIG: ConfigRecord(request.to_record())})

    def unmask_content(self, signatures=None, **changes):
        given = self.signatures if signatures is None else signatures
        listed = tuple(sorted(given))
        request = UnmaskRequest(
            **{**self.bound, **changes}, signers=listed, signatures=tuple(given[client] for client in listed)
        )
        return RecordDict({CONFIG: ConfigRecord(request.to_record())})

    def content(self, step, client):
        """The honest message of a step of training."""
        made = (self.open_content, lambda: self.train_content(client), self.survivors_content, self.unmask_content)
        return made[STEPS.index(step)]()

    # ---- the steps ---------------------------------------------------------------------------------------------------

    def open(self, clients=None):
        for client in self.cohort if clients is None else clients:
            reply = self.sites.ask(client, "train.open", self.open_content())
            key = self.keys[client]
            self.openings[client], self.following[client] = read_opening(
                reply, client_id=client, round=self.round, key=key
            )

    def train(self, clients=None):
        for client in sorted(self.openings) if clients is None else clients:
            content = self.train_content(client)
            self.read_vector(client, self.sites.ask(client, self.second, content), content)

    def read_vector(self, client, reply, content):
        """Read a reply to step 2 and its message."""
        expected = {"key": self.keys[client], "view": self.round.view(self.openings, task_digest(content))}
        self.vectors[client], self.views[client] = read_masked(reply, client_id=client, round=self.round, **expected)

    def sign(self, clients=None):
        for client in sorted(self.vectors) if clients is None else clients:
            reply = self.sites.ask(client, "train.survivors", self.survivors_content())
            self.signatures[client] = read_signature(reply, client_id=client, round=self.round)

    def unmask(self, clients=None):
        for client in sorted(self.signatures) if clients is None else clients:
            reply = self.sites.ask(client, "train.unmask", self.unmask_content())
            self.shares[client] = read_shares(reply, client_id=client, round=self.round)

    @property
    def steps(self):
        return self.open, self.train, self.sign, self.unmask

    def run(self, first=STEPS[0]):
        """Go on honestly from a step, and return the sum."""
        for step in self.steps[STEPS.index(first) :]:
            step()
        return self.total()

    def total(self):
        return unmasked_sum(self.round, self.openings, self.vectors, self.shares)[0]


def opened(path, pki, clients=6, plan=None, release="training", **node):
    """New sites, and the server's side of a round that is open at them."""
    sites = Sites(path, pki, clients, **node)
    server = Server(sites, plan or plan_of(clients), release=release)
    server.open()
    return sites, server


class Hidden(dict):
    """What clients hide: their vectors with all noise, by client, and the keys of the noise."""

    def __init__(self):
        super().__init__()
        self.noise = {}

    @classmethod
    def of_all(cls, monkeypatch):
        """Record what every client hides from now on."""

        def masked(masking, vector):
            hidden[masking.client] = vector.copy()
            hidden.noise[masking.client] = masking.round.layers, masking._state.noise
            return original(masking, vector)

        hidden, original = cls(), MaskingClient.masked
        monkeypatch.setattr(MaskingClient, "masked", masked)
        return hidden

    def total(self, survivors=None, revealing=None):
        """The sum of the survivors' vectors, less the layers that they reveal; None: all."""
        survivors = list(self if survivors is None else survivors)
        total = np.sum([self[client].astype(np.int64) for client in survivors], axis=0)
        for client in survivors if revealing is None else revealing:
            layers, key = self.noise[client]
            kept = replace(layers, deviations=layers.deviations[: layers.kept(len(survivors))])
            total += kept.draw(key, len(total))[0] - layers.draw(key, len(total))[0]
        return to_modulus(total)
