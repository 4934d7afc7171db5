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
        (message_id,) = message_ids
        self.calls += 1
        self.open[message_id] -= 1
        if self.open[message_id] >= 0 or message_id in self.silent:
            return []
        del self.open[message_id]
        return [SimpleNamespace(reply_to=message_id)]


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
    assert sorted(reply.reply_to for reply in replies) == sorted(f"m{i}" for i in range(1, 21))
    assert nodes.most == most
    assert not nodes.open


def test_a_reply_is_yielded_before_the_next_one_is_pulled():
    nodes = Nodes(delay=0)
    replies = stream_replies(nodes, 3).send_and_receive(messages(5, 10))
    next(replies)
    assert (nodes.calls, len(nodes.open)) == (1, 4)


def test_the_timeout_ends_the_wait():
    nodes = Nodes(silent={"m2"})
    replies = stream_replies(nodes, 3).send_and_receive(messages(3, 10), timeout=0.2)
    assert {reply.reply_to for reply in replies} == {"m1", "m3"}


def test_no_message_is_no_reply():
    assert list(stream_replies(Nodes(), 3).send_and_receive([])) == []
