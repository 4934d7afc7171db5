"""The conformance tests of what users provide for training, which a run repeats before it starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from coterie.client import trainers
from coterie.client.training_plugins import check_plugin
from coterie.tasks import AUTO, named_task, task_of


def check_optimizer(function: Callable[..., Any]) -> None:
    """Test a function of parameters and step size that returns a ``torch.optim.Optimizer``.

    Raises:
        PluginError: its contract (docs/extending.md) is violated; the message says how.
    """
    check_plugin("optimizer", function, AUTO, "optimizer")


def check_loss(function: Callable[..., Any], num_classes: int = 10, task: str = "auto") -> None:
    """Test a function of outputs and targets that returns the loss of every example.

    Args:
        function: the function.
        num_classes: of the targets, or number of labels; 0: they are real numbers.
        task: "multi-label"; "auto": classes or real numbers.

    Raises:
        PluginError: its contract (docs/extending.md) is violated; the message says how.
    """
    check_plugin("loss", function, named_task(task, num_classes), "loss")


def check_trainer(trainer: type[Any], network: nn.Module | None = None, shape: Sequence[int] = (4,)) -> None:
    """Test a class with a training loop, on random examples of 3 classes.

    Args:
        trainer: the class.
        network: that it trains; None: a linear layer.
        shape: of an example of the network.

    Raises:
        PluginError: its contract (docs/extending.md) is violated; the message says how.
    """
    examples = trainers.random_examples(shape, task_of(3), "vectors")
    trainers.check_trainer(trainer, "trainer", network or nn.Linear(shape[0], 3), *examples)
