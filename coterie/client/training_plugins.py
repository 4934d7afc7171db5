"""Objects of users in local training, by name (docs/extending.md has the contracts)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from coterie.fields.plugins import PluginError, calling, load_function
from coterie.models.settings import TrainingSettings
from coterie.tasks import Task

#: Positional arguments of the functions, or of the constructor, by setting.
ARGUMENTS = {"optimizer": ("parameters", "lr"), "loss": ("outputs", "targets"), "trainer": ("network",)}
_OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
_SGD, _DEFAULT = "sgd", "default"


@dataclass(frozen=True)
class TrainingPlugins:
    """What a run names for local training; the objects are imported when they are used.

    Attributes:
        optimizer: "sgd", "adam", "adamw", or a function of parameters and step size that returns a new
            ``torch.optim.Optimizer``.
        loss: "default", or a function of (n, ...) outputs and (n,) targets that returns (n,) losses.
        trainer: "default", or a class with a training loop of its own (client/trainers.py).
    """

    optimizer: str = _SGD
    loss: str = _DEFAULT
    trainer: str = _DEFAULT

    @classmethod
    def of(cls, training: TrainingSettings) -> TrainingPlugins:
        """Return those of a run."""
        return cls(**{kind: getattr(training, kind) for kind in ARGUMENTS})

    @property
    def named(self) -> dict[str, str]:
        """Name of each object of users, by setting."""
        names = {kind: getattr(self, kind) for kind in ARGUMENTS}
        return {kind: name for kind, name in names.items() if name not in (*_OPTIMIZERS, _DEFAULT)}

    @property
    def plain(self) -> bool:
        """Whether a client takes steps of SGD on the mean of the default loss."""
        return self == NO_PLUGINS

    def loss_of_examples(self, task: Task) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the loss of every example: that of the task, unless users name another one."""
        return task if self.loss == _DEFAULT else _load("loss", self.loss)

    @property
    def trainer_class(self) -> type[Any] | None:
        """The class with the training loop; None: Coterie's own."""
        return None if self.trainer == _DEFAULT else cast(type[Any], _load("trainer", self.trainer))

    def stepper(self, parameters: Iterable[Tensor], lr: float) -> Callable[[Sequence[Tensor]], None]:
        """Return a function that takes the next step of a round, given the gradients.

        Args:
            parameters: Parameters, changed in place.
            lr: Step size.
        """
        values = list(parameters)
        optimizer: Any = _OPTIMIZERS.get(self.optimizer) or _load("optimizer", self.optimizer)
        optimizer = optimizer(values, lr)

        def step(gradients: Sequence[Tensor]) -> None:
            for value, gradient in zip(values, gradients, strict=True):
                value.grad = gradient
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step

    def check(self, task: Task) -> None:
        """Check each object of users against its contract, but for the trainer, which needs the network.

        Args:
            task: what the run predicts.

        Raises:
            PluginError: an object cannot be imported, or violates its contract.
        """
        for kind, name in self.named.items():
            if kind in _CHECKS:
                check_plugin(kind, _load(kind, name), task, f"{kind} '{name}'")


#: Plain SGD and the default loss.
NO_PLUGINS = TrainingPlugins()


@cache
def _load(kind: str, name: str) -> Callable[..., Any]:
    return load_function(kind, name, ARGUMENTS[kind])


def check_plugin(kind: str, function: Callable[..., Any], task: Task, name: str) -> None:
    """Check a function against the contract of its kind, on random numbers.

    Args:
        kind: "optimizer" or "loss".
        function: the function.
        task: whose outputs and targets it is called with.
        name: how the message names the function.

    Raises:
        PluginError: the contract is violated.
    """
    with calling(name):
        if problem := _CHECKS[kind](function, task):
            raise PluginError(f"{name}: {problem}")


def _optimizer_problem(function: Callable[..., Any], task: Task) -> str:
    def trained() -> list[Tensor]:
        parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]
        optimizer = function(parameters, 0.1)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise PluginError(f"returns {type(optimizer).__name__}, expected a torch.optim.Optimizer")
        given = [id(value) for group in optimizer.param_groups for value in group["params"]]
        if sorted(given) != sorted(map(id, parameters)):
            raise PluginError("must be given all parameters that it receives, each once")
        for _ in range(2):
            for value in parameters:
                value.grad = torch.full_like(value, 0.5)
            optimizer.step()
        return [value.detach() for value in parameters]

    try:
        first, second = trained(), trained()
    except PluginError as error:
        return str(error)
    if not all(bool(value.isfinite().all()) for value in first):
        return "two steps with gradients of 0.5 lead to NaN or Inf"
    if all(bool((value == 1).all()) for value in first):
        return "two steps with gradients of 0.5 change no parameter"
    if not all(torch.equal(one, other) for one, other in zip(first, second, strict=True)):
        return "two new optimizers take different steps: it must keep nothing between rounds, and not draw at random"
    return ""


def _loss_problem(function: Callable[..., Any], task: Task) -> str:
    rows = 6
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(task.outputs_of(rows), generator=generator, requires_grad=True)
    targets = torch.as_tensor(task.examples(rows))
    losses = function(outputs, targets)
    if not isinstance(losses, Tensor) or tuple(losses.shape) != (rows,):
        shown = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        return f"returns {shown} for {rows} examples, expected ({rows},): a loss for each (reduction='none')"
    if not bool(losses.isfinite().all()):
        return "a loss is NaN or Inf"
    (gradient,) = torch.autograd.grad((losses * torch.arange(1, rows + 1)).sum(), outputs, allow_unused=True)
    if gradient is None or not bool(gradient.isfinite().all()) or not bool(gradient.any()):
        return "the gradient with respect to the outputs is missing, zero or not finite"
    order = torch.arange(rows - 1, -1, -1)
    moved, alone = function(outputs[order], targets[order]), function(outputs[:1], targets[:1])
    if not (torch.allclose(moved, losses[order], atol=1e-6) and torch.allclose(alone, losses[:1], atol=1e-6)):
        return "the loss of an example depends on other examples of the batch"
    return ""


_CHECKS = {"optimizer": _optimizer_problem, "loss": _loss_problem}
