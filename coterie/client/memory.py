"""State of a client between rounds: its personal layers, its last label. It is never sent.

Flower's processes keep no state, so it is in a file: in the folder that a deployed client configures
(``state-dir`` of its node configuration), or, in a simulation, in the run folder. It survives a restart of either.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from coterie.files import private_folder, write_atomic


class ClientError(RuntimeError):
    """A client cannot execute a request."""


class Memory:
    """The state file of one client.

    Args:
        folder: its folder; None: this client keeps no state, and fails if a method needs it.
        client_id: id in Coterie.
    """

    def __init__(self, folder: Path | None, client_id: int) -> None:
        self._path = None if folder is None else folder / f"client-{client_id}.safetensors"

    def read(self) -> dict[str, np.ndarray[Any, Any]]:
        """Arrays by name; empty at first.

        Raises:
            ClientError: the file is damaged, or there is no folder.
        """
        path = self._file()
        if not path.exists():
            return {}
        try:
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise ClientError(f"{path} cannot be read ({error}); move it away to let this client start anew") from error

    def write(self, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        """Replace everything, atomically."""
        path = self._file()
        private_folder(path.parent)
        content = save({name: np.ascontiguousarray(values) for name, values in arrays.items()})
        write_atomic(path, content, sync=False)

    def _file(self) -> Path:
        if self._path is None:
            raise ClientError(
                "this method keeps something at the client between rounds; give the client a folder for it: "
                "state-dir in its node configuration (coterie run and flwr simulations use the run folder)"
            )
        return self._path
