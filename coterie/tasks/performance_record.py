"""Metrics of predictions as they are stored; :mod:`coterie.tasks.performance` computes them."""

from dataclasses import dataclass, fields
from typing import Any

from coterie.fields import Record


@dataclass(frozen=True, kw_only=True)
class Performance(Record):  # large: one field per metric
    """Metrics of predictions, None where not computed or not defined.

    Attributes:
        pooled_accuracy: share of correct predictions.
        baseline_accuracy: the same of the best constant prediction, the most frequent class.
        balanced_accuracy: mean recall of the classes that occur.
        macro_f1: mean F1 score of these classes.
        roc_auc: area under the ROC curve; of several classes the mean of one against the rest. 0.5 is chance.
        log_loss: cross entropy, in nats.
        brier: mean squared error of the probability of the positive class; of more than two classes the sum over all.
        baseline_brier: the same of the share of each class.
        calibration_error: mean distance of probability and share of the positive class over bins of equal width.
        average_precision: area under the curve of precision over recall.
        sensitivity, specificity: recall of the positive and of the negative class.
        sensitivity_at_90: largest sensitivity at a specificity of at least 90 %.
        class_recall: recall of each class; None for a class that does not occur.
        baseline_precision: average precision of constant predictions of several labels.
        label_rate: share of records that have each label; only of several labels.
        label_roc_auc, label_average_precision, label_f1: of each label; None where all records have it, or none has.
        rmse, mae: root mean squared and mean absolute error, in the unit of the target.
        r2: coefficient of determination; 0 for the mean of the targets.
        baseline_rmse, baseline_mae: errors of the mean of the targets.
    """

    pooled_accuracy: float | None = None
    baseline_accuracy: float | None = None
    balanced_accuracy: float | None = None
    macro_f1: float | None = None
    roc_auc: float | None = None
    log_loss: float | None = None
    brier: float | None = None
    baseline_brier: float | None = None
    calibration_error: float | None = None
    average_precision: float | None = None
    sensitivity: float | None = None
    specificity: float | None = None
    sensitivity_at_90: float | None = None
    class_recall: tuple[float | None, ...] | None = None
    baseline_precision: float | None = None
    label_rate: tuple[float | None, ...] | None = None
    label_roc_auc: tuple[float | None, ...] | None = None
    label_average_precision: tuple[float | None, ...] | None = None
    label_f1: tuple[float | None, ...] | None = None
    rmse: float | None = None
    mae: float | None = None
    r2: float | None = None
    baseline_rmse: float | None = None
    baseline_mae: float | None = None

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics by name."""
        return {metric.name: getattr(self, metric.name) for metric in fields(Performance)}
