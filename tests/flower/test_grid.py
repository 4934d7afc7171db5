"""A grid whose calls fail: they are made again, and what was lost on its way is known by an error in its place."""

import itertools
import threading
import time
import types

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import NodeInfo
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, NOOP_FEDERATION_ID, TaskType
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_id, iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import RunNotRunningException
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.grid.http_grid import HttpGrid
from flwr.superlink.servicer.runtime import runtime_handlers

from coterie.client.state import KeptStates, StateFile, write_states
from coterie.flower.grid import with_retries
from coterie.server import app as server_app

pytestmark = pytest.mark.usefixtures("identity")


class SuperLink(HttpGrid):
    """Flower's grid, whose calls raise what is next in ``failures``; replies that it hands out then are lost.

    A message is answered by the second look for it.
    """

    def __init__(self, **failures):
        super().__init__(token="token")
        self.failures, self.calls = failures, []
        self.stored, self.seen, self.gone = {}, set(), set()

    run = types.SimpleNamespace(fab_hash="")

    def _call(self, name):
        self.calls.append(name)
        if self.failures.get(name) and (failure := self.failures[name].pop(0)):
            raise failure

    def get_nodes(self):
        self._call("nodes")
        return [NodeInfo(node_id=1), NodeInfo(node_id=2)]

    def push_messages(self, messages):
        there = list(messages)
        self._call("push")
        for message in there:
            message.metadata.__dict__["_message_id"] = f"to {message.metadata.dst_node_id}"
            self.stored[message.metadata.message_id] = message
        return list(self.stored)

    def pull_messages(self, message_ids):
        there, self.seen = self.seen.intersection(message_ids), self.seen.union(message_ids)
        replies = []
        for i in sorted(there):
            lost = Error(ErrorCode.MESSAGE_UNAVAILABLE, "gone")
            replies.append(Message(lost if i in self.gone else RecordDict(), reply_to=self.stored[i]))
            self.gone.add(i)
        self._call("pull")
        return replies


@pytest.fixture
def slept(monkeypatch):
    """Seconds slept, which pass at once."""
    seconds = []
    monkeypatch.setattr(time, "sleep", seconds.append)
    return seconds


def questions(nodes=(1, 2)):
    weights = RecordDict({"arrays": ArrayRecord([np.arange(4.0), np.ones(3)])})
    return [Message(weights, dst_node_id=node, message_type="train", ttl=60.0) for node in nodes]


def answered(replies):
    return {reply.metadata.reply_to_message_id: reply.has_content() for reply in replies}


def test_without_a_failure_every_call_is_made_once(slept):
    link = SuperLink()
    grid = with_retries(link)
    assert grid.get_node_ids() == [1, 2]
    assert answered(grid.send_and_receive(iter(questions()), timeout=10.0)) == {"to 1": True, "to 2": True}
    assert link.calls == ["nodes", "push"] + ["pull"] * 4  # each of two replies is looked for twice
    (pause,) = slept
    assert 0 < pause <= 3


def test_what_fails_is_tried_again_with_the_same_messages(slept):
    link = SuperLink(nodes=[OSError("EOF"), OSError("EOF")], push=[RuntimeError("expired")])
    grid = with_retries(link)
    assert grid.get_node_ids() == [1, 2]
    assert answered(grid.send_and_receive(iter(questions()))) == {"to 1": True, "to 2": True}
    assert link.calls == ["nodes"] * 3 + ["push"] * 2 + ["pull"] * 4
    assert slept[:-1] == [1.0, 2.0, 1.0]
    assert 0 < slept[-1] <= 3


