"""Nodes that die, come back, or give no reply: who is asked, who is asked again, and when a run ends."""

import math

import numpy as np
import pytest
from flwr.app import Error, Message
from flwr.common.constant import ErrorCode
from kit.toy_grids import quiet
from test_base import UP, ZERO, Coming, Stub, nothing, private, start

from coterie.strategies import IFCA, FedAvg, StrategyError


class Faulty(Stub):
    """Of every attempt ``silent`` says which clients give no reply, and ``errors`` what Flower says in their place."""

    def __init__(self, *silent, error=None):
        super().__init__()
        self.silent, self.error, self.attempts, self.sent = silent, error, [], []

    def _answers(self, questions):
        training = [message for message in questions if message.metadata.message_type == "train"]
        self.sent += training
        if training:
            self.attempts.append([message.metadata.dst_node_id - 1 for message in training])
        silent = self.silent[min(len(self.attempts), len(self.silent)) - 1] if training else ()
        for message in questions:
            if message.metadata.dst_node_id - 1 not in silent:
                yield from super()._answers([message])
            elif self.error is not None:
                yield Message(Error(self.error, "gone"), reply_to=message)


EVERYBODY = list(range(8))


def test_a_dead_node_is_not_asked_and_one_that_comes_back_says_again_who_it_is():
    grid = Coming([2, 3, 4], [2, 4], [2, 3, 4])
    start(grid, nothing(rounds=3), rounds=3)
    assert grid.rounds == [[2, 3, 4], [2, 4], [2, 3, 4]]
    assert grid.greeted == [2, 3, 4, 3]


class Shy(Stub):
    """Node 8 says only after so many questions who it is."""

    def __init__(self, lost):
        super().__init__()
        self.lost, self.greeted = lost, 0

    def _answers(self, questions):
        for message in questions:
            if message.metadata.message_type != "train" and message.metadata.dst_node_id == 8:
                self.greeted += 1
                if self.greeted <= self.lost:
                    continue
            yield from super()._answers([message])


@pytest.mark.parametrize(("wait", "asked"), [(0.0, 7), (5.0, 8)])
def test_a_node_that_does_not_say_who_it_is_is_asked_again_while_the_run_waits(wait, asked):
    grid = Shy(2)
    start(grid, registration_timeout=wait)
    assert len(grid.asked) == asked


@pytest.mark.parametrize("plan", [nothing, private])
def test_a_node_whose_introductions_are_lost_takes_part_as_soon_as_one_comes_through(plan):
    grid = Shy(3)  # two before round 1, one before round 2
    start(grid, plan(rounds=4), rounds=4)
    assert [grid.asked.count(client) for client in range(8)] == [4] * 7 + [2]
    assert grid.greeted == 4


def test_messages_live_as_long_as_the_round():
    grid = Faulty(())
    FedAvg(nothing(), **quiet()).start(grid, ZERO, 1, timeout=7.0)
    assert {message.metadata.ttl for message in grid.sent} == {7.0}


@pytest.mark.parametrize("error", [None, ErrorCode.NODE_UNAVAILABLE, ErrorCode.CLIENT_APP_CRASHED])
def test_clients_without_a_reply_are_asked_again_and_nobody_else(error):
    grid = Faulty((1, 4, 6), (4,), error=error)
    moved, strategy = start(grid, min_replies=0.8)
    assert grid.attempts == [EVERYBODY, [1, 4, 6]]  # seven of eight are enough
    np.testing.assert_allclose(moved, UP)
    assert strategy.statistics.accepted == 7
    assert strategy.statistics.traffic == {}


def test_nobody_is_asked_again_where_enough_have_replied_or_nobody_asked_for_it():
    for share, silent in ((0.0, EVERYBODY), (0.5, (0, 1, 2, 3))):
        grid = Faulty(silent)
        start(grid, min_replies=share)
        assert grid.attempts == [EVERYBODY]


def test_a_client_that_failed_has_replied():
    grid = Faulty((1,), error=ErrorCode.CLIENT_APP_RAISED_EXCEPTION)
    _, strategy = start(grid, min_replies=1.0)
    assert grid.attempts == [EVERYBODY]
    assert strategy.statistics.dropped == {"the client failed: gone": 1}


def test_a_run_ends_where_too_few_reply_however_often_they_are_asked():
    grid = Faulty((1, 4))
    with pytest.raises(StrategyError, match=r"round 1: no reply from clients \[1, 4\] after 3 attempts.*then resume"):
        start(grid, min_replies=1.0)
    assert grid.attempts == [EVERYBODY, [1, 4], [1, 4]]


def test_a_client_is_asked_again_at_the_node_where_it_is_by_then():
    class Moving(Faulty):
        def get_node_ids(self):
            return [node for node in range(1, 10) if node != (2 if self.attempts else 9)]

        def _answers(self, questions):
            for message in super()._answers(questions):
                if message.has_content() and message.metadata.src_node_id == 9:
                    message.content["reply"]["client-id"] = 1
                yield message

    grid = Moving((1,), ())
    _, strategy = start(grid, min_replies=1.0)
    assert grid.attempts == [EVERYBODY, [8]]
    assert strategy.statistics.accepted == 8


@pytest.mark.parametrize("method", [FedAvg, IFCA])
def test_at_client_level_a_round_is_charged_and_released_whatever_came(method):
    grid = Faulty(EVERYBODY)
    _, strategy = start(grid, private(), method, min_replies=1.0)
    assert grid.attempts == [EVERYBODY]
    assert len(strategy.ledger.charges) == 1


def test_a_round_begins_when_enough_clients_are_there():
    grid = Coming([2, 3], [2, 3])
    with pytest.raises(StrategyError, match="round 1: 2 clients are registered after 0 s, fewer than min-clients = 3"):
        start(grid, nothing(rounds=2), rounds=2, min_clients=3)
    grid = Coming([2, 3, 4], [2])
    with pytest.raises(StrategyError, match="round 2: 1 clients are registered"):
        start(grid, nothing(rounds=2), rounds=2, min_clients=3)
    assert grid.rounds == [[2, 3, 4]]


@pytest.mark.parametrize(("speaking", "found"), [(0, "no client is registered"), (1, "1 clients are registered")])
def test_nodes_that_are_still_starting_are_told_from_nodes_that_are_not_there(speaking, found):
    class Starting(Coming):
        def _answers(self, questions):
            return super()._answers([each for each in questions if each.metadata.dst_node_id < 2 + speaking])

    with pytest.raises(StrategyError, match=f"{found} after 0 s.*: check the clients, then resume"):
        start(Starting([2, 3, 4][:speaking]), nothing(), min_clients=2)
    missing = f"{3 - speaking} nodes are online and have not sent their client-id.*increase registration-timeout"
    with pytest.raises(StrategyError, match=f"{found} after 0 s.*: {missing}, then resume"):
        start(Starting([2, 3, 4]), nothing(), min_clients=2)


def test_at_client_level_only_before_anything_is_released():
    with pytest.raises(StrategyError, match="round 1"):
        start(Coming([2]), private(rounds=2), rounds=2, min_clients=3)
    grid = Coming([2, 3, 4], [2])
    _, strategy = start(grid, private(rounds=2), rounds=2, min_clients=3)
    assert grid.rounds == [[2, 3, 4], [2]]
    assert strategy.ledger.spent() < math.inf
