"""What models predict: one declaration of output layer, loss, predictions, metrics and their names."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

    from coterie.tasks.performance_record import Performance

#: Bounds of a weight in the loss.
WEIGHTS = (1e-6, 1e6)
FloatArray = npt.NDArray[np.float64]
Targets = npt.NDArray[Any]
Outputs = npt.NDArray[Any]
#: Computes the metrics of records with the given (n,) weights; None: all weigh 1.
Measure = Callable[[FloatArray | None], "Performance"]
# Classes, at most, whose probabilities a file of predictions has.
_MAX_COLUMNS = 1000


class TaskError(ValueError):
    """Settings that do not fit the task."""


def parse_weights(text: str) -> tuple[float, ...]:
    """Return weights that are separated by commas; an empty text has none.

    Raises:
        TaskError: one is no number within :data:`WEIGHTS`.
    """
    low, high = WEIGHTS
    try:
        weights = tuple(map(float, text.split(","))) if text.strip() else ()
    except ValueError:
        weights = (math.nan,)
    if not all(low <= weight <= high for weight in weights):
        raise TaskError(f"weights {text[:60]!r}: must be numbers from {low:g} to {high:g}, separated by commas")
    return weights


@dataclass(frozen=True)
class Task:  # large: what each of its users asks
    """What models predict. A task is the function from outputs and targets to the (n,) losses of records.

    Attributes:
        num_outputs: numbers that a network computes for a record, by which it is built; 0: one real number, (n,).
        weights: public factors of the loss, of each class or of each positive label; empty: 1.
        name: of the task.
        score_name: name of :meth:`score` within a sentence.
        real: whether targets are real numbers, float32; otherwise they are int64.
        has_classes: whether each record has one of several classes.
        counted: what :meth:`counts` counts.
        marker: a metric that tells the task of :class:`~coterie.tasks.performance_record.Performance`.
        constant: a metric, that of the best constant prediction, and whether less of it is better.
    """

    num_outputs: int
    weights: tuple[float, ...] = ()

    name: ClassVar[str]
    score_name: ClassVar[str]
    real: ClassVar[bool] = False
    has_classes: ClassVar[bool] = False
    counted: ClassVar[str] = "classes"
    marker: ClassVar[str]
    constant: ClassVar[tuple[str, str, bool]]

    def __str__(self) -> str:
        return self.name

    @property
    def names(self) -> tuple[str, ...]:
        """Values of the setting ``task`` that mean it."""
        return (self.name,)

    @property
    def given_name(self) -> str | None:
        """The name of a task that the number of outputs does not tell; None: it does."""
        return None if task_of(self.num_outputs).name == self.name else self.name

    def weighted(self, class_weights: str) -> Task:
        """Return the task with weights in the loss.

        A weight scales the loss of its records, and at record level their gradients before these are clipped.

        Args:
            class_weights: of every class, in order, separated by commas; of several labels, of the positives of all or
                of each; empty: 1.

        Raises:
            TaskError: the task has no weights, or another number of them.
        """
        if not class_weights:
            return self
        if (weights := self._weights(parse_weights(class_weights))) is None:
            raise TaskError(f"class-weights = {class_weights[:60]!r}: {self._allowed_weights}")
        return replace(self, weights=weights)

    def _weights(self, given: tuple[float, ...]) -> tuple[float, ...] | None:
        """Return the weights of a setting; None if they do not fit."""
        return None

    @property
    def _allowed_weights(self) -> str:
        return f"{self.name} has no weights; leave it out"

    @property
    def num_classes(self) -> int:
        """Number of classes, of which a record has one; 0: there are none."""
        return self.num_outputs if self.has_classes else 0

    @property
    def num_targets(self) -> int:
        """Number of distinct targets, which count from 0; 0: they are real numbers."""
        return self.num_classes

    @property
    def dtype(self) -> type[np.int64] | type[np.float32]:
        """Type of targets."""
        return np.float32 if self.real else np.int64

    def outputs_of(self, n: int) -> tuple[int, ...]:
        """Return the shape of the outputs of n records."""
        return (n, self.num_outputs) if self.num_outputs else (n,)

    def resolved(self, *, real: bool) -> Task:
        """Return the task of data whose targets are real numbers or not: this one, unless it is :data:`AUTO`."""
        return self

    @property
    def has_softmax_gradient(self) -> bool:
        """Whether the gradient of a loss is the softmax of its outputs minus the class."""
        return False

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the (n,) losses of (n, ...) outputs for (n,) targets, each a function of its record alone."""
        import torch

        low = outputs.dtype in (torch.float16, torch.bfloat16)
        return self._losses(outputs.float() if low else outputs, y)

    def _losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError

    def marks(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the (n,) numbers of records of which :meth:`score` is made."""
        raise NotImplementedError

    def score(self, marks: FloatArray, y: Targets) -> float:
        """Return the score of a model on records, in [0, 1]; more is better.

        Args:
            marks: (n,) see :meth:`marks`.
            y: (n,) targets.
        """
        raise NotImplementedError

    def squared_error(self, outputs: FloatArray, y: Targets) -> float:
        """Return the mean squared error of real predictions, or of the probabilities of (n, K) outputs (Brier)."""
        raise NotImplementedError

    def measure(
        self, y: Targets, outputs: Outputs, positive: int | None = None, threshold: float | None = None
    ) -> Measure:
        """Return a function of weights of records that computes the metrics of outputs.

        Args:
            y: (n,) targets.
            outputs: (n, ...) of a model.
            positive: class that is compared with all others; None: all classes are.
            threshold: least probability of a positive class at which it is predicted; None: the most probable class.
        """
        raise NotImplementedError

    def predicted(self, outputs: Outputs) -> npt.NDArray[Any]:
        """Return the (n, ...) predictions of (n, ...) outputs."""
        raise NotImplementedError

    def columns(
        self, outputs: Outputs, names: Sequence[str], decision: tuple[int, float] | None = None
    ) -> dict[str, list[str]]:
        """Return the columns of a file of predictions, each with n texts.

        Args:
            outputs: (n, ...) of a model.
            names: of the classes.
            decision: the positive class of two and its least probability; None: the most probable class is predicted.
        """
        raise NotImplementedError

    def agreement(self, outputs: Outputs, y: Targets, where: str) -> str:
        """Return in words how well (n, ...) outputs agree with (n,) targets of a file."""
        raise NotImplementedError

    def encoded(self, cells: FloatArray) -> FloatArray:
        """Return the (n,) targets of (n, c) numbers of the columns of a table that hold them."""
        return cells[:, 0]

    @property
    def num_cells(self) -> int:
        """Number of cells of a record that :meth:`encoded` takes."""
        return 1

    #: What :meth:`are_valid` asks for, in words.
    rule: ClassVar[str] = "targets must be finite numbers"

    def are_valid(self, cells: FloatArray) -> npt.NDArray[np.bool_]:
        """Return which (n,) records have cells that :meth:`encoded` takes, given (n, c) numbers."""
        return np.asarray(np.isfinite(cells).all(axis=1))

    def counts(self, y: Targets, names: Sequence[str]) -> dict[str, int]:
        """Return the number of records by name of a class or label; empty for numbers."""
        return {}

    def described(self, y: Targets, names: Sequence[str]) -> str:
        """Return the task, and what (n,) targets hold, in one line, given the names of classes or labels."""
        return f"{self} ({', '.join(f'{name} {count:,}' for name, count in self.counts(y, names).items())})"

    def target_names(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return a name of every target, given those of classes or labels; empty if there are too many."""
        return tuple(names)

    def examples(self, n: int) -> npt.NDArray[Any]:
        """Return (n,) made-up targets that differ, for checks."""
        raise NotImplementedError


@dataclass(frozen=True)
class _MultiClass(Task):
    """Each record has one of several classes: cross-entropy of logits, and accuracy."""

    name = "multi-class"
    score_name = "accuracy"
    has_classes = True
    marker = "pooled_accuracy"
    constant = ("pooled_accuracy", "baseline_accuracy", False)

    def __str__(self) -> str:
        return f"{self.num_outputs} classes"

    @property
    def names(self) -> tuple[str, ...]:
        return ("multi-class", "binary") if self.num_outputs == 2 else ("multi-class",)

    def _weights(self, given: tuple[float, ...]) -> tuple[float, ...] | None:
        return given if len(given) == self.num_outputs else None

    @property
    def _allowed_weights(self) -> str:
        return f"one number for each of {self.num_outputs} classes is required"

    @property
    def has_softmax_gradient(self) -> bool:
        return not self.weights

    def _losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        from torch.nn.functional import cross_entropy

        weight = outputs.new_tensor(self.weights) if self.weights else None
        return cross_entropy(outputs, y, weight, reduction="none")

    def marks(self, outputs: Tensor, y: Tensor) -> Tensor:
        return outputs.argmax(dim=1) == y

    def score(self, marks: FloatArray, y: Targets) -> float:
        return float(marks.mean())

    def squared_error(self, outputs: FloatArray, y: Targets) -> float:
        errors = np.exp(outputs - outputs.max(axis=1, keepdims=True))
        errors /= errors.sum(axis=1, keepdims=True)
        errors[np.arange(len(y)), y] -= 1
        return float((errors**2).sum(axis=1).mean())

    def measure(
        self, y: Targets, outputs: Outputs, positive: int | None = None, threshold: float | None = None
    ) -> Measure:
        from coterie.tasks.performance import of_classes, probabilities

        shares = probabilities(outputs)
        if positive is not None:
            shares = np.stack([1 - shares[:, positive], shares[:, positive]], axis=1)
            y = (y == positive).astype(np.int64)
        return partial(of_classes, y, shares, threshold=threshold)

    def predicted(self, outputs: Outputs) -> npt.NDArray[Any]:
        return np.asarray(outputs.argmax(axis=1))

    def columns(
        self, outputs: Outputs, names: Sequence[str], decision: tuple[int, float] | None = None
    ) -> dict[str, list[str]]:
        from coterie.tasks.performance import probabilities

        shares = probabilities(outputs)
        labels = shares.argmax(axis=1)
        if decision is not None:
            positive, threshold = decision
            labels = abs(1 - positive - (shares[:, positive] >= threshold))
        many = zip(names, shares.T, strict=True) if len(names) <= _MAX_COLUMNS else ()
        return {
            "prediction": [names[label] for label in labels.tolist()],
            "probability": decimals(np.take_along_axis(shares, labels[:, None], axis=1)[:, 0]),
            **{f"probability_{name}": decimals(share) for name, share in many},
        }

    def agreement(self, outputs: Outputs, y: Targets, where: str) -> str:
        return (
            f"{np.mean(outputs.argmax(axis=1) == y):.2%} of the most probable classes agree with the labels of "
            f"{where}, where the most frequent class has {np.bincount(y).max() / len(y):.2%}"
        )

    def counts(self, y: Targets, names: Sequence[str]) -> dict[str, int]:
        return dict(zip(names, np.bincount(y.astype(np.int64), minlength=self.num_outputs).tolist(), strict=True))

    def examples(self, n: int) -> npt.NDArray[Any]:
        return np.arange(n) % self.num_outputs


@dataclass(frozen=True)
class _Regression(Task):
    """Each record has a real number: squared error, and R².

    Attributes:
        mean, scale: a target is (number in its unit - mean) / scale.
    """

    num_outputs: int = 0
    mean: float = 0.0
    scale: float = 1.0

    name = "regression"
    score_name = "R², at least 0"
    real = True
    marker = "rmse"
    constant = ("rmse", "baseline_rmse", True)

    def __str__(self) -> str:
        return "real targets"

    def in_units(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return targets, or predictions of them, in their unit."""
        return np.asarray(values * self.scale + self.mean)

    def _losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        from torch.nn.functional import mse_loss

        return mse_loss(outputs, y, reduction="none")

    def marks(self, outputs: Tensor, y: Tensor) -> Tensor:
        return self(outputs, y)

    def score(self, marks: FloatArray, y: Targets) -> float:
        return max(0.0, 1 - float(marks.sum()) / max(float(np.sum((y - y.mean()) ** 2)), 1e-12))

    def squared_error(self, outputs: FloatArray, y: Targets) -> float:
        return float(((outputs.reshape(len(y)) - y) ** 2).mean())

    def measure(
        self, y: Targets, outputs: Outputs, positive: int | None = None, threshold: float | None = None
    ) -> Measure:
        from coterie.tasks.performance import of_numbers

        return partial(of_numbers, self.in_units(y), self.in_units(outputs.reshape(len(y))))

    def predicted(self, outputs: Outputs) -> npt.NDArray[Any]:
        return outputs

    def columns(
        self, outputs: Outputs, names: Sequence[str], decision: tuple[int, float] | None = None
    ) -> dict[str, list[str]]:
        return {"prediction": [f"{value:.9g}" for value in self.in_units(outputs)]}

    def agreement(self, outputs: Outputs, y: Targets, where: str) -> str:
        errors = self.in_units(outputs) - self.in_units(y)
        return f"root mean squared error {np.sqrt(np.mean(errors**2)):.6g}"

    def examples(self, n: int) -> npt.NDArray[Any]:
        return np.random.default_rng(1).standard_normal(n, np.float32)


@dataclass(frozen=True)
class _Auto(Task):
    """The task that the type of targets tells: real numbers, or classes."""

    num_outputs: int = 0

    name = "auto"

    def resolved(self, *, real: bool) -> Task:
        return _Regression() if real else _MultiClass(0)

    def _losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        return self.resolved(real=y.is_floating_point())(outputs, y)

    def marks(self, outputs: Tensor, y: Tensor) -> Tensor:
        return self.resolved(real=y.is_floating_point()).marks(outputs, y)

    def score(self, marks: FloatArray, y: Targets) -> float:
        return self.resolved(real=is_real(y)).score(marks, y)


#: The task that the type of targets tells; it has no metrics.
AUTO = _Auto()


@cache
def task_of(num_classes: int, mean: float = 0.0, scale: float = 1.0) -> Task:
    """Return the task of data.

    Args:
        num_classes: number of classes; 0: real targets.
        mean, scale: a real target is (number in its unit - mean) / scale.
    """
    return _MultiClass(num_classes) if num_classes else _Regression(mean=mean, scale=scale)


def decimals(values: FloatArray) -> list[str]:
    """Return values as the text of a table of predictions."""
    return [f"{value:.6f}" for value in values.tolist()]


def sigmoid(outputs: Outputs) -> FloatArray:
    """Return the probabilities of logits."""
    halves = np.tanh(outputs.astype(np.float64) / 2)
    return np.asarray((1 + halves) / 2)


def is_real(y: Targets) -> bool:
    """Whether the type of targets is that of real numbers."""
    return bool(np.issubdtype(y.dtype, np.floating))