class Served:
    """Flower's SuperLink with a run and some nodes, and its grid; ``dies_after`` pushed objects it loses an answer."""

    def __init__(self, monkeypatch, nodes, dies_after=0):
        self.objects = ObjectStoreFactory(FLWR_IN_MEMORY_DB_NAME)
        self.state = LinkStateFactory(FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), self.objects).state()
        self.nodes = [self.state.create_node("owner", "owner", b"key %d" % i, 30.0) for i in range(nodes)]
        for node in self.nodes:
            self.state.activate_node(node, 30.0)
        self.run = self.state.create_run(None, None, None, {}, NOOP_FEDERATION_ID, None, "owner", TaskType.SERVER_APP)
        monkeypatch.setattr(TaskIdentity, "_run_id", self.run)
        self.task, self.one_at_a_time = types.SimpleNamespace(run_id=self.run), threading.Lock()
        self.dies_after, self.pushed = dies_after, 0

    def grid(self):
        made = HttpGrid(token="token")
        made.set_run(self.state.get_run_info(run_ids=[self.run])[0])
        made._client = self
        return made

    def _handle(self, handler, request):
        with self.one_at_a_time:
            return handler(request, self.state, self.task)

    def GetNodes(self, request):  # noqa: N802
        return self._handle(runtime_handlers.get_nodes, request)

    def PushMessages(self, request):  # noqa: N802
        return self._handle(runtime_handlers.push_messages, request)

    def PushObject(self, request):  # noqa: N802
        with self.one_at_a_time:
            self.pushed += 1
            said = runtime_handlers.push_object(request, self.state, self.task)
            again = self.pushed == self.dies_after
            return runtime_handlers.push_object(request, self.state, self.task) if again else said

    def PullMessages(self, request):  # noqa: N802
        return self._handle(runtime_handlers.pull_messages, request)

    def PullObject(self, request):  # noqa: N802
        return self._handle(runtime_handlers.pull_object, request)

    def ConfirmMessageReceived(self, request):  # noqa: N802
        return self._handle(runtime_handlers.confirm_message_received, request)

    def reply(self, question, content, spoil=lambda contents: contents, uploads=True, **written):
        """Store a node's reply; ``spoil`` changes its objects, ``written`` the metadata in them, not the envelope.

        Returns what uploads the objects; until it ``uploads``, the SuperLink has the envelope alone.
        """
        reply = Message(content, reply_to=question)
        envelope = message_to_proto(remove_content_from_message(reply))
        for name, value in written.items():
            reply.metadata.__dict__[name] = value
        objects = spoil({key: part.deflate() for key, part in get_all_nested_objects(reply).items()})
        top = next(key for key, part in objects.items() if part.startswith(b"Message"))
        children = [ObjectTree(object_id=key) for key in objects if key != top]
        envelope.metadata.message_id = top
        session = self.state.start_session(self.run)
        tree = ObjectTree(object_id=top, children=children)
        self.state.store_message_and_object_tree(message_from_proto(envelope), tree, session)

        def upload():
            for key, part in objects.items():
                assert self.state.store_object(self.run, session, key, part)

        if uploads:
            upload()
        return upload


def unreadable(objects):
    """The message has a body that is not protobuf."""
    top = next(key for key, part in objects.items() if part.startswith(b"Message"))
    head, _, _ = objects.pop(top).partition(b"\0")
    kind, children, _ = head.split(b" ")
    body = b"\xff" * 40
    part = b" ".join([kind, children, str(len(body)).encode()]) + b"\0" + body
    return objects | {get_object_id(part): part}


@pytest.fixture
def served(slept, monkeypatch):
    return lambda nodes, dies_after=0: Served(monkeypatch, nodes, dies_after)


@pytest.mark.parametrize("dies_after", [1, 3, 6])
def test_an_answer_of_flower_s_superlink_that_was_lost_loses_no_message(served, dies_after):
    """The SuperLink stores an object and dies before it says so; Flower's client asks again and is refused."""
    link = served(1, dies_after)
    (node,) = link.nodes
    with pytest.raises(ObjectPushError):
        link.grid().push_messages(questions([node]))
    link.pushed = 0
    (sent,) = with_retries(link.grid()).push_messages(questions([node]))
    assert sent in [message.metadata.message_id for message in link.state.get_message_ins(node, None)]
    assert link.state.get_message_ins(node, None) == []  # nothing comes twice
    tree = link.objects.store().get_object_tree(sent)
    assert all(link.state.get_object(link.run, part.object_id) for part in iterate_object_tree(tree))


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_reply_that_cannot_be_read_costs_one_reply(served, slept, bad, caplog):
    link = served(3)
    grid, sent = with_retries(link.grid()), questions(link.nodes)
    ids = list(grid.push_messages(sent))
    for i, question in enumerate(sent):
        link.reply(question, RecordDict({"n": ConfigRecord({"n": i})}), *([unreadable] if i == bad else []))
    replies = {reply.metadata.reply_to_message_id: reply for reply in grid.pull_messages(ids)}
    assert list(replies) == ids
    for i, message_id in enumerate(ids):
        if i == bad:
            assert replies[message_id].error.code == ErrorCode.UNKNOWN
            assert "cannot be parsed: DecodeError" in replies[message_id].error.reason
        else:
            assert replies[message_id].content["n"]["n"] == i
    assert slept == []
    assert grid.pull_messages([]) == []


