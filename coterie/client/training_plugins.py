"""Objects of users in local training and in the choice of a cluster, by name (docs/extending.md has the contracts)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from coterie.fields.plugins import PluginError, calling, load_function
from coterie.models.settings import TrainingSettings
from coterie.tasks import Task

#: Positional arguments of the functions, or of the constructor, by setting.
ARGUMENTS = {
    "optimizer": ("parameters", "lr"),
    "scheduler": ("step", "steps"),
    "loss": ("outputs", "targets"),
    "trainer": ("network",),
    "choose": ("outputs", "targets"),
}
_OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
_SGD, _CONSTANT, _DEFAULT, _LOSS = "sgd", "constant", "default", "loss"


@dataclass(frozen=True)
class TrainingPlugins:
    """What a run names for local training; the objects are imported when they are used.

    Attributes:
        optimizer: "sgd", "adam", "adamw", or a function of parameters and step size that returns a new
            ``torch.optim.Optimizer``.
        scheduler: "constant", or a function of the step, from 0, and of the number of steps of a round, that returns
            the factor of the step size, in [0, 1].
        loss: "default", or a function of (n, ...) outputs and (n,) targets that returns (n,) losses.
        trainer: "default", or a class with a training loop of its own (client/trainers.py).
        choose: "loss", or a function of (n, ...) outputs and (n,) targets that returns a number, which is the lower the
            better a model is for the client.
    """

    optimizer: str = _SGD
    scheduler: str = _CONSTANT
    loss: str = _DEFAULT
    trainer: str = _DEFAULT
    choose: str = _LOSS

    @classmethod
    def of(cls, training: TrainingSettings) -> TrainingPlugins:
        """Return those of a run."""
        return cls(**{kind: getattr(training, kind) for kind in ARGUMENTS})

    @property
    def named(self) -> dict[str, str]:
        """Name of each object of users, by setting."""
        names = {kind: getattr(self, kind) for kind in ARGUMENTS}
        own = dict.fromkeys(_OPTIMIZERS) | dict.fromkeys((_CONSTANT, _DEFAULT, _LOSS))
        return {kind: name for kind, name in names.items() if name not in own}

    @property
    def plain(self) -> bool:
        """Whether a client takes steps of SGD of one size, on the mean of the default loss."""
        return (self.optimizer, self.scheduler, self.loss, self.trainer) == (_SGD, _CONSTANT, _DEFAULT, _DEFAULT)

    def loss_of_examples(self, task: Task) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the loss of every example: that of the task, unless users name another one."""
        return task if self.loss == _DEFAULT else _load("loss", self.loss)

    @property
    def trainer_class(self) -> type[Any] | None:
        """The class with the training loop; None: Coterie's own."""
        return None if self.trainer == _DEFAULT else cast(type[Any], _load("trainer", self.trainer))

    @property
    def score_of_model(self) -> Callable[[Tensor, Tensor], float] | None:
        """The score by which a client chooses a model: inf where the user's is not finite; None: the mean loss."""
        if self.choose == _LOSS:
            return None
        return partial(_score, _load("choose", self.choose), f"choose '{self.choose}'")

    def stepper(self, parameters: Iterable[Tensor], lr: float, steps: int) -> Callable[[Sequence[Tensor]], None]:
        """Return a function that takes the next step of a round, given the gradients.

        Args:
            parameters: changed in place.
            lr: step size.
            steps: of the round.
        """
        values = list(parameters)
        optimizer: Any = _OPTIMIZERS.get(self.optimizer) or _load("optimizer", self.optimizer)
        optimizer = optimizer(values, lr)
        factor = None if self.scheduler == _CONSTANT else _load("scheduler", self.scheduler)
        rates, done = [group["lr"] for group in optimizer.param_groups], 0

        def step(gradients: Sequence[Tensor]) -> None:
            nonlocal done
            for value, gradient in zip(values, gradients, strict=True):
                value.grad = gradient
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate if factor is None else rate * float(factor(done, steps))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            done += 1

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


#: Plain SGD, a constant step size, and the default loss.
NO_PLUGINS = TrainingPlugins()


@cache
def _load(kind: str, name: str) -> Callable[..., Any]:
    return load_function(kind, name, ARGUMENTS[kind])


def check_plugin(kind: str, function: Callable[..., Any], task: Task, name: str) -> None:
    """Check a function against the contract of its kind, on random numbers.

    Args:
        kind: "optimizer", "scheduler", "loss" or "choose".
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


def _scheduler_problem(function: Callable[..., Any], task: Task) -> str:
    for steps in (1, 2, 10):
        factors = [[float(function(step, steps)) for step in range(steps)] for _ in range(2)]
        if factors[0] != factors[1]:
            return "two calls differ: it must depend on step and steps alone"
        for step, factor in enumerate(factors[0]):
            if not (math.isfinite(factor) and 0 <= factor <= 1):
                return f"the factor of step {step} of {steps} is {factor:g}, expected a number from 0 to 1"
        if not any(factors[0]):
            return f"all factors of {steps} steps are 0"
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


def _score(function: Callable[..., Any], name: str, outputs: Tensor, targets: Tensor) -> float:
    """Return the score of a model; inf if it is not finite."""
    with calling(name):
        score = function(outputs, targets)
        if problem := _score_problem(score):
            raise PluginError(f"{name} {problem}")
        return float(score) if math.isfinite(score) else math.inf


def _score_problem(score: Any) -> str:
    shape = tuple(getattr(score, "shape", ()))
    if isinstance(score, Tensor | np.ndarray) and shape:
        return f"returns shape {shape}, expected one number for a model"
    try:
        float(score)
    except (TypeError, ValueError):
        return f"returns {type(score).__name__}, expected one number for a model"
    return ""


def _choose_problem(function: Callable[..., Any], task: Task) -> str:
    generator = torch.Generator().manual_seed(0)
    rows = max(6, 2 * task.num_outputs)
    targets = torch.as_tensor(task.examples(rows))
    right = task.right_outputs(targets) + 0.1 * torch.randn(task.outputs_of(rows), generator=generator)
    wrong = -right - 1
    for score in (good := function(right, targets), bad := function(wrong, targets), function(right[:1], targets[:1])):
        if problem := _score_problem(score):
            return problem
    if not (math.isfinite(good) and math.isfinite(bad)):
        return "a score of finite outputs is NaN or Inf"
    if float(good) > float(bad):
        return f"is {good:.3g} for outputs that match the targets and {bad:.3g} for others: lower must be better"
    if float(function(right, targets)) != float(good):
        return "two calls differ: it must depend on outputs and targets alone"
    return ""


_CHECKS = {
    "optimizer": _optimizer_problem,
    "scheduler": _scheduler_problem,
    "loss": _loss_problem,
    "choose": _choose_problem,
}
