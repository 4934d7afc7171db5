"""`coterie superlink`: Flower's SuperLink, whose database waits longer for a lock."""

import contextlib
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.federation import NoOpFederationManager

from coterie.deploy.certificates import create
from coterie.flower.transport import nodes_speak_http

pytestmark = pytest.mark.filterwarnings("ignore:No path_separator:DeprecationWarning")  # Flower's use of alembic
BIN = Path(sys.executable).parent
# The latest revision of its databases.
FLOWER_1_39 = "8f4785e2dc47"
# Another connection holds the lock of the database for longer than Flower waits, which is a tenth of a second here.
LOCKED = """
import sqlite3, sys, threading
from flwr.supercore import sql_mixin
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.federation import NoOpFederationManager
from coterie.deploy.superlink import wait_for_locks
sql_mixin.SQLITE_PRAGMAS = tuple((n, "100" if n == "busy_timeout" else v) for n, v in sql_mixin.SQLITE_PRAGMAS)
path, patient = sys.argv[1], sys.argv[2] == "patient"
if patient:
    wait_for_locks(30)
state = LinkStateFactory(path, NoOpFederationManager(), ObjectStoreFactory(path)).state()
other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
other.execute("BEGIN IMMEDIATE")
threading.Timer(2.0, other.execute, ["COMMIT"]).start()
try:
    print(state.create_node("owner", "owner", b"key", 30.0) > 0)
except Exception as error:
    print(error.orig)
"""


def linkstate(path):
    return LinkStateFactory(str(path), NoOpFederationManager(), ObjectStoreFactory(str(path))).state()


def created(path, how):
    words = [sys.executable, "-W", "ignore", "-c", LOCKED, path / f"{how}.db", how]
    return subprocess.run(words, capture_output=True, text=True, timeout=60).stdout.splitlines()[-1]


@pytest.mark.slow
def test_the_database_waits_for_its_turn(tmp_path):
    assert created(tmp_path, "flower") == "database is locked"
    assert created(tmp_path, "patient") == "True"


@pytest.mark.slow
def test_a_database_of_a_newer_flower_is_an_error_of_one_line(tmp_path):
    path = tmp_path / "superlink.db"
    linkstate(path).object_store._engine.dispose()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = 'd9bd9d502cf8'")
        connection.commit()
    command = [BIN / "coterie", "superlink", "--insecure", "--database", path, "--fleet-api-address", "127.0.0.1:0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: --database: a newer version than flwr ")


def refused(coterie, *flags):
    """The line with which a SuperLink does not start."""
    status, _, err = coterie("superlink", "--insecure", *flags, "--fleet-api-address", "127.0.0.1:0")
    assert status == 1
    assert "Traceback" not in err
    return err.splitlines()[-1]


@pytest.fixture
def never_serves(monkeypatch):
    """Fails where a SuperLink would start."""
    monkeypatch.setattr("coterie.deploy.superlink.check", lambda *_: pytest.fail("the SuperLink serves"))


@pytest.mark.parametrize("damage", ["garbage", "half", "a page less", "middle"])
def test_a_damaged_database_is_an_error_of_one_line(tmp_path, coterie, never_serves, damage):
    path = tmp_path / "superlink.db"
    linkstate(path).object_store._engine.dispose()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    content = path.read_bytes()
    half, page = len(content) // 2, 4096
    broken = {
        "garbage": b"no database" * 1000,
        "half": content[:half],
        "a page less": content[:-page],
        "middle": content[:page] + bytes(half) + content[page + half :],
    }
    path.write_bytes(broken[damage])
    line = refused(coterie, "--database", path)
    assert line.startswith(f"error: --database {path}: damaged (")
    assert "restore a backup" in line
    assert path.read_bytes() == broken[damage]


def test_a_key_of_another_certificate_is_an_error_of_one_line(tmp_path, coterie, never_serves):
    for name in ("one", "other"):
        create(tmp_path / name, 1, ["localhost"])
    certificate, key = tmp_path / "one" / "server.crt", tmp_path / "other" / "server.key"
    more = ["--ssl-certfile", certificate, "--ssl-ca-certfile", tmp_path / "one" / "ca.crt"]
    for flags in (
        [*more, "--ssl-keyfile", key],
        [*more, f"--ssl-keyfile={key}"],
        [*more, "--ssl-keyfile", certificate],
    ):
        line = refused(coterie, *flags)
        assert line.startswith("error: --ssl-keyfile ")
        assert f"is not the unencrypted key of --ssl-certfile {certificate} (" in line


@pytest.mark.skipif(not nodes_speak_http(), reason="Flower 1.39 is the oldest version")
def test_nodes_and_runs_of_flower_1_39_stay(tmp_path):
    """Flower's own conversion back makes the old database."""
    from alembic import command
    from flwr.supercore.state.alembic.utils import build_alembic_config

    path = tmp_path / "superlink.db"
    state = linkstate(path)
    node = state.create_node("owner", "owner", b"key", 30.0)
    run = state.create_run("coterie", "0.2.0", "hash", {}, NOOP_FEDERATION_ID, None, "owner", TaskType.SERVER_APP)
    command.downgrade(build_alembic_config(state._engine), FLOWER_1_39)
    state._engine.dispose()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert not connection.execute("SELECT name FROM sqlite_master WHERE name = 'message'").fetchall()
    state = linkstate(path)
    assert [each.node_id for each in state.get_node_info()] == [node]
    assert [each.run_id for each in state.get_run_info()] == [run]
    assert state.get_node_id_by_public_key(b"key") == node


SERVING = """
import os, sys
import flwr.superlink.cli as flower
from coterie.deploy.superlink import serve
os.umask(0o022)
path, form = sys.argv[1:]
open(path, "w").close()
flower.flower_superlink = lambda: open(path + "-wal", "w").close()
serve([f"--database={path}"] if form == "one" else ["--database", path])
"""


@pytest.mark.parametrize("form", ["one", "two"])
def test_the_database_is_for_its_user_alone(tmp_path, form):
    path = tmp_path / "superlink.db"
    subprocess.run([sys.executable, "-W", "ignore", "-c", SERVING, path, form], check=True, timeout=60)
    modes = {entry.name: oct(entry.stat().st_mode & 0o777) for entry in tmp_path.iterdir()}
    assert modes == {"superlink.db": "0o600", "superlink.db-wal": "0o600"}