@pytest.mark.parametrize("stalled", [0, 2])
def test_a_reply_whose_upload_stalls_holds_up_no_other(served, monkeypatch, stalled):
    """Flower waits up to three minutes for its objects."""
    monkeypatch.setattr("coterie.flower.lost_messages._POLL_SECONDS", 0.2)
    link = served(3)
    grid, sent = with_retries(link.grid()), questions(link.nodes)
    replies = grid.send_and_receive(sent, timeout=60.0)
    contents = [RecordDict({"n": ConfigRecord({"n": i})}) for i in range(3)]
    uploads = [link.reply(question, content, uploads=False) for question, content in zip(sent, contents, strict=True)]
    for i in {0, 1, 2} - {stalled}:
        uploads[i]()
    others = {reply.content["n"]["n"] for reply in itertools.islice(replies, 2)}
    uploads[stalled]()
    assert others == {0, 1, 2} - {stalled}
    assert [reply.content["n"]["n"] for reply in replies] == [stalled]


def test_a_reply_belongs_to_the_message_that_the_superlink_checked(served):
    """A node writes into its reply that it comes from another node, as the reply to that node's message."""
    link = served(2)
    grid, sent = with_retries(link.grid()), questions(link.nodes)
    victim, liar = list(grid.push_messages(sent))
    forged = {"_reply_to_message_id": victim, "_src_node_id": link.nodes[0]}
    link.reply(sent[1], RecordDict({"n": ConfigRecord({"n": 1})}), **forged)
    (reply,) = grid.pull_messages([victim, liar])
    assert reply.metadata.reply_to_message_id == liar
    link.reply(sent[0], RecordDict({"n": ConfigRecord({"n": 0})}))
    (reply,) = grid.pull_messages([victim])
    assert (reply.metadata.reply_to_message_id, reply.content["n"]["n"]) == (victim, 0)


def test_replies_that_were_lost_on_their_way_are_told_from_those_that_came(slept):
    died = OSError("the SuperLink died after it took them for delivered")
    link = SuperLink(pull=[None, None, died, None, died])
    replies = list(with_retries(link).send_and_receive(questions(), timeout=60.0))
    assert answered(replies) == {"to 1": False, "to 2": False}
    assert {reply.error.code for reply in replies} == {ErrorCode.MESSAGE_UNAVAILABLE}


def test_a_serverapp_sees_the_keys_of_nodes_and_when_they_were_registered(monkeypatch):
    """Rosters, and the order of nodes without one, depend on it."""
    served = Served(monkeypatch, nodes=3)
    nodes = {node.node_id: node for node in with_retries(served.grid()).get_nodes()}
    assert {node: info.public_key for node, info in nodes.items()} == {
        node: b"key %d" % i for i, node in enumerate(served.nodes)
    }
    times = [nodes[node].registered_at for node in served.nodes]
    assert times == sorted(times)
    assert all(times)


def test_a_serverapp_s_grid_is_persistent(slept, monkeypatch, tmp_path):
    monkeypatch.setattr(server_app, "run", lambda folder, grid: grid.get_node_ids())
    link = SuperLink(nodes=[OSError("EOF")])
    values = {"rounds": 1, "seed": 1, "out": str(tmp_path / "run")}
    server_app.app(link, Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=values))
    assert link.calls == ["nodes", "nodes"]


def test_a_serverapp_continues_with_the_states_that_the_local_engine_left(slept, monkeypatch, tmp_path):
    monkeypatch.setattr(server_app, "run", lambda folder, grid: None)
    values = {"rounds": 1, "seed": 1, "out": str(tmp_path / "run")}

    def started(**more):
        server_app.app(SuperLink(), Context(1, 0, {}, RecordDict(), run_config={**values, **more}))

    started()
    states = KeptStates(tmp_path / "run" / "clients")
    states.begin(0)
    write_states(states.new_file(), {5: {"own": np.ones(3)}})
    started(resume=True)
    assert StateFile(tmp_path / "run" / "clients", 5).read()["own"].tolist() == [1, 1, 1]


def test_what_fails_for_good_is_raised_as_it_is(slept):
    link = SuperLink(push=[OSError(f"attempt {i}") for i in range(1, 9)])
    with pytest.raises(OSError, match="attempt 5"):
        with_retries(link).send_and_receive(questions())
    assert slept == [1.0, 2.0, 4.0, 8.0]


@pytest.mark.parametrize("end", [RunNotRunningException(), KeyboardInterrupt()])
def test_a_run_that_was_stopped_is_not_kept_alive(slept, end):
    with pytest.raises(type(end)):
        with_retries(SuperLink(push=[end])).send_and_receive(questions())
    assert slept == []
