"""Delete data of finished runs from a SuperLink's database: replies, requests, and logs."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from coterie.flower import SUPPORTED
from coterie.site.errors import DeployError

_MESSAGES = ("message_ins", "message_res", "task_message")
_OBJECTS = ("objects", "object_children", "run_objects")
_SESSIONS = ("object_push_session_roots", "object_push_session_pending", "object_push_sessions")
_LOGS = "task_logs"
#: Since flwr 1.42.
_NEW_MESSAGES = "message"
_OVER = "SELECT run_id FROM run JOIN task USING (run_id) WHERE task_id = primary_task_id AND finished_at IS NOT NULL"

#: Tables of flwr 1.39 to 1.42, and their columns. What another version adds may hold messages.
_KNOWN = {
    "alembic_version": "version_num",
    "automation": (
        "automation_id federation_id flwr_aid series_id status created_at updated_at next_run_at "
        "fixed_interval remaining_runs stopped_at start_run_request"
    ),
    "compacted_contexts": "id series_id through_event_id text created_at token_count",
    "connector": (
        "connector_id federation_id connector_ref credentials_json config_json created_at deleted_at "
        "created_by deleted_by"
    ),
    "connector_oauth_session": (
        "oauth_session_id flwr_aid connector_ref state redirect_uri pkce_verifier created_at expires_at "
        "completed_at federation_id"
    ),
    "fab": "fab_hash content verifications",
    "federation_app": (
        "federation_id app_id fab_hash app_type added_by added_at is_hub_app updated_at display_name description color"
    ),
    "message": (
        "message_id run_id src_node_id dst_node_id src_task_id dst_task_id reply_to_message_id group_id "
        "created_at ttl message_type expires_at cleared acknowledged_at cancelled_at"
    ),
    "message_ins": (
        "message_id group_id run_id src_node_id dst_node_id reply_to_message_id created_at delivered_at ttl "
        "message_type content error"
    ),
    "message_res": (
        "message_id group_id run_id src_node_id dst_node_id reply_to_message_id created_at delivered_at ttl "
        "message_type content error"
    ),
    "node": (
        "node_id owner_aid owner_name status registered_at last_activated_at last_deactivated_at "
        "unregistered_at online_until heartbeat_interval public_key location name"
    ),
    "nonce_store": "namespace nonce expires_at",
    "object_children": "parent_id child_id",
    "object_push_session_pending": "session_id object_id",
    "object_push_session_roots": "session_id root_object_id",
    "object_push_sessions": "session_id run_id expires_at pending_count",
    "objects": "object_id content is_available ref_count",
    "objectstore_locks": "lock_id lock_value",
    "run": (
        "run_id fab_id fab_version fab_hash override_config federation_id flwr_aid bytes_sent bytes_recv "
        "clientapp_runtime federation_config usage_reported_at primary_task_id series_id"
    ),
    "run_connector": "run_id connector_id",
    "run_objects": "run_id object_id",
    "run_series": "series_id federation_id description created_at updated_at is_agent",
    "series_context": "series_id context",
    "series_runs": "id series_id run_id",
    "sqlite_sequence": "name seq",
    "task": (
        "task_id type run_id fab_hash model_ref connector_ref token active_until pending_at starting_at "
        "running_at finished_at sub_status details connector_id"
    ),
    "task_event": "id timestamp run_id task_id event data",
    "task_logs": "timestamp task_id log",
    "task_message": (
        "message_id run_id src_task_id dst_task_id reply_to_message_id created_at ttl message_type content error"
    ),
    "task_usage": (
        "id run_id task_id input_tokens output_tokens total_tokens usage_type created_at reported_at provider"
    ),
}


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
        path: ``--database`` of a stopped SuperLink.
        logs: delete the logs of these runs, too.

    Raises:
        DeployError: the file is not such a database, has tables or columns of an unknown version, cannot be written,
            or is in use.
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
        tables = _tables(connection)
        if not {"run", "task", *_MESSAGES, *_OBJECTS, *_SESSIONS, _LOGS} <= tables:
            raise DeployError(f"{path}: not the database of a SuperLink of flwr {SUPPORTED}")
        for table in sorted(tables):
            columns = {column for _, column, *_ in connection.execute(f'PRAGMA table_info("{table}")')}
            if unknown := columns - set(_KNOWN.get(table, "").split()):
                raise DeployError(
                    f"{path}: {table} ({', '.join(sorted(unknown))}) is not in databases of flwr {SUPPORTED}, and may "
                    "hold messages that would remain: purge with the version of Coterie for this SuperLink"
                )
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


def _tables(connection: sqlite3.Connection) -> set[str]:
    return {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


def _delete(connection: sqlite3.Connection, logs: bool) -> tuple[int, int, int, int, int]:
    def number(query: str) -> int:
        return int(connection.execute(query).fetchone()[0])

    def deleted(table: str, where: str) -> int:
        return connection.execute(f"DELETE FROM {table} WHERE {where}").rowcount

    connection.execute(f"CREATE TEMP TABLE over AS {_OVER}")
    over = number("SELECT COUNT(*) FROM over")
    unfinished = number("SELECT COUNT(*) FROM run") - over
    mine = "run_id IN (SELECT run_id FROM over)"
    messages = sum(deleted(table, mine) for table in (*_MESSAGES, _NEW_MESSAGES) if table in _tables(connection))
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
