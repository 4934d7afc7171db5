"""Who is which client: what a registered node can claim, with and without a roster."""

import logging
import time
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo

from coterie.engine.in_process import LocalGrid
from coterie.privacy import NoPrivacy
from coterie.rounds.client_registry import ClientRegistry
from coterie.rounds.run_state import StrategyError
from coterie.site.roster import Member, Roster, RosterFile, fingerprint
from coterie.strategies import FedAvg

HONEST, HOSTILE, LATER = 30, 7, 12  # ids of nodes: of the honest client, of one with a lower id, of a third


def pem():
    public = ec.generate_private_key(ec.SECP384R1()).public_key()
    return public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


KEYS = {node: pem() for node in (HONEST, HOSTILE, LATER)}


class Nodes(LocalGrid):
    """Nodes with keys, which say what they like; ``asked`` are those that were asked who they are."""

    def __init__(self, claims, since=None, keys=KEYS):
        super().__init__(4)
        self.claims, self.since, self.keys, self.asked = claims, since or {}, keys, []

    def get_nodes(self):
        return [
            NodeInfo(node_id=node, public_key=self.keys.get(node, b""), registered_at=self.since.get(node, ""))
            for node in self.claims
        ]

    def get_node_ids(self):
        return list(self.claims)

    def send_and_receive(self, messages, *, timeout=None):
        for message in self._numbered(messages):
            node = message.metadata.dst_node_id
            self.asked.append(node)
            said = ConfigRecord({"client-id": self.claims[node], "versions": "coterie 0.2.0, torch 2.9"})
            yield Message(RecordDict({"reply": said}), reply_to=message)


def looked_up(registry, grid):
    registry.discover(grid, 0.0)
    return registry.nodes


def roster(number=1, days=1, **clients):
    """A roster in which nodes, by the name of their constant, are clients."""
    end = (datetime.now(UTC) + timedelta(days=days)).isoformat()
    nodes = {"honest": HONEST, "hostile": HOSTILE, "later": LATER}
    members = (
        Member(key=fingerprint(KEYS[nodes[name]]), client=client, name=name, role="client", expires=end)
        for name, client in clients.items()
    )
    made = Roster(number, tuple(members))
    object.__setattr__(made, "problem", "")
    return made


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


# ---- without a roster ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("hostile_first", [False, True])
def test_the_node_that_was_registered_first_keeps_its_client(hostile_first, caplog):
    since = {HONEST: "2026-11-26 10:00:00.5", HOSTILE: "2026-11-26 10:00:01"}
    grid, registry = Nodes({HOSTILE: 3, HONEST: 3}, since), ClientRegistry(4, 0.0)
    if hostile_first:  # the honest one was offline
        grid.claims = {HOSTILE: 3}
        assert looked_up(registry, grid) == {3: HOSTILE}
        grid.claims = {HOSTILE: 3, HONEST: 3}
    with caplog.at_level(logging.WARNING, "flwr"):
        assert looked_up(registry, grid) == {3: HONEST}
        assert looked_up(registry, grid) == {3: HONEST}
    (warning,) = warnings(caplog)
    assert warning.startswith(f"ignoring node {HOSTILE}: it claims client-id 3, which node {HONEST} was registered")


def test_without_times_the_node_that_came_first_keeps_its_client():
    grid, registry = Nodes({HONEST: 3}), ClientRegistry(4, 0.0)
    assert looked_up(registry, grid) == {3: HONEST}
    grid.claims = {HOSTILE: 3, HONEST: 3}
    assert looked_up(registry, grid) == {3: HONEST}
    grid.claims = {HOSTILE: 3}
    assert looked_up(registry, grid) == {3: HOSTILE}


def test_the_log_names_every_client_with_its_versions(caplog):
    with caplog.at_level(logging.INFO, "flwr"):
        looked_up(ClientRegistry(4, 0.0), Nodes({HONEST: 3}))
    assert f"client 3 is node {HONEST}: coterie 0.2.0, torch 2.9" in [record.getMessage() for record in caplog.records]


# ---- with a roster ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("claimed", [0, 3, 2])
def test_a_registered_node_takes_no_other_client_s_place(claimed, caplog):
    """Not even while the client is offline, and whatever it claims."""
    members = roster(honest=3, hostile=2)
    grid, registry = Nodes({HOSTILE: claimed, HONEST: 3}), ClientRegistry(4, 0.0, members)
    with caplog.at_level(logging.WARNING, "flwr"):
        expected = {2: HOSTILE} if claimed == 2 else {}
        assert looked_up(registry, grid) == {3: HONEST} | expected
        grid.claims = {HOSTILE: claimed}
        assert looked_up(registry, grid) == expected
    if claimed != 2:
        (warning,) = warnings(caplog)
        assert f"it claims client-id {claimed}, and is client 2 in the roster" in warning


def test_a_key_that_is_not_in_the_roster_is_not_even_asked(caplog):
    grid, registry = Nodes({HOSTILE: 3, HONEST: 3, LATER: 1}), ClientRegistry(4, 0.0, roster(honest=3))
    with caplog.at_level(logging.WARNING, "flwr"):
        assert looked_up(registry, grid) == looked_up(registry, grid) == {3: HONEST}
    assert grid.asked == [HONEST]
    assert set(warnings(caplog)) == {f"ignoring node {node}: its key is not in the roster" for node in (HOSTILE, LATER)}
    assert len(warnings(caplog)) == 2


