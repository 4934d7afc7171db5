"""Quality of predictions in words: metrics beside those of the best constant prediction."""

from __future__ import annotations

from coterie.report import formats
from coterie.results import Diagnostics, ScoreEstimates
from coterie.tasks import beats_constant


def verdict(scores: Diagnostics) -> str:
    """Return a warning if the predictions are not better than the best constant one; otherwise an empty text."""
    if beats_constant(scores) is not False:
        return ""
    if scores.rmse is not None:
        constant = f"the mean of the targets (root mean squared error {formats.number(scores.baseline_rmse)})"
    elif scores.label_rate is not None:
        constant = f"the share of each label (Brier score {_decimals(scores.baseline_brier)})"
    else:
        constant = f"always the most frequent class ({formats.percent(scores.baseline_accuracy)})"
    return f"the model is not better than predicting {constant}"


def named_metrics(scores: Diagnostics) -> list[tuple[str, str, str]]:
    """Return label, value and note of the metrics, those that matter most first; empty without any."""
    if scores.rmse is not None:
        return [
            (label, formats.number(value), f"the mean of the targets has {formats.number(baseline)}")
            for label, value, baseline in (
                ("Root mean squared error", scores.rmse, scores.baseline_rmse),
                ("Mean absolute error", scores.mae, scores.baseline_mae),
            )
        ]
    if scores.label_rate is not None:
        return _of_labels(scores)
    if scores.baseline_accuracy is None:
        return []
    constant = ("Constant prediction", formats.percent(scores.baseline_accuracy), "always the most frequent class")
    area = [] if scores.roc_auc is None else [("Area under ROC curve", f"{scores.roc_auc:.3f}", _rates(scores))]
    return [constant, *area, ("Balanced accuracy", formats.percent(scores.balanced_accuracy), _recalls(scores))]


def released_metrics(estimates: ScoreEstimates | None) -> list[tuple[str, str, str]]:
    """Return label, value and note of what a released histogram of scores gives; empty without one."""
    if estimates is None:
        return []
    if estimates.classes > 2:
        error = f"± {estimates.errors.get('roc_auc', 0.0):.3f} by the noise"
        note = f"{error}; mean of {estimates.classes} classes, each against the others; 0.5 is chance"
        return [("Noisy area under ROC curve", f"{estimates.roc_auc:.3f}", note)]
    share = estimates.positive_share
    curve = ", ".join(f"{100 * mean:.0f} → {100 * positive:.0f}" for mean, positive, _ in estimates.calibration)
    rows = (
        ("Noisy area under ROC curve", "roc_auc", "0.5 is chance; of held-out records of all clients"),
        ("Noisy sensitivity", "sensitivity_at_90", f"at a specificity of 90{formats.NBSP}%"),
        ("Noisy average precision", "average_precision", f"a constant has {share:.3f}, the share of positives"),
        ("Noisy Brier score", "brier", f"a constant has {share * (1 - share):.3f}; predicted → observed in %: {curve}"),
    )
    return [
        (label, f"{getattr(estimates, name):.3f}", f"± {estimates.errors.get(name, 0.0):.3f} by the noise; {note}")
        for label, name, note in rows
    ]


def federation_pays(scores: Diagnostics) -> tuple[bool, str] | None:
    """Return whether the better of released and personalised models beats those of clients alone, and a sentence."""
    released, alone = scores.accuracy, scores.alone_accuracy
    if released is None or alone is None:
        return None
    own = scores.personal_accuracy
    best = released if own is None else max(released, own)
    equal = formats.percent(best) == formats.percent(alone)
    pays = best > alone and not equal
    shown = formats.percent(released) + ("" if own is None else f", personalised {formats.percent(own)}")
    shown += "," * (equal or own is not None)
    against = "as much as" if equal else f"against {formats.percent(alone)} for"
    text = (
        f"{'no difference' if equal else 'yes' if pays else 'no'}: {shown} {against} a model that a client trains "
        f"alone, without noise (mean of {scores.alone_clients} clients, {formats.duration(scores.alone_seconds)})"
    )
    if not pays:
        text += "; share nothing (strategy local), or try more clients, a larger ε, clusters, or personalize"
    return pays, text


def _of_labels(scores: Diagnostics) -> list[tuple[str, str, str]]:
    areas = [(area, j) for j, area in enumerate(scores.label_roc_auc or ()) if area is not None and area == area]
    lowest = f"mean of all labels; lowest {min(areas)[0]:.3f}, of {_name(scores, min(areas)[1])}" if areas else ""
    of_shares = "the shares of labels have {}".format
    metrics = [
        ("Area under ROC curve", scores.roc_auc, lowest),
        ("Average precision", scores.average_precision, of_shares(_decimals(scores.baseline_precision))),
        ("F1 score", scores.macro_f1, "mean of all labels"),
        ("Brier score", scores.brier, of_shares(_decimals(scores.baseline_brier))),
    ]
    return [(label, _decimals(value), note) for label, value, note in metrics if value is not None]


def _decimals(value: float | None) -> str:
    return formats.MISSING if value is None else f"{value:.3f}"


def _rates(scores: Diagnostics) -> str:
    if scores.sensitivity is None:
        return "0.5 is chance"
    return (
        f"sensitivity {formats.percent(scores.sensitivity)}, specificity {formats.percent(scores.specificity)} "
        f"({_name(scores, 1)} is positive); sensitivity {formats.percent(scores.sensitivity_at_90)} at a specificity "
        f"of 90{formats.NBSP}%"
    )


def _recalls(scores: Diagnostics) -> str:
    recalls = [(recall, j) for j, recall in enumerate(scores.class_recall or ()) if recall is not None]
    if not recalls:
        return "mean recall of all classes"
    if len(recalls) == 2:
        return f"recall {', '.join(f'{formats.percent(recall)} of {_name(scores, j)}' for recall, j in recalls)}"
    recall, j = min(recalls)
    return f"lowest recall {formats.percent(recall)}, of {_name(scores, j)}"


def _name(scores: Diagnostics, j: int) -> str:
    names = scores.class_names or ()
    return names[j] if j < len(names) else f"{'class' if scores.label_rate is None else 'label'} {j}"
