"""``coterie evaluate``."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli.console import JsonFlag, console_for, print_json, print_table
from coterie.cli.predict import RunFolder, Schema, Site, Trust, choose_cluster

if TYPE_CHECKING:
    from coterie.tasks import Performance

Intervals = dict[str, tuple[float, float]]
Positive = Annotated[
    str | None, typer.Option(metavar="CLASS", help="Positive class; default: the second of two classes.")
]
Threshold = Annotated[
    float | None,
    typer.Option(metavar="P", help="Least probability of the positive class at which it is predicted; default: 0.5."),
]
_CHANCE = 0.5


def evaluate(  # long: one line per option
    run: RunFolder,
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="Labelled records: .npz, .csv, .parquet, .xlsx or a folder of images."),
    ],
    site: Site = None,
    cluster: Annotated[int | None, typer.Option(metavar="J", help="Evaluate the model of this cluster.")] = None,
    positive: Positive = None,
    threshold: Threshold = None,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Only the records of FILE on which a client with this file tests.")
    ] = False,
    patient: Annotated[
        str | None,
        typer.Option(
            "--unit",
            metavar="COLUMN",
            help="Column that names the patient of a record: intervals draw patients; default: that of the schema.",
        ),
    ] = None,
    schema: Schema = None,
    trust_code: Trust = False,
    as_json: JsonFlag = False,
) -> None:
    """Evaluate a model of a run on labelled records, beside the best constant prediction.

    Without --site or --cluster, the model whose loss on FILE is smallest. Nothing leaves this machine. The figures are
    exact functions of the records: keep them at the site. Records that took part in training give figures that are too
    good; --held-out leaves them out.
    """
    from coterie.datasets import DataError
    from coterie.inference import load
    from coterie.tasks import beats_constant
    from coterie.tasks.performance import intervals

    models = load(run, site=site, trust_code=trust_code)
    records = None
    if patient is None and models.schema and models.schema.unit:
        with suppress(DataError):  # FILE need not name the unit
            records = models.read(file, schema, ids=models.schema.unit.name, held_out=held_out)
    if records is None:
        records = models.read(file, schema, ids=patient, held_out=held_out)
    chosen = choose_cluster(models, records, site, cluster)
    measure = models.evaluation(records, chosen, positive=positive, threshold=threshold)
    console = console_for(as_json)
    with console.status("drawing records anew, for intervals"):
        metrics, limits = measure(None), intervals(measure, records.units)
    if as_json:
        print_json(
            {
                "records": len(records.x),
                "cluster": chosen,
                "beats_constant": beats_constant(metrics),
                "metrics": metrics.to_json(),
                "intervals": limits,
            }
        )
        return
    if beats_constant(metrics) is False:
        print("The model is not better than the best constant prediction.")
    one, names, positive_class = models.positive(positive), list(models.class_names), ""
    if one is not None:
        others = [name for name in names if name != names[one]]
        positive_class = f", positive class {names[one]}"
        names = [others[0] if len(others) == 1 else "others", names[one]]
    print(f"{len(records.x)} records of {records.where}, model of cluster {chosen}{positive_class}")
    print_table(console, ["metric", "value", "95 % interval", "constant"], _rows(metrics, limits), right=3)
    if metrics.class_recall is not None and len(names) > 1:
        recalls = [[name, _percent(value)] for name, value in zip(names, metrics.class_recall, strict=True)]
        print_table(console, ["class", "recall"], recalls, right=1)
    if metrics.label_rate is not None:
        heads, columns = zip(*_OF_LABELS.items(), strict=True)
        values = zip(names, *(getattr(metrics, column) for column in columns), strict=True)
        of_labels = [[name, *map(_decimals, row)] for name, *row in values]
        print_table(console, ["label", *heads], of_labels, right=len(heads))


def _rows(metrics: Performance, limits: Intervals) -> list[list[str]]:
    """Return name, value, interval and baseline of each metric."""
    constants: dict[str, float | None] = {
        "pooled_accuracy": metrics.baseline_accuracy,
        "balanced_accuracy": None if not metrics.class_recall else 1 / sum(r == r for r in metrics.class_recall),
        "roc_auc": _CHANCE,
        "average_precision": metrics.baseline_precision,
        "brier": metrics.baseline_brier,
        "rmse": metrics.baseline_rmse,
        "mae": metrics.baseline_mae,
        "r2": 0.0,
    }
    rows = []
    for name, (label, shown) in _METRICS.items():
        value = getattr(metrics, name)
        if value is None:
            continue
        low, high = limits.get(name, (None, None))
        interval = "–" if low is None else f"{shown(low)} to {shown(high)}"
        rows.append([label, shown(value), interval, shown(constants.get(name))])
    return rows


def _percent(value: float | None) -> str:
    return "–" if value is None or value != value else f"{100 * value:.1f} %"


def _decimals(value: float | None) -> str:
    return "–" if value is None or value != value else f"{value:.3f}"


def _digits(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


_OF_LABELS = {
    "share": "label_rate",
    "AUC": "label_roc_auc",
    "average precision": "label_average_precision",
    "F1": "label_f1",
}
_METRICS: dict[str, tuple[str, Any]] = {
    "pooled_accuracy": ("accuracy", _percent),
    "balanced_accuracy": ("balanced accuracy", _percent),
    "macro_f1": ("macro F1", _decimals),
    "roc_auc": ("area under the ROC curve", _decimals),
    "average_precision": ("average precision", _decimals),
    "sensitivity": ("sensitivity", _percent),
    "specificity": ("specificity", _percent),
    "sensitivity_at_90": ("sensitivity at 90 % specificity", _percent),
    "brier": ("Brier score", _decimals),
    "calibration_error": ("calibration error", _decimals),
    "log_loss": ("log loss", _decimals),
    "rmse": ("root mean squared error", _digits),
    "mae": ("mean absolute error", _digits),
    "r2": ("R²", _decimals),
}