@pytest.mark.parametrize(
    ("members", "key", "reason"),
    [
        (roster(days=-1, honest=3), KEYS[HONEST], "its entry in the roster, honest, expired on"),
        (roster(honest=4), KEYS[HONEST], "honest is client 4, and the run has 4 clients"),
        (roster(honest=3), b"", "the SuperLink does not authenticate nodes"),
        (roster(honest=3), b"no key", "its public key cannot be read"),
        (roster(honest=3), KEYS[HONEST][:-30], "its public key cannot be read"),
        (
            roster(honest=3),
            b"-----BEGIN PUBLIC KEY-----\n\n-----END PUBLIC KEY-----\n",
            "its public key cannot be read",
        ),
    ],
    ids=["expired", "beyond the run", "no authentication", "no key", "cut", "empty"],
)
def test_who_is_no_client(members, key, reason, caplog):
    grid, registry = Nodes({HONEST: 3}, keys={HONEST: key}), ClientRegistry(4, 0.0, members)
    with caplog.at_level(logging.WARNING, "flwr"):
        assert looked_up(registry, grid) == {}
    (warning,) = warnings(caplog)
    assert warning.startswith(f"ignoring node {HONEST}: {reason}")
    assert grid.asked == []


def test_an_entry_that_expires_during_a_run_ends_the_part_of_its_node(monkeypatch):
    grid, registry = Nodes({HONEST: 3}), ClientRegistry(4, 0.0, roster(honest=3))
    assert looked_up(registry, grid) == {3: HONEST}

    class Later(datetime):
        @classmethod
        def now(cls, zone=None):
            return datetime.now(zone) + timedelta(days=2)

    monkeypatch.setattr("coterie.site.roster.datetime", Later)
    assert looked_up(registry, grid) == {}


# ---- a roster that changes ----------------------------------------------------------------------------------


@pytest.fixture
def signed(tmp_path):
    """Write a roster, signed by the authority of a folder, and return a registry that reads it."""
    from coterie.deploy.certificates import _Authority, create

    folder = create(tmp_path / "pki", 1, ["superlink"]).folder
    key = _Authority.read(folder).key

    def write(members):
        path = tmp_path / "new.json"
        path.write_bytes(members.signed(key))
        path.replace(folder / "roster.json")
        return folder

    return write


def test_a_node_is_replaced_during_a_run(signed, caplog):
    folder = signed(roster(1, honest=3))
    registry = ClientRegistry(4, 0.0, RosterFile(folder / "roster.json", folder / "ca.crt"))
    grid = Nodes({HONEST: 3, LATER: 3})
    assert looked_up(registry, grid) == {3: HONEST}
    signed(roster(2, later=3))
    assert looked_up(registry, grid) == {3: LATER}
    with caplog.at_level(logging.WARNING, "flwr"):
        signed(roster(1, honest=3))  # an older one, restored by mistake or by an adversary
        assert looked_up(registry, grid) == looked_up(registry, grid) == {3: LATER}
        (folder / "roster.json").write_text("{}")
        assert looked_up(registry, grid) == {3: LATER}
        (folder / "roster.json").unlink()
        assert looked_up(registry, grid) == {3: LATER}
    problems = [text for text in warnings(caplog) if text.startswith("the roster cannot be updated")]
    assert ["older roster, 1; 2 stays in use" in problems[0], "is not signed" in problems[1]] == [True, True]
    assert len(problems) == 3
    signed(roster(3, honest=3, later=1))
    assert looked_up(registry, grid) == {3: HONEST}


class Plain(Nodes):
    """Nodes of which some run a ClientApp of Flower."""

    def __init__(self, claims, plain):
        super().__init__(claims)
        self.plain = plain

    def send_and_receive(self, messages, *, timeout=None):
        messages = self._numbered(messages)
        for message in messages:
            if message.metadata.dst_node_id in self.plain:
                app = ClientApp()
                with pytest.raises(ValueError) as raised:  # noqa: PT011 (the text is Flower's)
                    app(message, Context(1, 1, {}, RecordDict(), {}))
                self.asked.append(message.metadata.dst_node_id)
                yield Message(Error(0, f"{type(raised.value)}:<'{raised.value}'>"), reply_to=message)
            else:
                yield from super().send_and_receive([message])


def test_nodes_with_an_app_of_flower_are_named_once_and_end_no_run_of_others(caplog):
    grid, registry = Plain({HONEST: 0, HOSTILE: 2, LATER: 1}, {HOSTILE}), ClientRegistry(2, 60.0)
    assert registry.wait_for(grid, 2)
    assert looked_up(registry, grid) == {0: HONEST, 1: LATER}
    assert grid.asked.count(HOSTILE) == 1
    assert registry.plain_apps == 1
    assert caplog.text.count("ClusteredClientApp") == 1


def test_where_every_client_has_an_app_of_flower_nobody_waits():
    began = time.monotonic()
    registry = ClientRegistry(2, 60.0)
    assert not registry.wait_for(Plain({HONEST: 0, HOSTILE: 1}, {HONEST, HOSTILE}), 1)
    assert registry.plain_apps == 2
    assert time.monotonic() - began < 30
    strategy = FedAvg(NoPrivacy(clients=2, num_clusters=1, sampling_rate=1.0, rounds=1), registration_timeout=60.0)
    arrays = ArrayRecord({"w": Array(np.zeros(1, np.float32))})
    with pytest.raises(StrategyError, match="the app of 2 nodes is a ClientApp: replace it by a ClusteredClientApp"):
        strategy.start(Plain({HONEST: 0, HOSTILE: 1}, {HONEST, HOSTILE}), arrays, 1)
