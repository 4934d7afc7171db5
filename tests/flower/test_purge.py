"""`coterie purge`, on databases that Flower's own SuperLink state writes."""

import contextlib
import functools
import os
import shutil
import sqlite3
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import SubStatus
from flwr.common.serde import message_to_proto
from flwr.proto.runtime_pb2 import PushAppMessagesRequest
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore import sql_mixin
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, no_object_id_recompute
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.servicer.runtime import runtime_handlers
from kit.commands import assert_refused, document

pytestmark = pytest.mark.filterwarnings("ignore:No path_separator:DeprecationWarning")  # Flower's use of alembic
SECRET = b"an update of a client, in the clear"


@functools.cache
def empty_database():
    """Flower's tables, whose migrations take longer than most tests."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "superlink.db")
        close(state_in(path))
        return path.read_bytes()


def linkstate(path):
    if not path.exists():
        path.write_bytes(empty_database())
    return state_in(path)


def state_in(path):
    objects = ObjectStoreFactory(str(path))
    return LinkStateFactory(str(path), NoOpFederationManager(), objects).state()


def close(state):
    for each in (state, state.object_store):
        each._engine.dispose()


def content(number):
    """Of a message: an array with the secret, and one that all messages share."""
    secret = np.frombuffer(SECRET + b"%04d" % number, np.uint8)
    shared = np.zeros(1000)
    return RecordDict({"own": ArrayRecord({"a": Array(secret)}), "shared": ArrayRecord({"b": Array(shared)})})


@pytest.fixture
def superlink(tmp_path, monkeypatch):
    """A database of two runs with questions that nobody took; run 0 is over, and has log lines."""
    pragmas = (*sql_mixin.SQLITE_PRAGMAS, ("secure_delete", "OFF"))  # on by default in some builds of SQLite
    monkeypatch.setattr(sql_mixin, "SQLITE_PRAGMAS", pragmas)
    path = tmp_path / "super link.db"
    state = linkstate(path)
    node = state.create_node("owner", "owner", b"key", 30.0)
    state.activate_node(node, 1e6)
    runs = [
        state.create_run(None, None, None, {}, NOOP_FEDERATION_ID, None, "owner", TaskType.SERVER_APP) for _ in range(2)
    ]
    for name, number in (("_task_id", 1), ("_node_id", 1)):
        monkeypatch.setattr(TaskIdentity, name, number)
    for number, run in enumerate(runs):
        monkeypatch.setattr(TaskIdentity, "_run_id", run)
        for each in range(3):
            message = Message(content(10 * number + each), dst_node_id=node, message_type="train")
            message.metadata.__dict__["_message_id"] = message.object_id
            with no_object_id_recompute():
                proto = message_to_proto(remove_content_from_message(message))
                request = PushAppMessagesRequest(messages_list=[proto], message_object_trees=[get_object_tree(message)])
                answer = runtime_handlers.push_messages(request, state, SimpleNamespace(run_id=run))
                for object_id, part in get_all_nested_objects(message).items():
                    if object_id in answer.objects_to_push:
                        assert state.store_object(run, answer.session_id, object_id, part.deflate())
    task = state.get_run_info(run_ids=[runs[0]])[0].primary_task_id
    state.add_task_log(task, "client 3 replied")
    assert state.finish_task(task, SubStatus.STOPPED, "")
    assert state.num_message_ins() == 6
    return SimpleNamespace(path=path, state=state, runs=runs, task=task, node=node)


def held(path):
    """Every byte on disk of a database."""
    return b"".join(file.read_bytes() for file in path.parent.glob(f"{path.name}*"))


def test_runs_that_are_over_leave_nothing(coterie, superlink):
    close(superlink.state)
    before = held(superlink.path)
    assert all(before.count(SECRET + b"%04d" % number) for number in (0, 1, 2, 10, 11, 12))
    status, out, err = coterie("purge", superlink.path, "--json")
    assert (status, err) == (0, "")
    done = document(out)
    assert (done["runs-over"], done["runs-unfinished"], done["messages"], done["log-lines"]) == (1, 1, 3, 0)
    after = held(superlink.path)
    assert done["bytes-after"] == len(after)
    assert [after.count(SECRET + b"%04d" % number) > 0 for number in (0, 1, 2, 10, 11, 12)] == [False] * 3 + [True] * 3
    assert b"client 3 replied" in after

    state = linkstate(superlink.path)  # what is left is a SuperLink's, and whole
    (node,) = state.get_node_info()
    assert node.node_id == superlink.node
    messages = state.get_message_ins(superlink.node, None)
    assert {message.metadata.run_id for message in messages} == {superlink.runs[1]}
    store = state.object_store
    for message in messages:
        tree = store.get_object_tree(message.metadata.message_id)
        assert all(store.get(child.object_id) for child in tree.children)
    state.stop_run(superlink.runs[1])  # shared objects are counted, so that Flower deletes them with the last message
    close(state)
    with contextlib.closing(sqlite3.connect(superlink.path)) as connection:
        assert connection.execute("SELECT COUNT(*) FROM objects").fetchone() == (0,)
    assert coterie("purge", superlink.path, "--logs")[0] == 0
    assert SECRET not in held(superlink.path)
    assert b"client 3 replied" not in held(superlink.path)


def test_what_flower_deletes_stays_in_the_file_until_it_is_purged(coterie, superlink):
    superlink.state.cleanup_run(superlink.runs[0])
    close(superlink.state)
    assert SECRET + b"0000" in held(superlink.path)
    status, out, _ = coterie("purge", superlink.path)
    assert status == 0
    assert "1 finished runs: 0 messages, 0 objects and 0 log lines deleted" in out
    assert "1 unfinished runs are kept" in out
    assert SECRET + b"0000" not in held(superlink.path)
    assert SECRET + b"0010" in held(superlink.path)


def test_a_superlink_that_runs(coterie, superlink):
    before = held(superlink.path)
    assert_refused(coterie("purge", superlink.path), "is in use: stop the SuperLink")
    assert held(superlink.path) == before
    assert superlink.state.num_message_ins() == 6
    close(superlink.state)


def test_what_is_no_database(coterie, tmp_path):
    assert_refused(coterie("purge", tmp_path / "none"), "does not exist")
    assert_refused(coterie("purge", tmp_path), "does not exist")
    (tmp_path / "text").write_text("text " * 1000)
    assert_refused(coterie("purge", tmp_path / "text"), "not a database")
    with contextlib.closing(sqlite3.connect(tmp_path / "other.db")) as connection:
        connection.execute("CREATE TABLE run (run_id INTEGER)")
    assert_refused(coterie("purge", tmp_path / "other.db"), "not the database of a SuperLink of flwr >=1.39,<1.43")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("CREATE TABLE replies (run_id INTEGER, body BLOB)", "replies (body, run_id)"),
        ("ALTER TABLE message_res ADD COLUMN copy BLOB", "message_res (copy)"),
        ("ALTER TABLE node ADD COLUMN note TEXT", "node (note)"),
    ],
)
def test_what_another_version_adds_is_refused(coterie, superlink, change, named):
    close(superlink.state)
    with contextlib.closing(sqlite3.connect(superlink.path)) as connection:
        connection.execute(change)
    before = held(superlink.path)
    assert_refused(coterie("purge", superlink.path), named, "may hold messages that would remain")
    assert held(superlink.path) == before


def test_messages_of_flower_1_42_are_deleted(coterie, superlink):
    close(superlink.state)
    with contextlib.closing(sqlite3.connect(superlink.path)) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS message (message_id TEXT, run_id INTEGER, group_id TEXT)")
        required = [(column, needed) for _, column, _, needed, *_ in connection.execute("PRAGMA table_info(message)")]
        values = ", ".join(
            {"run_id": "run_id", "message_id": "hex(run_id)"}.get(column, "'1'" if needed else "NULL")
            for column, needed in required
        )
        connection.execute(f"INSERT INTO message SELECT {values} FROM run")
        connection.commit()
        ((finished,),) = connection.execute("SELECT run_id FROM task WHERE finished_at IS NOT NULL").fetchall()
    assert coterie("purge", superlink.path)[0] == 0
    with contextlib.closing(sqlite3.connect(superlink.path)) as connection:
        ((left,),) = connection.execute("SELECT run_id FROM message").fetchall()
    assert left != finished


def test_a_database_that_may_not_be_written(coterie, superlink):
    close(superlink.state)
    copy = superlink.path.parent / "read only.db"
    shutil.copy(superlink.path, copy)
    copy.chmod(0o400)
    if os.geteuid() == 0:
        pytest.skip("root may write any file")
    assert_refused(coterie("purge", copy), "read only.db", "cannot be")
