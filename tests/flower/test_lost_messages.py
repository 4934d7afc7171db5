"""Requests whose message or reply is lost between a SuperNode and the SuperLink, on a clock that needs no time."""

import threading
import time

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo

from coterie.flower.lost_messages import Exchange, _Pulls
from coterie.rounds.client_registry import ClientRegistry

pytestmark = pytest.mark.usefixtures("identity")


class Link:
    """A SuperLink, and SuperNodes that handle their messages one after another.

    Args:
        seconds: that a node needs for a request; by node.
        loses: of every node, which of its messages have no reply, counted from 0.
        refuses: nodes for which the SuperLink accepts no message.
        gone: nodes that are away: the SuperLink answers with an error.
        repeats: whether clients replay their replies.
    """

    def __init__(self, seconds=None, loses=None, refuses=(), gone=(), repeats=True):
        self.now = 0.0
        self.seconds, self.loses, self.refuses, self.gone = seconds or {}, loses or {}, refuses, set(gone)
        self.repeats = repeats
        self.sent, self.replies, self.free = [], {}, {}
        self.exchange = Exchange(self.push, self.pull)

    def get_nodes(self):
        return [NodeInfo(node_id=node) for node in sorted(set(range(1, 4)) - self.gone)]

    def send_and_receive(self, messages, *, timeout=None):
        return self.exchange.send_and_receive(messages, timeout=timeout)

    def push(self, messages):
        return [self._take(message) for message in messages]

    def _take(self, message):
        node = message.metadata.dst_node_id
        count = sum(other.metadata.dst_node_id == node for other in self.sent)
        self.sent.append(message)
        if node in self.refuses:
            return None
        message_id = message.metadata.__dict__["_message_id"] = f"{len(self.sent)} to {node}"
        identity = message.metadata.message_type == "query.identity"
        work = 1.0 if identity else self.seconds.get(node, 1.0)
        ready = self.free[node] = max(self.now, self.free.get(node, 0.0)) + work
        if node in self.gone:
            self.replies[message_id] = (self.now, Message(Error(ErrorCode.NODE_UNAVAILABLE, "gone"), reply_to=message))
        elif count not in self.loses.get(node, ()):
            said = ConfigRecord({"client-id": node - 1, "repeats": self.repeats, "copy": count})
            self.replies[message_id] = (ready, Message(RecordDict({"reply": said}), reply_to=message))
        return message_id

    def pull(self, message_ids):
        there = [i for i in message_ids if i in self.replies and self.replies[i][0] <= self.now]
        return [self.replies.pop(i)[1] for i in there]

    def train(self, **config):
        content = RecordDict({"arrays": ArrayRecord([np.ones(2)]), "config": ConfigRecord({"round": 1, **config})})
        return [Message(content, node, "train", ttl=600.0, group_id="1") for node in (1, 2, 3)]

    def of(self, node, kind):
        """Numbers of a node's messages of some kind."""
        mine = [message for message in self.sent if message.metadata.dst_node_id == node]
        return [i for i, message in enumerate(mine) if message.metadata.message_type == kind]


@pytest.fixture
def link(monkeypatch):
    def make(**faults):
        made = Link(**faults)
        monkeypatch.setattr(time, "monotonic", lambda: made.now)

        def sleep(seconds):
            made.now += seconds + 1e-6  # a clock goes on, however short the pause

        monkeypatch.setattr(time, "sleep", sleep)
        return made

    return make


def copies(replies):
    return {
        reply.metadata.reply_to_message_id: reply.content["reply"]["copy"] for reply in replies if reply.has_content()
    }


def test_a_lost_request_is_sent_again_to_its_node_alone(link):
    there = link(loses={2: [0]})
    asked = there.train()
    replies = list(there.send_and_receive(asked, timeout=3600.0))
    ids = [message.metadata.message_id for message in asked]
    assert copies(replies) == {ids[0]: 0, ids[1]: 2, ids[2]: 0}  # the second node's messages: lost, probe, again
    assert there.of(2, "train") == [0, 2]
    assert there.of(1, "train") == there.of(3, "train") == [0]
    assert there.now < 60  # not the hour that the round may take


def test_a_slow_node_does_its_work_once(link):
    there = link(seconds={3: 1000.0})
    assert len(copies(there.send_and_receive(there.train(), timeout=3600.0))) == 3
    assert there.of(3, "train") == [0]
    assert len(there.of(3, "query.identity")) <= 6


