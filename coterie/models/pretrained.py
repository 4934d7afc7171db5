"""Parameters of a public, pre-trained network in a file of safetensors, which holds no code."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.files import FileError, open_regular
from coterie.models.errors import ModelError, few

if TYPE_CHECKING:
    from torch import Tensor, nn


def file_hash(path: str | Path) -> str:
    """Return the SHA-256 of a file, hexadecimal.

    Raises:
        ModelError: it cannot be read.
    """
    return _file_hash(*_version(path))


@lru_cache(maxsize=4)
def _file_hash(path: str, size: int, changed: int) -> str:
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_into(network: nn.Module, path: str | Path, needed: Collection[str]) -> None:
    """Copy the tensors of a file into the parameters and buffers of a network, in their own types.

    Args:
        network: that changes.
        path: a file of safetensors, whose names are those of the network.
        needed: names that the file must hold; all others may keep their values.

    Raises:
        ModelError: the file cannot be read, lacks a name, has another one, or one of another shape.
    """
    import torch

    tensors, own = _tensors(*_version(path)), network.state_dict()
    where = f"pretrained = '{path}'"
    if unknown := [name for name in tensors if name not in own]:
        raise ModelError(f"{where}: the network has no {few(unknown)}; it has {few(own)}")
    for name, value in tensors.items():
        if value.shape != own[name].shape:
            raise ModelError(
                f"{where}: {name} has shape {tuple(value.shape)}, and {tuple(own[name].shape)} in the network"
            )
    if missing := [name for name in needed if name in own and name not in tensors]:
        raise ModelError(f"{where} lacks {few(missing)}, which the run freezes")
    with torch.no_grad():
        for name, value in tensors.items():
            own[name].copy_(value)


def _version(path: str | Path) -> tuple[str, int, int]:
    try:
        os.close(open_regular(Path(path)))
        status = os.stat(path)
    except (FileError, OSError) as error:
        raise ModelError(f"pretrained: {error}") from None
    return os.path.abspath(path), status.st_size, status.st_mtime_ns


@lru_cache(maxsize=1)
def _tensors(path: str, size: int, changed: int) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"pretrained = '{path}' is no file of safetensors: {error}") from None
    return tensors
