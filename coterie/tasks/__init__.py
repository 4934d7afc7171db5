"""Learning tasks: what models predict, and how predictions are scored (:mod:`coterie.tasks.performance`)."""

from coterie.tasks.multi_label import MAX_LABELS, encode_labels, multi_label
from coterie.tasks.named_tasks import NAMES, beats_constant, named_task, of_metrics
from coterie.tasks.performance_record import Performance
from coterie.tasks.task import AUTO, WEIGHTS, Measure, Task, TaskError, is_real, parse_weights, task_of

__all__ = [
    "AUTO",
    "MAX_LABELS",
    "NAMES",
    "WEIGHTS",
    "Measure",
    "Performance",
    "Task",
    "TaskError",
    "beats_constant",
    "encode_labels",
    "is_real",
    "multi_label",
    "named_task",
    "of_metrics",
    "parse_weights",
    "task_of",
]
