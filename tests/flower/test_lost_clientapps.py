"""A ClientApp that ends without a reply, at any moment: its message is answered with an error."""

from datetime import timedelta

import pytest
from flwr.app import Message, RecordDict
from flwr.common.constant import ErrorCode, Status, SubStatus
from flwr.supercore.constant import TaskType
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

from coterie.deploy.supernode import answer_lost_messages
from coterie.flower.metadata import set_message_id

RUN = 7


@pytest.fixture
def state(monkeypatch):
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, RUN)

    class State(InMemoryNodeState):
        pass

    answer_lost_messages(State)
    state = State(ObjectStoreFactory().store())
    state.store_run(Run.create_empty(RUN))
    return state


def received(state):
    """A task and its message, as a SuperNode stores them."""
    task = state.create_task(TaskType.CLIENT_APP, RUN, "hash")
    message = Message(RecordDict(), dst_node_id=1, message_type="train")
    set_message_id(message, message.object_id)
    state.store_message(message)
    return task, message


def messages(state, **which):
    find = getattr(state, "get_messages_legacy", None) or state.get_messages  # since Flower 1.42
    return find(run_ids=[RUN], **which)


def replies(state):
    """Message that is answered, and the code of the error, if it is one."""
    found = messages(state, is_reply=True)
    return [(each.metadata.reply_to_message_id, each.error.code if each.has_error() else None) for each in found]


def take(state):
    state.record_message_processing_start(messages(state, is_reply=False, limit=1)[0].metadata.message_id)


def expire(state):
    for record in state.task_token_store.values():
        record.active_until -= timedelta(days=1)
    assert state.get_task_by_token("") is None  # looks for those that have expired


@pytest.mark.parametrize("taken", [False, True], ids=["before it takes the message", "after it has taken the message"])
@pytest.mark.parametrize("end", ["killed", "asked to end", "stopped"])
def test_a_message_of_a_dead_clientapp_is_answered(state, taken, end):
    task, message = received(state)
    assert state.claim_task(task)
    assert state.activate_task(task)
    if taken:
        take(state)
    if end == "killed":
        expire(state)
    else:
        state.finish_task(task, SubStatus.FAILED if end == "asked to end" else SubStatus.STOPPED, "")
    assert replies(state) == [(message.metadata.message_id, ErrorCode.CLIENT_APP_CRASHED)]
    assert replies(state) == []  # once


def test_one_that_is_killed_before_it_starts_is_started_again(state):
    task, _ = received(state)
    assert state.claim_task(task)
    expire(state)
    assert replies(state) == []
    assert state.get_tasks(task_ids=[task])[0].status.status == Status.PENDING


def test_a_message_that_another_clientapp_of_the_run_can_take_waits_for_it(state):
    first, one = received(state)
    second, other = received(state)
    for task in (first, second):
        state.claim_task(task)
        state.activate_task(task)
    state.finish_task(first, SubStatus.FAILED, "")
    assert replies(state) == []
    take(state)
    state.finish_task(second, SubStatus.FAILED, "")
    found = replies(state)
    assert sorted(found) == sorted((each.metadata.message_id, ErrorCode.CLIENT_APP_CRASHED) for each in (one, other))


def test_a_reply_stays_the_only_one(state):
    task, message = received(state)
    state.claim_task(task)
    state.activate_task(task)
    take(state)
    reply = Message(RecordDict(), reply_to=message)
    set_message_id(reply, reply.object_id)
    state.store_message(reply)
    state.finish_task(task, SubStatus.COMPLETED, "")
    assert replies(state) == [(message.metadata.message_id, None)]
