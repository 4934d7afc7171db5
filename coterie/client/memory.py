"""What a client keeps between rounds: its own layers, its last label. It never travels.

Flower's processes forget, so it lives in a file of the client's: in the folder that a deployed client names itself
(``state-dir`` of its node configuration), or, in a simulation, in the run folder. It survives a restart of either.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from coterie.files import open_private, private_folder


class ClientError(RuntimeError):
    """A client that cannot do what it was asked."""


class Memory:
    """The file of one client.

    Args:
        folder: where it is; None: this client keeps no state, and fails if a method needs it.
        client_id: our own id for it.
    """

    def __init__(self, folder: Path | None, client_id: int) -> None:
        self._path = None if folder is None else folder / f"client-{client_id}.safetensors"

    def read(self) -> dict[str, np.ndarray[Any, Any]]:
        """Arrays by name; none at first.

        Raises:
            ClientError: the file is damaged, or there is no folder for it.
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
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        with open_private(temporary, "wb") as file:
            file.write(save({name: np.ascontiguousarray(values) for name, values in arrays.items()}))
        os.replace(temporary, path)

    def _file(self) -> Path:
        if self._path is None:
            raise ClientError(
                "this method keeps something at the client between rounds; give the client a folder for it: "
                "state-dir in its node configuration (coterie run and flwr simulations use the run folder)"
            )
        return self._path
