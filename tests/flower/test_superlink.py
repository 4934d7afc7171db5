"""`coterie superlink`: Flower's SuperLink, whose database waits longer for a lock."""

import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
# Another connection holds the lock of the database for longer than Flower waits, which is a tenth of a second here.
LOCKED = """
import sqlite3, sys, threading
from flwr.supercore import sql_mixin
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.federation import NoOpFederationManager
from coterie.flower.superlink import wait_for_locks
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


def created(path, how):
    words = [sys.executable, "-W", "ignore", "-c", LOCKED, path / f"{how}.db", how]
    return subprocess.run(words, capture_output=True, text=True, timeout=60).stdout.splitlines()[-1]


@pytest.mark.slow
def test_the_database_waits_for_its_turn(tmp_path):
    assert created(tmp_path, "flower") == "database is locked"
    assert created(tmp_path, "patient") == "True"


def test_flags_are_flower_s():
    done = subprocess.run([BIN / "coterie", "superlink", "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--fleet-api-address" in done.stdout


SERVING = """
import os, sys
import flwr.superlink.cli as flower
from coterie.flower.superlink import serve
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
