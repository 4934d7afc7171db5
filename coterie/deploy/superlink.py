"""Flower's SuperLink for many nodes and for strangers at its port.

- All threads of a SuperLink write to one SQLite file. Flower gives up after five seconds if the file stays locked, and
  the SuperNode whose reply could not be stored drops it. This one waits longer. The file holds requests, replies and
  public keys, and is for its user alone.
- The Fleet API receives a message before it checks who sent it, and Flower's limit is 2 GiB. Flower sends arrays in
  parts of 5 MiB, so that 32 MiB suffice for models of any size.
- The TLS handshake ends a connection without a certificate of the authority, before anything is received (mutual TLS).
  Nodes are then authenticated by their keys.
"""

from __future__ import annotations

import argparse
import os
import sqlite3
import ssl
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from importlib import import_module
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

from coterie.deploy.edge import superexec_command
from coterie.deploy.superexec_watch import notice_silence, watch_superexec
from coterie.files import PRIVATE
from coterie.flower import check
from coterie.flower.transport import nodes_speak_http
from coterie.site.errors import DeployError

#: Seconds that a SuperLink waits for its locked database.
BUSY_SECONDS = 60
#: Bytes of the largest message that the Fleet API receives.
MAX_MESSAGE = 32 * 2**20
_GONE = "--require-client-certificates: with TLS, clients always present certificates; leave this option out"


def wait_for_locks(seconds: float = BUSY_SECONDS) -> None:
    """Set the lock timeout of every SQLite connection in this process.

    Flower sets its own timeout when it creates a connection. This one is set on every checkout from the pool.
    """
    from sqlalchemy import event
    from sqlalchemy.pool import Pool

    def set_timeout(connection: Any, *_: object) -> None:
        connection.execute(f"PRAGMA busy_timeout = {int(1000 * seconds)}")

    event.listen(Pool, "checkout", set_timeout)


def serve(flags: Sequence[str]) -> None:
    """Run Flower's SuperLink; ``flags`` are those of ``flower-superlink``.

    ``--fleet-api-address`` is the port of clients with every version of Flower. It speaks gRPC with Flower 1.39, and
    with a newer one if $FLWR_INTERNAL_GRPC_FLEET_API is 1.
    """
    from flwr.superlink.cli import flower_superlink

    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    if "--require-client-certificates" in flags:
        raise DeployError(_GONE)
    if over_http := nodes_speak_http() and os.environ.get("FLWR_INTERNAL_GRPC_FLEET_API") != "1":
        parser.add_argument("--fleet-api-address", default="0.0.0.0:9092")
    options, flags = parser.parse_known_args(list(flags))
    words = [word for flag in flags for word in flag.split("=", 1)]
    _check_files(dict(pairwise(words)))
    if over_http and "--simulation" not in flags:
        check("deploy.client_port", "deploy.fleet")
        from coterie.deploy import client_port

        client_port.open_with(options.fleet_api_address)
    else:
        check("deploy.superlink")
        protect_fleet()
    os.umask(0o077)
    # take access to an existing database from other users; new files are private by the umask
    for name, value in pairwise(words):
        for suffix in ("", "-wal", "-shm") if name == "--database" else ():
            with suppress(OSError):
                os.chmod(value + suffix, PRIVATE)
    wait_for_locks()
    check("deploy.superexec_watch")
    watch_superexec(import_module("flwr.superlink.cli.flower_superlink"), command=superexec_command("--server"))
    notice_silence(import_module("flwr.superlink.servicer.runtime.runtime_handlers"))
    sys.argv = ["flower-superlink", *flags]
    with _database_of_another_version():
        flower_superlink()


def _check_files(flags: Mapping[str, str]) -> None:
    """Check database and key, of which Flower shows a traceback, or serves what is left.

    Raises:
        DeployError: the database is damaged, or the key is not that of the certificate.
    """
    database = Path(flags.get("--database", ""))
    if database.is_file():
        try:
            with closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=rw", uri=True)) as connection:
                (problem,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        except sqlite3.DatabaseError as error:
            problem = str(error)
        if problem != "ok":
            raise DeployError(
                f"--database {database}: damaged ({' '.join(problem.split())}): restore a backup (coterie backup "
                "restore), or move it away and register all nodes again"
            )
    certificate, key = (flags.get(name, "") for name in ("--ssl-certfile", "--ssl-keyfile"))
    if all(map(os.path.isfile, (certificate, key))):
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=str)
        except ssl.SSLError as error:
            raise DeployError(
                f"--ssl-keyfile {key}: is not the unencrypted key of --ssl-certfile {certificate} ({error.reason}): "
                "name a pair of coterie certs, such as server.key and server.crt"
            ) from None


@contextmanager
def _database_of_another_version() -> Iterator[None]:
    """Explain why a database that a newer Flower has converted cannot be opened."""
    from alembic.util import CommandError

    try:
        yield
    except CommandError as error:
        if "locate revision" not in str(error):
            raise
        raise DeployError(
            f"--database: a newer version than flwr {version('flwr')} has converted it ({error}): start that version, "
            "or restore a backup from before"
        ) from None


def protect_fleet() -> None:
    """Limit the messages that the Fleet API of this process receives, and ask clients for certificates."""
    flower: Any = import_module("flwr.superlink.cli.flower_superlink")
    create = flower.generic_create_grpc_server

    def create_protected(*arguments: Any, **options: Any) -> Any:
        options["max_message_length"] = MAX_MESSAGE
        if options.get("certificates") is None:
            return create(*arguments, **options)
        with _client_certificates():
            return create(*arguments, **options)

    flower.generic_create_grpc_server = create_protected


@contextmanager
def _client_certificates() -> Iterator[None]:
    """Let servers that are created meanwhile require certificates of their clients; Flower turns this off."""
    import grpc

    original = grpc.ssl_server_credentials

    def requiring(*arguments: Any, **options: Any) -> grpc.ServerCredentials:
        return original(*arguments, **{**options, "require_client_auth": True})

    grpc.ssl_server_credentials = requiring
    try:
        yield
    finally:
        grpc.ssl_server_credentials = original
