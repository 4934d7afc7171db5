"""Metrics of predictions beside those of the best constant prediction, with bootstrap intervals.

All of them are exact functions of labels: no privacy guarantee covers them (docs/metrics.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import sklearn
from sklearn.metrics import average_precision_score, mean_absolute_error, r2_score, roc_curve, root_mean_squared_error

from coterie.tasks.performance_record import Performance

FloatArray = npt.NDArray[np.float64]
Labels = npt.NDArray[np.integer[Any]]
#: Specificity at which a sensitivity is stated.
SPECIFICITY = 0.9
#: Bins of the calibration curve, of equal width.
BINS = 10
#: Classes, at most, for which an area under a curve is computed each.
_MAX_CURVES = 100
_DRAWS = 500
_CHANCE = 0.5
_OUTSIDE = 0.025


def probabilities(outputs: npt.NDArray[Any]) -> FloatArray:
    """Return the (n, c) softmax of (n, c) outputs.

    Examples:
        >>> probabilities(np.zeros((1, 4)))
        array([[0.25, 0.25, 0.25, 0.25]])
    """
    powers = np.exp(outputs.astype(np.float64) - outputs.max(axis=1, keepdims=True, initial=-np.inf))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


def decide(shares: FloatArray, threshold: float | None = None) -> Labels:
    """Return the (n,) predicted classes.

    Args:
        shares: (n, c) probabilities.
        threshold: least probability of class 1 of two at which it is predicted; None: the most probable class.
    """
    return shares.argmax(axis=1) if threshold is None else (shares[:, 1] >= threshold).astype(np.int64)


def of_classes(
    labels: Labels, shares: FloatArray, weights: FloatArray | None = None, *, threshold: float | None = None
) -> Performance:
    """Return the metrics of predicted classes. With two classes, class 1 is the positive one.

    Args:
        labels: (n,) true classes from 0.
        shares: (n, c) probabilities.
        weights: (n,) of the records; None: 1.
        threshold: see :func:`decide`.

    Examples:
        >>> metrics = of_classes(np.array([0, 0, 0, 1]), np.array([[0.9, 0.1], [0.8, 0.2], [0.4, 0.6], [0.3, 0.7]]))
        >>> metrics.roc_auc, metrics.baseline_accuracy, metrics.specificity
        (1.0, 0.75, 0.6666666666666666)
    """
    classes = np.arange(shares.shape[1])
    weights = np.ones(len(labels)) if weights is None else weights
    predicted = decide(shares, threshold)
    cells = labels.astype(np.int64) * len(classes) + predicted
    counts = np.bincount(cells, weights, len(classes) ** 2).astype(np.float64).reshape(2 * [len(classes)])
    sizes, chosen = counts.sum(axis=1), counts.sum(axis=0)
    present = classes[sizes > 0]
    recalls = np.divide(counts.diagonal(), sizes, out=np.full(len(sizes), np.nan), where=sizes > 0)
    prior = sizes / sizes.sum()
    truth = np.eye(len(classes))[labels]
    nats = -np.log(np.clip(np.take_along_axis(shares, labels[:, None], axis=1)[:, 0], 1e-12, 1.0))
    with _trusted():
        of_two = _of_two(labels, shares[:, 1], weights, recalls) if len(classes) == 2 else {}
    return Performance(
        pooled_accuracy=float(counts.trace() / sizes.sum()),
        baseline_accuracy=float(prior.max()),
        balanced_accuracy=float(recalls[present].mean()),
        macro_f1=float((2 * counts.diagonal()[present] / (sizes + chosen)[present]).mean()),
        roc_auc=_area(truth, shares, weights),
        log_loss=float(np.average(nats, weights=weights)),
        brier=_brier(truth, shares, weights),
        baseline_brier=_brier(truth, np.broadcast_to(prior, truth.shape), weights),
        class_recall=tuple(recalls.tolist()) if len(classes) <= _MAX_CURVES else None,
        **of_two,
    )


def of_labels(truth: Labels, shares: FloatArray, weights: FloatArray | None = None) -> Performance:
    """Return the metrics of several labels, each with two values; those of single numbers are means over labels.

    The baseline has the share of each label for every record.

    Args:
        truth: (n, l) labels, 0 or 1.
        shares: (n, l) probabilities.
        weights: (n,) of the records; None: 1.

    Examples:
        >>> metrics = of_labels(np.array([[0, 1], [1, 1]]), np.array([[0.2, 0.9], [0.6, 0.8]]))
        >>> metrics.label_roc_auc, metrics.pooled_accuracy, metrics.baseline_accuracy
        ((1.0, nan), 1.0, 0.75)
    """
    weights = np.ones(len(truth)) if weights is None else weights
    rates, predicted = np.average(truth, axis=0, weights=weights), shares >= 0.5
    both = (rates > 0) & (rates < 1)
    with _trusted():
        areas, precisions = (
            np.array([score(truth[:, j], shares[:, j], weights) if both[j] else np.nan for j in range(len(rates))])
            for score in (_area_under, _precision)
        )
        hits = weights @ (predicted & (truth > 0))
        f1 = 2 * hits / np.maximum(weights @ (predicted + truth), 1e-300)
        clipped = np.clip(shares, 1e-12, 1 - 1e-12)
        nats = -np.where(truth > 0, np.log(clipped), np.log1p(-clipped))
    return Performance(
        pooled_accuracy=float(np.average((predicted == truth).mean(axis=1), weights=weights)),
        baseline_accuracy=float(np.maximum(rates, 1 - rates).mean()),
        macro_f1=float(f1.mean()),
        roc_auc=float(areas[both].mean()) if both.any() else None,
        average_precision=float(precisions[both].mean()) if both.any() else None,
        baseline_precision=float(rates[both].mean()) if both.any() else None,
        log_loss=float(np.average(nats.mean(axis=1), weights=weights)),
        brier=float(np.average(((shares - truth) ** 2).mean(axis=1), weights=weights)),
        baseline_brier=float((rates * (1 - rates)).mean()),
        label_rate=tuple(rates.tolist()),
        label_roc_auc=tuple(areas.tolist()),
        label_average_precision=tuple(precisions.tolist()),
        label_f1=tuple(f1.tolist()),
    )


def _of_two(labels: Labels, scores: FloatArray, weights: FloatArray, recalls: FloatArray) -> dict[str, Any]:
    """Return the metrics of a positive class, as far as the labels define them."""
    curve = calibration(labels, scores, weights)
    metrics = {"calibration_error": float(np.average(abs(curve[:, 0] - curve[:, 1]), weights=curve[:, 2]))}
    if np.isfinite(recalls).all():
        false, true, _ = roc_curve(labels, scores, sample_weight=weights, drop_intermediate=False)
        metrics |= {
            "average_precision": _precision(labels, scores, weights),
            "sensitivity": float(recalls[1]),
            "specificity": float(recalls[0]),
            "sensitivity_at_90": float(true[false <= 1 - SPECIFICITY + 1e-9].max()),
        }
    return metrics


def calibration(labels: Labels, scores: FloatArray, weights: FloatArray | None = None) -> FloatArray:
    """Return the calibration curve of a positive class.

    Args:
        labels: (n,) 1 for the positive class, otherwise 0.
        scores: (n,) probability of it.
        weights: (n,) of the records; None: 1.

    Returns:
        (b, 3) mean probability, share of the positive class and weight of each bin that holds records; b is at most
        ``BINS``.
    """
    weights = np.ones(len(labels)) if weights is None else weights
    bins = np.minimum((scores * BINS).astype(np.int64), BINS - 1)
    sums = np.stack([np.bincount(bins, weights * values, BINS) for values in (scores, labels, np.ones(len(labels)))])
    sums = sums[:, sums[2] > 0]
    return np.stack([sums[0] / sums[2], sums[1] / sums[2], sums[2]], axis=1)


def of_numbers(targets: FloatArray, predictions: FloatArray, weights: FloatArray | None = None) -> Performance:
    """Return the metrics of predicted numbers, in their unit. The baseline predicts the mean of the targets.

    Args:
        targets: (n,) true numbers.
        predictions: (n,) of them.
        weights: (n,) of the records; None: 1.

    Examples:
        >>> metrics = of_numbers(np.array([1.0, 3.0]), np.array([1.0, 2.0]))
        >>> metrics.r2, metrics.baseline_rmse
        (0.5, 1.0)
    """
    constant = np.full(len(targets), np.average(targets, weights=weights))
    with _trusted():
        return Performance(
            rmse=float(root_mean_squared_error(targets, predictions, sample_weight=weights)),
            mae=float(mean_absolute_error(targets, predictions, sample_weight=weights)),
            r2=float(r2_score(targets, predictions, sample_weight=weights)) if len(targets) > 1 else None,
            baseline_rmse=float(root_mean_squared_error(targets, constant, sample_weight=weights)),
            baseline_mae=float(mean_absolute_error(targets, constant, sample_weight=weights)),
        )


def intervals(
    measure: Callable[[FloatArray], Performance], units: npt.NDArray[Any], draws: int = _DRAWS
) -> dict[str, tuple[float, float]]:
    """Return 95 % bootstrap intervals of metrics, by name.

    Args:
        measure: computes the metrics of records with the given (n,) weights.
        units: (n,) unit of each record, such as its patient. Units are drawn with all their records.
        draws: number of repetitions. Equal arguments give equal intervals.
    """
    _, unit_of = np.unique(units, return_inverse=True)
    many = int(unit_of.max()) + 1 if len(unit_of) else 0
    rng = np.random.default_rng(0)
    drawn: dict[str, list[float]] = {}
    for _ in range(draws if many > 1 else 0):
        weights = np.bincount(rng.integers(many, size=many), minlength=many)[unit_of].astype(np.float64)
        kept = weights > 0
        for name, value in measure(np.where(kept, weights, 0.0)).to_json().items():
            if isinstance(value, float):
                drawn.setdefault(name, []).append(value)
    ends = {name: np.quantile(values, [_OUTSIDE, 1 - _OUTSIDE]).tolist() for name, values in drawn.items()}
    return {name: (low, high) for name, (low, high) in ends.items()}


def _area(truth: FloatArray, shares: FloatArray, weights: FloatArray) -> float | None:
    """Return the area under the ROC curve, of several classes the mean of one against the rest; None: undefined."""
    if truth.shape[1] > _MAX_CURVES:
        return None
    several = range(truth.shape[1]) if truth.shape[1] > 2 else [1]
    totals = weights @ truth
    areas = [_area_under(truth[:, j], shares[:, j], weights) for j in several if 0 < totals[j] < weights.sum()]
    return float(np.mean(areas)) if areas else None


def _area_under(truth: npt.NDArray[Any], scores: FloatArray, weights: FloatArray) -> float:
    """Return the area under the ROC curve: how often a positive record has the larger score; equal ones count half."""
    distinct, place = np.unique(scores, return_inverse=True)
    positive, negative = (np.bincount(place, weights * side, len(distinct)) for side in (truth, 1 - truth))
    return float(positive @ (np.cumsum(negative) - negative / 2) / (positive.sum() * negative.sum()))


def _precision(truth: npt.NDArray[Any], scores: FloatArray, weights: FloatArray) -> float:
    return float(average_precision_score(truth, scores, sample_weight=weights))


def _brier(truth: FloatArray, shares: FloatArray, weights: FloatArray) -> float:
    """Return the mean squared error of probabilities: of the positive class, or summed over more than two classes."""
    errors = (truth - shares) ** 2
    return float(np.average(errors[:, 1] if truth.shape[1] == 2 else errors.sum(axis=1), weights=weights))


@contextmanager
def _trusted() -> Iterator[None]:
    """Spare checks of arrays that this package computed, which take longer than most metrics."""
    with sklearn.config_context(assume_finite=True, skip_parameter_validation=True):
        yield
