"""The server: run configuration, run folder, metrics, and the ServerApp that ties a run together."""

from coterie.fields.settings import ConfigError
from coterie.server.checkpoints import FolderError
from coterie.server.config import RunConfig
from coterie.server.folder import RunFolder
from coterie.server.resolution import SETTINGS, applicable
from coterie.server.run import RunError, run

__all__ = ["SETTINGS", "ConfigError", "FolderError", "RunConfig", "RunError", "RunFolder", "applicable", "run"]
