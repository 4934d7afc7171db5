"""The server: run configuration, run folder, metrics, and the ServerApp that ties a run together."""

from coterie.server.config import SCHEMA, ConfigError, Key, RunConfig
from coterie.server.folder import FolderError, RunFolder
from coterie.server.run import RunError, run

__all__ = ["SCHEMA", "ConfigError", "FolderError", "Key", "RunConfig", "RunError", "RunFolder", "run"]
