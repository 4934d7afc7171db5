"""Tasks by name, and by the metrics that they have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coterie.tasks.multi_label import multi_label
from coterie.tasks.task import Task, TaskError, task_of

if TYPE_CHECKING:
    from coterie.tasks.performance_record import Performance

#: Values of the setting ``task``, beside "auto".
NAMES = ("multi-class", "binary", "multi-label", "regression")
_TASKS: tuple[type[Task], ...] = tuple(map(type, (task_of(0), multi_label(2), task_of(2))))


def named_task(name: str, num_outputs: int) -> Task:
    """Return a task by its name, or by "auto" that of :func:`task_of`.

    Raises:
        TaskError: there is no such task, or it does not have this number of outputs.
    """
    task = multi_label(num_outputs) if name == "multi-label" else task_of(num_outputs)
    if name not in ("auto", *task.names):
        raise TaskError(f"task {name[:60]!r}: {num_outputs} outputs are those of {task.name}")
    return task


def of_metrics(scores: Performance) -> type[Task]:
    """Return the task that metrics are about."""
    return next((task for task in _TASKS if getattr(scores, task.marker) is not None), _TASKS[-1])


def beats_constant(scores: Performance) -> bool | None:
    """Return whether predictions are better than the best constant one; None: it is not known."""
    metric, baseline, less = of_metrics(scores).constant
    value, constant = getattr(scores, metric), getattr(scores, baseline)
    if value is None or constant is None:
        return None
    return bool(value < constant) if less else bool(value > constant)
