"""Several labels, any of which a record may have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from coterie.tasks.task import FloatArray, Measure, Outputs, Targets, Task, TaskError, decimals, sigmoid

if TYPE_CHECKING:
    from torch import Tensor

#: Labels of a record, at most: its target is exact in float32.
MAX_LABELS = 20
# Targets, at most, that have names.
_MAX_NAMES = 4096


@dataclass(frozen=True)
class _MultiLabel(Task):
    """Each record has some of several labels: mean of binary cross-entropies. Bit l of a target is label l."""

    name = "multi-label"
    score_name = "accuracy of labels"
    counted = "labels"
    marker = "label_rate"
    constant = ("brier", "baseline_brier", True)

    def __str__(self) -> str:
        return f"{self.num_outputs} labels"

    @property
    def num_targets(self) -> int:
        return 1 << self.num_outputs

    def _weights(self, given: tuple[float, ...]) -> tuple[float, ...] | None:
        weights = given * self.num_outputs if len(given) == 1 else given
        return weights if len(weights) == self.num_outputs else None

    @property
    def _allowed_weights(self) -> str:
        return f"one number, or one for each of {self.num_outputs} labels, is required"

    def bits(self, y: Targets) -> npt.NDArray[np.int64]:
        """Return (n, l) labels, 0 or 1, of (n,) targets."""
        return np.asarray(y.astype(np.int64)[:, None] >> np.arange(self.num_outputs) & 1)

    def _bits(self, y: Tensor, like: Tensor) -> Tensor:
        return (y[..., None] >> like.new_tensor(range(self.num_outputs), dtype=y.dtype) & 1).to(like.dtype)

    def _losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        from torch.nn.functional import binary_cross_entropy_with_logits

        weight = outputs.new_tensor(self.weights) if self.weights else None
        bits = self._bits(y, outputs)
        return binary_cross_entropy_with_logits(outputs, bits, pos_weight=weight, reduction="none").mean(dim=-1)

    def marks(self, outputs: Tensor, y: Tensor) -> Tensor:
        return ((outputs > 0) == self._bits(y, outputs).bool()).float().mean(dim=1)

    def score(self, marks: FloatArray, y: Targets) -> float:
        return float(marks.mean())

    def squared_error(self, outputs: FloatArray, y: Targets) -> float:
        return float(((sigmoid(outputs) - self.bits(y)) ** 2).mean())

    def measure(
        self, y: Targets, outputs: Outputs, positive: int | None = None, threshold: float | None = None
    ) -> Measure:
        from coterie.tasks.performance import of_labels

        return partial(of_labels, self.bits(y), sigmoid(outputs))

    def predicted(self, outputs: Outputs) -> npt.NDArray[Any]:
        return (outputs > 0).astype(np.int64)

    def columns(
        self, outputs: Outputs, names: Sequence[str], decision: tuple[int, float] | None = None
    ) -> dict[str, list[str]]:
        pairs = zip(names, self.predicted(outputs).T.tolist(), strict=True)
        predictions = {f"prediction_{name}": [*map(str, bits)] for name, bits in pairs}
        shares = zip(names, sigmoid(outputs).T, strict=True)
        return {**predictions, **{f"probability_{name}": decimals(share) for name, share in shares}}

    def agreement(self, outputs: Outputs, y: Targets, where: str) -> str:
        bits = self.bits(y)
        rates = bits.mean(axis=0)
        return (
            f"{np.mean((outputs > 0) == bits):.2%} of the predicted labels agree with those of {where}, where the more "
            f"frequent value of each label has {np.maximum(rates, 1 - rates).mean():.2%}"
        )

    @property
    def num_cells(self) -> int:
        return self.num_outputs

    rule = "labels must be 0 or 1"

    def are_valid(self, cells: FloatArray) -> npt.NDArray[np.bool_]:
        return np.asarray(np.isin(cells, (0, 1)).all(axis=1))

    def encoded(self, cells: FloatArray) -> FloatArray:
        return np.asarray(cells @ 2.0 ** np.arange(self.num_outputs))

    def counts(self, y: Targets, names: Sequence[str]) -> dict[str, int]:
        return dict(zip(names, self.bits(y).sum(axis=0).tolist(), strict=True))

    def target_names(self, names: Sequence[str]) -> tuple[str, ...]:
        if self.num_targets > _MAX_NAMES:
            return ()
        of = (self.bits(np.arange(self.num_targets)) > 0).tolist()
        return tuple(" + ".join(name for name, has in zip(names, row, strict=True) if has) or "none" for row in of)

    def examples(self, n: int) -> npt.NDArray[Any]:
        return np.random.default_rng(1).permutation(max(n, self.num_targets))[:n] % self.num_targets


@cache
def multi_label(num_labels: int) -> Task:
    """Return the task of data with several labels, 2 to :data:`MAX_LABELS`, any of which a record may have."""
    if not 2 <= num_labels <= MAX_LABELS:
        raise TaskError(f"a multi-label task has 2 to {MAX_LABELS} labels, not {num_labels}")
    return _MultiLabel(num_labels)


def encode_labels(bits: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return (n,) targets of a multi-label task, given (n, l) labels.

    Raises:
        TaskError: a label is not 0 or 1.

    Examples:
        >>> encode_labels(np.array([[0, 0, 0], [1, 0, 1]]))
        array([0, 5])
    """
    task = multi_label(bits.shape[1])
    if not np.isin(bits, (0, 1)).all():
        raise TaskError(f"a label is {bits[~np.isin(bits, (0, 1))][0]}; labels must be 0 or 1")
    return task.encoded(bits.astype(np.float64)).astype(np.int64)
