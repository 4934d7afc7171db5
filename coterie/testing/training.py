"""The conformance tests of optimizers, schedulers and losses, which a run repeats before it starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from coterie.client.training_plugins import check_plugin


def check_optimizer(function: Callable[..., Any]) -> None:
    """Test a function of parameters and step size that returns a ``torch.optim.Optimizer``.

    Raises:
        PluginError: its contract (docs/extending.md) is violated; the message says how.
    """
    check_plugin("optimizer", function, 0, "optimizer")


def check_scheduler(function: Callable[..., Any]) -> None:
    """Test a function of step and steps that returns the factor of the step size.

    Raises:
        PluginError: its contract (docs/extending.md) is violated; the message says how.
    """
    check_plugin("scheduler", function, 0, "scheduler")


def check_loss(function: Callable[..., Any], num_classes: int = 10) -> None:
    """Test a function of outputs and targets that returns the loss of every example.

    Args:
        function: the function.
        num_classes: of the targets; 0: they are real numbers.

    Raises:
        PluginError: its contract (docs/extending.md) is violated; the message says how.
    """
    check_plugin("loss", function, num_classes, "loss")