def test_nodes_that_are_all_slow_are_not_probed_for_two_minutes(link):
    there = link(seconds=dict.fromkeys((1, 2, 3), 110.0))
    assert len(copies(there.send_and_receive(there.train(), timeout=3600.0))) == 3
    assert len(there.sent) == 3


def test_requests_that_all_are_lost_are_sent_again(link):
    there = link(loses={1: [0], 2: [0], 3: [0]})
    assert len(copies(there.send_and_receive(there.train(), timeout=3600.0))) == 3
    assert there.now < 200


def test_a_request_that_is_lost_every_time_costs_one_reply(link):
    there = link(loses={2: [0, 2, 4, 6, 8]})
    replies = list(there.send_and_receive(there.train(), timeout=3600.0))
    assert len(copies(replies)) == 2
    (error,) = [reply.error for reply in replies if reply.has_error()]
    assert (error.code, error.reason) == (ErrorCode.MESSAGE_UNAVAILABLE, "the message or its reply was lost")
    assert there.of(2, "train") == [0, 2, 4]
    assert there.now < 200


@pytest.mark.parametrize(("repeats", "sent"), [(True, [0, 2]), (False, [0])])
def test_at_record_level_only_clients_that_replay_their_reply_are_asked_twice(link, repeats, sent):
    there = link(loses={2: [0]}, repeats=repeats)
    replies = list(there.send_and_receive(there.train(**{"record-plans": "[]"}), timeout=3600.0))
    assert len(copies(replies)) == 2 + repeats
    assert there.of(2, "train") == sent
    assert there.now < 60


def test_a_lost_probe_is_sent_again(link):
    there = link(loses={2: [0, 1, 2]})
    assert len(copies(there.send_and_receive(there.train(), timeout=3600.0))) == 3
    assert there.of(2, "query.identity") == [1, 2, 3]
    assert there.of(2, "train") == [0, 4]


def test_a_node_that_replies_to_nothing_ends_with_the_round(link):
    there = link(loses={2: range(100)})
    assert len(copies(there.send_and_receive(there.train(), timeout=300.0))) == 2
    assert there.now == pytest.approx(300)
    assert there.of(2, "train") == [0]
    assert len(there.of(2, "query.identity")) == 3


def test_a_request_is_sent_again_whose_reply_stalls(link, monkeypatch):
    """The node died in the middle of its upload."""
    there, stalled = link(), threading.Event()

    def pull(message_ids):
        if message_ids == ["2 to 2"]:
            stalled.wait(30)
            return []
        return Link.pull(there, message_ids)

    there.pull = pull
    there.exchange = Exchange(there.push, there.pull)
    monkeypatch.setattr("coterie.flower.lost_messages._POLL_SECONDS", 0.2)
    try:
        assert len(copies(there.send_and_receive(there.train(), timeout=3600.0))) == 3
        assert there.exchange._pull._running == {}  # nor is the stalled one waited for
    finally:
        stalled.set()
    assert there.of(2, "train") == [0, 2]
    assert there.now < 100


def test_few_replies_are_pulled_at_a_time(link, monkeypatch):
    """Pulled replies that wait for their turn take memory; those whose node stopped do not count for long."""
    there, release, pulled = link(seconds={1: 0.0, 2: 0.0, 3: 0.0}), threading.Event(), []

    def pull(message_ids):
        if message_ids[0].endswith(" to 2"):
            return Link.pull(there, message_ids)
        pulled.append(message_ids[0])
        release.wait(30)
        return Link.pull(there, message_ids)

    there.exchange = Exchange(there.push, pull)
    monkeypatch.setattr("coterie.flower.lost_messages._POLL_SECONDS", 0.01)
    monkeypatch.setattr("coterie.flower.lost_messages._PULLS", 1)
    replies = there.send_and_receive(there.train(), timeout=2.0)
    assert list(replies) == []  # the first one is being pulled, the others wait
    assert pulled == ["1 to 1"]
    monkeypatch.setattr("coterie.flower.lost_messages._PULL_SECONDS", 1.0)
    replies = there.send_and_receive(there.train(), timeout=3.0)
    assert [reply.metadata.src_node_id for reply in replies] == [2]
    release.set()
    assert len(copies(there.send_and_receive(there.train(), timeout=3600.0))) == 3  # no reply to earlier rounds counts
    assert there.exchange._pull._running == {}


