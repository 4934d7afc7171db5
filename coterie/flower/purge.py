"""Delete data of finished runs from a SuperLink's database: replies, requests, and logs."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from coterie.deploy.errors import DeployError

_MESSAGES = ("message_ins", "message_res", "task_message")
_OBJECTS = ("objects", "object_children", "run_objects")
_SESSIONS = ("object_push_session_roots", "object_push_session_pending", "object_push_sessions")
_LOGS = "task_logs"
_OVER = "SELECT run_id FROM run JOIN task USING (run_id) WHERE task_id = primary_task_id AND finished_at IS NOT NULL"


@dataclass(frozen=True)
class Purged:
    """Numbers of finished and other runs, deleted items of the finished ones, and sizes in bytes."""

    over: int
    unfinished: int
    messages: int
    objects: int
    log_lines: int
    before: int
    after: int


def purge(path: Path, logs: bool = False) -> Purged:
    """Delete messages and objects of finished runs, overwrite them in the file, and shrink it.

    Args:
        path: ``--database`` of a stopped SuperLink of flwr 1.39.
        logs: delete the logs of these runs, too.

    Raises:
        DeployError: the file is not such a database, cannot be written, or is in use.
    """
    path = path.expanduser()
    before = _size(path)
    try:
        connection = sqlite3.connect(f"file:{quote(str(path))}?mode=rw", uri=True, timeout=1.0, isolation_level=None)
    except sqlite3.Error as error:
        raise DeployError(f"{path}: cannot be opened: {error}") from None
    try:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")  # an open database of a SuperLink keeps a lock
        connection.execute("PRAGMA secure_delete = ON")
        connection.execute("BEGIN EXCLUSIVE")
        _check(connection, path)
        counts = _delete(connection, logs)
        connection.execute("COMMIT")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.execute("VACUUM")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except sqlite3.OperationalError as error:
        why = "is in use: stop the SuperLink" if "locked" in str(error) else f"cannot be written: {error}"
        raise DeployError(f"{path}: {why}") from None
    except sqlite3.DatabaseError as error:
        raise DeployError(f"{path}: not a database: {error}") from None
    finally:
        connection.close()
    return Purged(*counts, before, _size(path))


def _check(connection: sqlite3.Connection, path: Path) -> None:
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not {"run", "task", *_MESSAGES, *_OBJECTS, *_SESSIONS, _LOGS} <= tables:
        raise DeployError(f"{path}: not the database of a SuperLink of flwr 1.39")


def _delete(connection: sqlite3.Connection, logs: bool) -> tuple[int, int, int, int, int]:
    def number(query: str) -> int:
        return int(connection.execute(query).fetchone()[0])

    def deleted(table: str, where: str) -> int:
        return connection.execute(f"DELETE FROM {table} WHERE {where}").rowcount

    connection.execute(f"CREATE TEMP TABLE over AS {_OVER}")
    over = number("SELECT COUNT(*) FROM over")
    unfinished = number("SELECT COUNT(*) FROM run") - over
    mine = "run_id IN (SELECT run_id FROM over)"
    messages = sum(deleted(table, mine) for table in _MESSAGES)
    for table in _SESSIONS:
        deleted(table, f"session_id IN (SELECT session_id FROM object_push_sessions WHERE {mine})")
    deleted("run_objects", mine)
    objects = deleted("objects", "object_id NOT IN (SELECT object_id FROM run_objects)")
    deleted("object_children", "parent_id NOT IN (SELECT object_id FROM objects)")
    connection.execute(
        "UPDATE objects SET ref_count = (SELECT COUNT(*) FROM object_children WHERE child_id = objects.object_id)"
    )
    log_lines = deleted(_LOGS, f"task_id IN (SELECT task_id FROM task WHERE {mine})") if logs else 0
    return over, unfinished, messages, objects, log_lines


def _size(path: Path) -> int:
    """Return the size of the database and its write-ahead files."""
    if not path.is_file():
        raise DeployError(f"{path}: does not exist")
    files = (path, *(path.with_name(path.name + suffix) for suffix in ("-wal", "-journal")))
    return sum(file.stat().st_size for file in files if file.exists())
