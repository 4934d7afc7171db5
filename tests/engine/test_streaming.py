"""Replies of Flower's simulation are received one by one, with few large messages in progress."""

from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, RecordDict

from coterie.engine import ray
from coterie.engine.in_process import LocalGrid
from coterie.engine.ray import stream_replies


class Nodes:
    """Nodes that reply in reverse order, each after it was asked ``delay`` times."""

    def __init__(self, delay=1, silent=()):
        self.delay, self.silent = delay, silent
        self.open, self.most, self.calls = {}, 0, 0

    def push_messages(self, messages):
        for message in messages:
            message.metadata.__dict__["_message_id"] = f"m{message.metadata.dst_node_id}"
            self.open[message.metadata.message_id] = self.delay
        self.most = max(self.most, len(self.open))
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, message_ids):
        self.calls += 1
        for message_id in message_ids:
            self.open[message_id] -= 1
        ready = [name for name in message_ids if self.open[name] < 0 and name not in self.silent]
        for message_id in ready:
            del self.open[message_id]
        return [SimpleNamespace(metadata=SimpleNamespace(reply_to_message_id=name)) for name in ready]


def answered(replies):
    return [reply.metadata.reply_to_message_id for reply in replies]


def messages(count, numbers):
    LocalGrid(1)  # it sets Flower's node id
    content = RecordDict({"models": ArrayRecord([np.zeros(numbers, np.float32)])})
    return [Message(content, dst_node_id=i, message_type="train") for i in range(1, count + 1)]


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(ray, "_POLL_SECONDS", 0.001)


@pytest.mark.parametrize(("numbers", "most"), [(10, 20), (2**20, 10), (2**24, 3)])
def test_large_messages_wait_for_replies(numbers, most, monkeypatch):
    monkeypatch.setattr(ray, "_IN_PROGRESS", 10 * (4 * 2**20 + 1000))
    nodes = Nodes()
    replies = stream_replies(nodes, 3).send_and_receive(messages(20, numbers))
    assert sorted(answered(replies)) == sorted(f"m{i}" for i in range(1, 21))
    assert nodes.most == most
    assert not nodes.open


def test_one_call_asks_for_all_open_replies():
    """A call per open message would cost the square of their number."""
    nodes = Nodes(delay=4)
    assert len(answered(stream_replies(nodes, 3).send_and_receive(messages(50, 10)))) == 50
    assert nodes.calls == 5


def test_the_timeout_ends_the_wait():
    nodes = Nodes(silent={"m2"})
    replies = stream_replies(nodes, 3).send_and_receive(messages(3, 10), timeout=0.2)
    assert set(answered(replies)) == {"m1", "m3"}


def test_no_message_is_no_reply():
    assert list(stream_replies(Nodes(), 3).send_and_receive([])) == []