def test_a_pulled_reply_counts_until_it_is_taken(monkeypatch):
    release, pulled = threading.Event(), []

    def pull(message_ids):
        pulled.extend(message_ids)
        release.wait(30)
        return message_ids

    monkeypatch.setattr("coterie.flower.lost_messages._POLL_SECONDS", 0.01)
    monkeypatch.setattr("coterie.flower.lost_messages._PULLS", 1)
    monkeypatch.setattr("coterie.flower.lost_messages._PULL_SECONDS", 0.0)
    pulls = _Pulls(pull)
    assert pulls("a") == []
    release.set()
    (future, _) = pulls._running["a"]
    future.result(10)
    assert pulls("b") == []
    assert pulled == ["a"]
    assert pulls("a") == ["a"]
    assert pulls("b") in ([], ["b"])
    assert pulled == ["a", "b"]


def test_what_the_superlink_does_not_accept_is_an_error_at_once(link):
    there = link(refuses=(2,))
    replies = list(there.send_and_receive(there.train(), timeout=3600.0))
    assert len(copies(replies)) == 2
    assert [reply.error.code for reply in replies if reply.has_error()] == [ErrorCode.NODE_UNAVAILABLE]
    assert there.now < 10


def test_a_late_reply_to_the_first_copy_counts_for_a_repeated_request(link):
    there = link(seconds={3: 50.0})
    first = there.train()
    assert len(copies(there.send_and_receive(first, timeout=40.0))) == 2
    (repeated,) = [
        Message(message.content, 3, "train", ttl=600.0, group_id="1")
        for message in first
        if message.metadata.dst_node_id == 3
    ]
    assert copies(there.send_and_receive([repeated], timeout=40.0)) == {repeated.metadata.message_id: 0}
    assert there.now < 60


def test_a_node_that_is_away_is_not_waited_for(link):
    there = link(gone=(2,))
    replies = list(there.send_and_receive(there.train(), timeout=3600.0))
    assert len(copies(replies)) == 2
    assert there.of(2, "train") == [0]
    assert there.now < 10


def test_an_introduction_that_is_lost_is_asked_for_again_while_the_run_waits(link):
    there = link(loses={2: [0], 3: [0, 1]})
    roster = ClientRegistry(3, wait=120.0)
    assert roster.wait_for(there, 3)
    assert roster.nodes == {0: 1, 1: 2, 2: 3}
    assert there.now < 120


def test_an_introduction_that_is_lost_for_long_is_asked_for_again_in_later_rounds(link):
    there = link(loses={2: range(4)})
    roster = ClientRegistry(3, wait=60.0)
    assert not roster.wait_for(there, 3)
    for _ in range(60):
        there.now += 20.0
        began = there.now
        assert roster.wait_for(there, 0)
        assert there.now == began  # a round does not wait for a node that has been silent before
    assert roster.nodes == {0: 1, 1: 2, 2: 3}
    assert len(there.of(2, "query.identity")) <= 6  # and a silent node is not flooded


def test_nodes_that_leave_and_return_are_not_left_out_for_long(link):
    """Twenty rounds in which one node is away in turn, and one message in five is lost."""
    there = link()
    rng = np.random.default_rng(0)
    there.loses = {node: set(np.flatnonzero(rng.random(400) < 0.2)) for node in (1, 2, 3)}
    roster, took_part = ClientRegistry(3, wait=60.0), {client: [] for client in range(3)}
    assert roster.wait_for(there, 3)
    for number in range(20):
        there.gone = {number % 3 + 1}
        roster.wait_for(there, 2)
        content = RecordDict({"config": ConfigRecord({"round": number})})
        asked = {
            client: Message(content, node, "train", ttl=600.0, group_id=str(number))
            for client, node in roster.nodes.items()
        }
        began = there.now
        came = copies(there.send_and_receive(asked.values(), timeout=3600.0))
        assert there.now - began < 600
        for client, message in asked.items():
            if message.metadata.message_id in came:
                took_part[client].append(number)
    for rounds in took_part.values():
        assert np.diff([-1, *rounds, 20]).max() <= 3, took_part


def test_replies_are_looked_for_less_often_as_a_round_lasts(link, monkeypatch):
    pauses = []
    there = link(seconds=dict.fromkeys((1, 2, 3), 100.0))
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: (pauses.append(seconds), sleep(seconds)))
    assert len(copies(there.send_and_receive(there.train(), timeout=3600.0))) == 3
    assert pauses[0] == pytest.approx(0.2)
    assert pauses == sorted(pauses)
    assert pauses[-1] == pytest.approx(3.0)
    assert len(pauses) < 70
