"""Local state of a client between rounds: personal layers and the last label. It is never sent.

Flower's processes are stateless, so the state is in a file: in ``state-dir`` of the node configuration, or, in a
simulation, in the run folder. It survives restarts of client and server.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from coterie.files import private_folder, write_atomic


class ClientError(RuntimeError):
    """A client cannot execute a request.

    Args:
        message: sent to the server.
        kind: one of :data:`~coterie.wire.messages.REFUSALS`, by which the server counts it.
    """

    def __init__(self, message: str, kind: str = "failed") -> None:
        super().__init__(message)
        self.kind = kind


class StateFile:
    """The state file of one client.

    Args:
        folder: where the file is; None: no state, and reading or writing fails.
        client_id: id in Coterie.
    """

    def __init__(self, folder: str | Path | None, client_id: int) -> None:
        self._path = None if folder is None else Path(folder) / f"client-{client_id}.safetensors"

    def read(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return the arrays by name; empty before the first write.

        Raises:
            ClientError: the file is damaged, or there is no folder.
        """
        path = self._file()
        if not path.exists():
            return {}
        try:
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise ClientError(f"{path} cannot be read ({error}); move it away to restart with empty state") from error

    def write(self, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        """Replace the state atomically.

        Raises:
            ClientError: there is no folder.
        """
        path = self._file()
        private_folder(path.parent)
        content = save({name: np.ascontiguousarray(values) for name, values in arrays.items()})
        write_atomic(path, content, sync=False)

    def _file(self) -> Path:
        if self._path is None:
            raise ClientError(
                "this method keeps state at the client between rounds, which requires a state folder; set state-dir "
                "in the node configuration (coterie run and flwr simulations use the run folder)"
            )
        return self._path
