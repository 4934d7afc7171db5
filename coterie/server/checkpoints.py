"""Files of models between rounds."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from coterie.files import FileError, open_regular
from coterie.rounds.recorder import Checkpoint
from coterie.wire.messages import Layout
from coterie.wire.model_card import CONSTANTS_FILE

if TYPE_CHECKING:
    from torch import Tensor

#: The checkpoint in a run folder.
CHECKPOINT = "checkpoint/state.safetensors"
#: Constants of the network of a user, in a run folder.
CONSTANTS = f"models/{CONSTANTS_FILE}"
#: End of the message about a damaged file of a run.
WAY_OUT = "; restore it from a copy, or start a new run with another --out"
_HISTOGRAM, _MEAN, _KEPT = "histogram", "mean", "kept/"
_ABOUT, _DIGEST = "about", "digest"


class FolderError(RuntimeError):
    """The run folder cannot be used; it is unchanged."""


def checkpoint_content(state: Checkpoint, line: Mapping[str, Any], proof: Mapping[str, Any]) -> bytes:
    """Return the content of a checkpoint.

    Args:
        state: released values only.
        line: metrics of its round.
        proof: number of charges before it, and the chain of the last one.
    """
    tensors = {
        f"{cluster}/{name}": values.copy()
        for cluster, model in enumerate(state.models)
        for name, values in state.layout.split(model).items()
    }
    if state.histogram is not None:
        tensors[_HISTOGRAM] = state.histogram
    if state.mean is not None:
        tensors[_MEAN] = state.mean
    tensors |= {_KEPT + name: np.asarray(values, order="C") for name, values in state.state.items()}
    metadata = {"round": state.round, "line": dict(line), "names": state.layout.names, **proof}
    metadata = json.loads(json.dumps(metadata))  # as it is read again
    metadata[_DIGEST] = _digest(metadata, tensors)
    return tensor_content(tensors, metadata)


def read_checkpoint(path: Path) -> tuple[Checkpoint | None, dict[str, Any] | None]:
    """Read a checkpoint and the metrics of its round; None without the file.

    Raises:
        FolderError: the file is damaged.
    """
    if not path.exists():
        return None, None
    try:
        os.close(open_regular(path))
        with safe_open(path, framework="numpy") as file:
            metadata = json.loads(file.metadata()[_ABOUT])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
        if metadata.pop(_DIGEST, None) not in (None, _digest(metadata, tensors)):
            raise ValueError("its content does not match its digest")
        histogram, mean = tensors.pop(_HISTOGRAM, None), tensors.pop(_MEAN, None)
        kept = {key.removeprefix(_KEPT): tensors.pop(key) for key in sorted(tensors) if key.startswith(_KEPT)}
        names = metadata["names"]
        clusters = 1 + max((int(key.partition("/")[0]) for key in tensors), default=0)
        layout = Layout(tuple(names), tuple(tensors[f"0/{name}"].shape for name in names))
        models = np.stack([layout.flatten({n: tensors[f"{j}/{n}"] for n in names}) for j in range(clusters)])
        return Checkpoint(metadata["round"], models, layout, histogram, mean, kept), metadata["line"]
    except (FileError, SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise FolderError(f"{path} is damaged ({error}){WAY_OUT}") from None


def _digest(metadata: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> str:
    """Digest of a checkpoint, which detects flipped bits."""
    digest = hashlib.sha256(json.dumps(metadata).encode())
    for name in sorted(tensors):
        values = np.ascontiguousarray(tensors[name])
        digest.update(f"{name} {values.dtype} {values.shape}".encode())
        digest.update(values.tobytes())
    return digest.hexdigest()


def tensor_content(tensors: dict[str, np.ndarray], metadata: Mapping[str, Any]) -> bytes:
    """Return the content of a file of tensors."""
    # One key of metadata: safetensors writes several in random order, and equal runs should leave equal files.
    return save(tensors, metadata={_ABOUT: json.dumps(metadata)})


def constants_content(constants: Mapping[str, Tensor]) -> bytes:
    """Return the content of a file of a network's constants, of any type."""
    from safetensors.torch import save as save_tensors

    return save_tensors({name: value.detach().cpu().contiguous().clone() for name, value in constants.items()})
