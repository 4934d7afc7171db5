"""A grid whose calls fail: they are made again, and what was lost on its way is known by an error in its place."""

import threading
import time
import types

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import RunNotRunningException
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.grid.http_grid import HttpGrid
from flwr.superlink.servicer.runtime import runtime_handlers

from coterie.server import app as server_app
from coterie.server.grid import persistent


class SuperLink(HttpGrid):
    """Flower's grid, whose calls raise what is next in ``failures``; replies that it hands out then are lost.

    A message is answered by the second look for it.
    """

    def __init__(self, **failures):
        super().__init__(token="token")
        self.failures, self.calls = failures, []
        self.stored, self.seen, self.gone = {}, set(), set()

    def _call(self, name):
        self.calls.append(name)
        if self.failures.get(name) and (failure := self.failures[name].pop(0)):
            raise failure

    def get_node_ids(self):
        self._call("nodes")
        return [1, 2]

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


@pytest.fixture(autouse=True)
def identity(monkeypatch):
    """Of the process, as Flower gives it to a ServerApp."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


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
    grid = persistent(link)
    assert grid.get_node_ids() == [1, 2]
    assert answered(grid.send_and_receive(iter(questions()), timeout=10.0)) == {"to 1": True, "to 2": True}
    assert link.calls == ["nodes", "push", "pull", "pull"]
    assert slept == [3.0]


def test_what_fails_is_tried_again_with_the_same_messages(slept):
    link = SuperLink(nodes=[OSError("EOF"), OSError("EOF")], push=[RuntimeError("expired")])
    grid = persistent(link)
    assert grid.get_node_ids() == [1, 2]
    assert answered(grid.send_and_receive(iter(questions()))) == {"to 1": True, "to 2": True}
    assert link.calls == ["nodes"] * 3 + ["push", "push", "pull", "pull"]
    assert slept == [1.0, 2.0, 1.0, 3.0]


@pytest.mark.filterwarnings("ignore:No path_separator found:DeprecationWarning")  # Flower's use of alembic
@pytest.mark.parametrize("dies_after", [1, 3, 6])
def test_an_answer_of_flower_s_superlink_that_was_lost_loses_no_message(slept, tmp_path, dies_after, monkeypatch):
    """The SuperLink stores an object and dies before it says so; Flower's client asks again and is refused."""
    objects = ObjectStoreFactory(str(tmp_path / "superlink.db"))
    state = LinkStateFactory(str(tmp_path / "superlink.db"), NoOpFederationManager(), objects).state()
    node = state.create_node("owner", "owner", b"key", 30.0)
    state.activate_node(node, 30.0)
    run = state.create_run(None, None, None, {}, NOOP_FEDERATION_ID, None, "owner", TaskType.SERVER_APP)
    monkeypatch.setattr(TaskIdentity, "_run_id", run)
    task, one_at_a_time = types.SimpleNamespace(run_id=run), threading.Lock()

    class Client:
        pushed = 0

        def PushMessages(self, request):  # noqa: N802
            with one_at_a_time:
                return runtime_handlers.push_messages(request, state, task)

        def PushObject(self, request):  # noqa: N802
            with one_at_a_time:
                self.pushed += 1
                said = runtime_handlers.push_object(request, state, task)
                return runtime_handlers.push_object(request, state, task) if self.pushed == dies_after else said

    def grid():
        made = HttpGrid(token="token")
        made.set_run(state.get_run_info(run_ids=[run])[0])
        made._client = Client()
        return made

    with pytest.raises(ObjectPushError):
        grid().push_messages(questions([node]))
    (sent,) = persistent(grid()).push_messages(questions([node]))
    assert sent in [message.metadata.message_id for message in state.get_message_ins(node, None)]
    assert state.get_message_ins(node, None) == []  # nothing comes twice
    tree = objects.store().get_object_tree(sent)
    assert all(state.get_object(run, part.object_id) for part in iterate_object_tree(tree))


def test_replies_that_were_lost_on_their_way_are_told_from_those_that_came(slept):
    link = SuperLink(pull=[None, OSError("the SuperLink died after it took them for delivered")])
    replies = persistent(link).send_and_receive(questions(), timeout=60.0)
    assert answered(replies) == {"to 1": False, "to 2": False}
    assert {reply.error.code for reply in replies} == {ErrorCode.MESSAGE_UNAVAILABLE}


def test_a_serverapp_s_grid_is_persistent(slept, monkeypatch, tmp_path):
    monkeypatch.setattr(server_app, "run", lambda folder, grid: grid.get_node_ids())
    link = SuperLink(nodes=[OSError("EOF")])
    values = {"rounds": 1, "seed": 1, "out": str(tmp_path / "run")}
    server_app.app(link, Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=values))
    assert link.calls == ["nodes", "nodes"]


def test_what_fails_for_good_is_raised_as_it_is(slept):
    link = SuperLink(push=[OSError(f"attempt {i}") for i in range(1, 9)])
    with pytest.raises(OSError, match="attempt 5"):
        persistent(link).send_and_receive(questions())
    assert slept == [1.0, 2.0, 4.0, 8.0]


@pytest.mark.parametrize("end", [RunNotRunningException(), KeyboardInterrupt()])
def test_a_run_that_was_stopped_is_not_kept_alive(slept, end):
    with pytest.raises(type(end)):
        persistent(SuperLink(push=[end])).send_and_receive(questions())
    assert slept == []
