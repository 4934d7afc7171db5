"""Training loops of users: arrays in, update out (docs/networks.md has the contract).

A trainer is a class. Each client has a new instance in each round, with a network and copies of arrays and records of
its own, so that nothing of one client reaches another one, or a later round.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from coterie.client.layers import Vectors
from coterie.client.sgd import LocalTrainingConfig
from coterie.datasets import Shard
from coterie.fields.plugins import PluginError, accepts, calling
from coterie.models import float32_arrays
from coterie.models.errors import few
from coterie.tasks import Task
from coterie.wire.messages import Layout

# What `train` receives.
_ARGUMENTS = ("arrays", "x", "y", "settings", "rng")
# Examples of a check, of which the last mini-batch is smaller than the others.
_CHECKED = 7


def train_by(
    trainer: type[Any],
    name: str,
    network: nn.Module,
    layout: Layout,
    start: Vectors,
    shards: Sequence[Shard],
    rngs: Iterable[np.random.Generator],
    settings: LocalTrainingConfig,
) -> Vectors:
    """Return the updates of clients that train one after the other; zero for clients without records.

    Args:
        trainer: the class.
        name: how a message names it.
        network: the network; its parameters are not used.
        layout: of its trainable part.
        start: (n, d) initial parameters of each client.
        shards: the n clients' data.
        rngs: n generators.
        settings: hyper-parameters of the run.

    Raises:
        PluginError: the trainer fails, or returns no update of the names and shapes that it received, of finite real
            numbers.
    """
    updates = np.zeros_like(start)
    for i, (shard, rng) in enumerate(zip(shards, rngs, strict=True)):
        if len(shard.y):
            updates[i] = _update(trainer, name, network, layout.split(start[i]), (shard.x, shard.y), settings, rng)
    return updates


def check_trainer(trainer: Any, name: str, network: nn.Module, x: npt.NDArray[Any], y: npt.NDArray[Any]) -> None:
    """Check a trainer against its contract, on a few examples.

    Args:
        trainer: the class.
        name: how the message names it.
        network: that it trains, which is left unchanged.
        x: (n, *shape) examples.
        y: (n,) targets.

    Raises:
        PluginError: the contract is violated.
    """
    if not inspect.isclass(trainer):
        raise PluginError(f"{name} is a {type(trainer).__name__}, not a class")
    if not accepts(trainer, 1):
        raise PluginError(f"{name} must accept (network)")
    if not callable(method := getattr(trainer, "train", None)) or not accepts(method, 1 + len(_ARGUMENTS)):
        raise PluginError(f"{name} needs a method train({', '.join(('self', *_ARGUMENTS))})")
    arrays = float32_arrays(network)
    settings = LocalTrainingConfig(local_epochs=1, batch_size=3, lr=0.01)

    def update(count: int) -> Vectors:
        examples = x[:count], y[:count]
        return _update(trainer, name, network, arrays, examples, settings, np.random.default_rng(0))

    first, start = update(_CHECKED), Layout.of(arrays).flatten(arrays)
    if not first.any():
        raise PluginError(f"{name}: its update is zero")
    if not np.array_equal(first, update(_CHECKED)):
        raise PluginError(
            f"{name}: two trainings from the same start differ: it must keep nothing between rounds, and draw from rng "
            "or PyTorch's generator alone"
        )
    if np.linalg.norm(first - start) < 0.5 * np.linalg.norm(start):
        raise PluginError(f"{name} returns the trained arrays, expected an update: trained minus received")
    update(1)


def random_examples(shape: Sequence[int], task: Task, kind: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return examples and targets for a check.

    Args:
        shape: of an example, after the features.
        task: of the targets.
        kind: "images", "vectors" or "tokens".
    """
    rng = np.random.default_rng(0)
    size = _CHECKED, *shape
    x = rng.integers(task.num_outputs, size=size) if kind == "tokens" else rng.standard_normal(size, np.float32)
    return x, task.examples(_CHECKED)


def _update(
    trainer: type[Any],
    name: str,
    network: nn.Module,
    start: Mapping[str, npt.NDArray[np.float32]],
    examples: tuple[npt.NDArray[Any], npt.NDArray[Any]],
    settings: LocalTrainingConfig,
    rng: np.random.Generator,
) -> Vectors:
    arrays = {key: value.copy() for key, value in start.items()}
    devices = range(torch.cuda.device_count()) if settings.device != "cpu" else ()
    with torch.random.fork_rng(devices), torch.enable_grad():
        torch.manual_seed(int(rng.spawn(1)[0].integers(2**62)))
        with calling(name):
            update = trainer(copy.deepcopy(network)).train(arrays, *(part.copy() for part in examples), settings, rng)
    if problem := _problem(update, start):
        raise PluginError(f"{name} {problem}")
    return np.concatenate([np.asarray(update[key], np.float32).reshape(-1) for key in start])


def _problem(update: Any, start: Mapping[str, npt.NDArray[np.float32]]) -> str:
    """Return what is wrong with what a trainer returns; empty if nothing is."""
    if not isinstance(update, Mapping):
        return f"returns {type(update).__name__}, expected a dict of arrays, by name"
    if missing := [key for key in start if key not in update]:
        return f"returns no update of {few(missing)}"
    if strange := [str(key) for key in update if key not in start]:
        return f"returns {few(strange)}, which it did not receive"
    for key, value in update.items():
        if not isinstance(value, np.ndarray | np.floating) or not np.issubdtype(value.dtype, np.floating):
            kind = str(value.dtype) if isinstance(value, np.ndarray) else type(value).__name__
            return f"returns {kind} for '{key}', expected a NumPy array of real numbers"
        if value.shape != start[key].shape:
            return f"returns shape {value.shape} for '{key}', expected {start[key].shape}"
        with np.errstate(over="ignore"):
            if not np.isfinite(value.astype(np.float32)).all():
                return f"returns NaN or Inf for '{key}'"
    return ""
