"""State of a client between rounds: personal layers and the last label. It is never sent.

Flower's processes are stateless, so the state is in a file: in ``state-dir`` of the node configuration, or, in a
simulation, in the run folder. It survives restarts of client and server. The local engine, which simulates many
clients, writes a file per call of a handler, which never changes: replacing one file per client in every round takes
longer than training small models.

=====================================  ==============================================================================
``client-I.safetensors``               the state of client I; in ``clients/`` of a run folder, it is older than all
                                       others: after the run, and for `flwr run`
``clients/NUMBER-ROUND-NAME.states``   the states of the clients of one call in a round, as tensors ``CLIENT/NAME``
=====================================  ==============================================================================

A simulated client's state is in the file with the largest number that contains it. No file is deleted before the next
round begins, so a run that was killed resumes with the states of its checkpoint.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save

from coterie.files import FileError, private_folder, write_atomic

#: State of a client: its arrays by name.
State: TypeAlias = dict[str, np.ndarray[Any, Any]]

_SUFFIX = ".states"
_NAME = re.compile(rf"(\d+)-(\d+)-[0-9a-f]+{re.escape(_SUFFIX)}")
# Files that a process keeps open, and clients of one file when states are gathered from many files.
_OPEN, _TOGETHER = 16, 256


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

    def read(self) -> State:
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

    def write(self, arrays: State) -> None:
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


class KeptState:
    """The state of a client in one call: read where it is kept, and written when the call ends.

    Args:
        client_id: id in Coterie.
        folder: of the states.
        file: contains the client's state; None: no call has left one.
    """

    def __init__(self, client_id: int, folder: str | Path, file: str | Path | None) -> None:
        self._client_id, self._folder, self._file = client_id, folder, file and Path(file)
        self.written: State | None = None

    def read(self) -> State:
        """See :meth:`StateFile.read`."""
        if self._file is None:
            return StateFile(self._folder, self._client_id).read()
        names, file = _opened(self._file)
        return {name: file.get_tensor(f"{self._client_id}/{name}") for name in names[self._client_id]}

    def write(self, arrays: State) -> None:
        """Keep the state until the call ends."""
        self.written = arrays


class KeptStates:
    """The states of the clients in a folder.

    Args:
        folder: need not exist.

    Raises:
        FileError: a file is damaged.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._files: dict[int, Path] = {}  # by client
        self._sizes: dict[Path, int] = {}  # clients of a file, if it is the latest one of some or was before this round
        self._round, self._numbers = -1, count()  # begin() comes first
        for number, _, file in _numbered(self.folder):
            self._numbers = count(number + 1)
            self.keep(file)

    def of(self, client_id: int) -> KeptState:
        """Return the state of a client."""
        return KeptState(client_id, self.folder, self._files.get(client_id))

    def begin(self, number: int) -> None:
        """Begin a round, unless it has begun.

        The states before it are final: files that hold only former states are deleted, and if all others hold more
        former states than latest ones, the latest ones are written anew.
        """
        number = max(number, 0)
        if number == self._round:
            return
        if sum(self._sizes.values()) > 2 * len(self._files):
            clients = sorted(self._files)
            for start in range(0, len(clients), _TOGETHER):
                states = {client: self.of(client).read() for client in clients[start : start + _TOGETHER]}
                self.keep(write_states(self.new_file(), states))
        latest = set(self._files.values())
        self._sizes = {file: size for file, size in self._sizes.items() if file in latest}
        for *_, file in _numbered(self.folder):
            if file not in latest:
                file.unlink()
        self._round = number

    def new_file(self) -> Path:
        """Return the path of a new file, for the states that a call in this round leaves."""
        name = f"{next(self._numbers):09d}-{self._round:09d}-{secrets.token_hex(4)}"  # never that of a deleted file
        return self.folder / f"{name}{_SUFFIX}"

    def keep(self, file: str | Path | None) -> None:
        """Let the states in a file replace former ones; None: a call has left none."""
        if file is not None:
            path = Path(file)
            clients = _opened(path)[0]
            self._files |= dict.fromkeys(clients, path)
            self._sizes[path] = len(clients)

    def as_client_files(self) -> None:
        """Write a file per client instead, for an engine whose clients read their own."""
        for client in self._files:
            StateFile(self.folder, client).write(self.of(client).read())
        for *_, file in _numbered(self.folder):
            file.unlink()
        self._files, self._sizes = {}, {}


def forget_states_after(folder: str | Path, number: int) -> None:
    """Delete the states that later rounds than ``number`` have left."""
    for _, left_by, file in _numbered(Path(folder)):
        if left_by > number:
            file.unlink()


def write_states(file: str | Path, states: Mapping[int, State]) -> Path | None:
    """Write the states of clients, by id, to a new file.

    Returns:
        the file; None if there are no states, and no file.

    Raises:
        OSError: it cannot be written, and is not there.
    """
    tensors = {
        f"{client}/{name}": np.ascontiguousarray(values)
        for client, state in states.items()
        for name, values in state.items()
    }
    if not tensors:
        return None
    file = Path(file)
    private_folder(file.parent)
    write_atomic(file, save(tensors), sync=False)
    return file


def _numbered(folder: Path) -> list[tuple[int, int, Path]]:
    """Return the number, the round and the path of each file, in order of their numbers."""
    files = [(_NAME.fullmatch(file.name), file) for file in folder.glob(f"*{_SUFFIX}")]
    return sorted((int(name[1]), int(name[2]), file) for name, file in files if name is not None)


@lru_cache(maxsize=_OPEN)
def _opened(file: Path) -> tuple[Mapping[int, Sequence[str]], Any]:
    """Return the names of each client's arrays in a file, and the open file.

    Raises:
        FileError: it is damaged.
    """
    try:
        opened: Any = safe_open(file, framework="numpy")
    except (OSError, SafetensorError) as error:
        raise FileError(
            f"{file} cannot be read ({error}); move it away, and its clients continue with their former state"
        ) from error
    names: dict[int, list[str]] = {}
    for key in opened.keys():  # noqa: SIM118 (it is no mapping)
        client, _, name = key.partition("/")
        names.setdefault(int(client), []).append(name)
    return names, opened
