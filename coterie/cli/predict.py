"""``coterie predict``, ``coterie assign`` and ``coterie export``."""

from __future__ import annotations

import csv
import math
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from coterie.cli.console import JsonFlag, print_json
from coterie.files import spreadsheet_cell

if TYPE_CHECKING:
    import numpy.typing as npt

    from coterie.datasets.local_files import LocalRecords
    from coterie.inference import TrainedModels

Outputs: TypeAlias = "npt.NDArray[Any]"
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder, or a folder with its model files.")]
_File = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="Records: .npz, .csv, .parquet, .xlsx or a folder of images; labels optional."),
]
Schema = Annotated[
    Path | None, typer.Option(help="Schema of the run, with a part [file] that describes FILE; default: the run's.")
]
Site = Annotated[int | None, typer.Option(metavar="N", help="Client of the run whose model to use.")]
Identifiers = Annotated[
    str | None, typer.Option("--id", metavar="COLUMN", help="Column of FILE that names each record; needs a schema.")
]
Trust = Annotated[
    bool, typer.Option("--trust-code", help="Import code that a model file names, such as module:function.")
]


def predict(  # long: one line per option
    run: RunFolder,
    file: _File,
    site: Site = None,
    cluster: Annotated[int | None, typer.Option(metavar="J", help="Use the model of this cluster.")] = None,
    out: Annotated[Path | None, typer.Option(help="CSV file to write; default: standard output.")] = None,
    own: Annotated[
        Path | None,
        typer.Option(metavar="OWN", help="Labelled records of this site, to which the model is fitted first."),
    ] = None,
    personalize: Annotated[
        str | None,
        typer.Option(metavar="METHOD", help="How: last-layer (default), all, prior or mixture; requires --own."),
    ] = None,
    positive: Annotated[
        str | None, typer.Option(metavar="CLASS", help="Positive class of --threshold; default: the second of two.")
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(metavar="P", help="Predict the positive class if its probability is at least P; two classes."),
    ] = None,
    ids: Identifiers = None,
    schema: Schema = None,
    trust_code: Trust = False,
) -> None:
    """Predict with the models of a run. Without --site or --cluster, the model that fits labels of OWN or FILE best.

    Nothing leaves this machine. The output has a line per record, in the order of FILE: its number from 0, the cell of
    --id, the cluster, the prediction, and for classes its probability and that of every class.

    With --own, predictions say more of the site's own records than the model did: keep them at the site.
    """
    from coterie.inference import InferenceError, load

    if personalize is not None and own is None:
        raise InferenceError(f"--personalize {personalize} requires --own OWN, labelled records of this site")
    if site is not None and cluster is not None:
        raise InferenceError("--site and --cluster both choose a model; give one of them")
    models = load(run, site=site, trust_code=trust_code)
    decision = _decision(models, positive, threshold)
    records = models.read(file, schema, ids=ids)
    if own is None:
        chosen = choose_cluster(models, records, site, cluster)
    else:
        own_records = models.read(own, schema)
        chosen = choose_cluster(models, own_records, site, cluster)
        models = models.personalised(own_records, chosen, personalize or "last-layer")
    outputs = models.outputs(records.x, chosen)
    rows = _rows(models, records, outputs, chosen, decision)
    with nullcontext(sys.stdout) if out is None else out.open("w", newline="") as opened:
        writer = csv.DictWriter(opened, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: spreadsheet_cell(value) for key, value in row.items()} for row in rows)
    for note in _notes(models, records, chosen, outputs):
        print(note, file=sys.stderr)
    if site is not None and models.card.unit == "record" and len(models) > 1:
        print(
            f"note: the cluster of site {site} is the one that the run released under noise; from labelled records, "
            "coterie assign finds the model that fits best",
            file=sys.stderr,
        )


def assign(
    run: RunFolder,
    file: _File,
    site: Site = None,
    schema: Schema = None,
    trust_code: Trust = False,
    as_json: JsonFlag = False,
) -> None:
    """Find the cluster that fits the labelled records of FILE best, such as those of a site that never trained.

    Nothing leaves this machine, so this has no privacy cost.
    """
    from coterie.inference import load

    models = load(run, site=site, trust_code=trust_code)
    records = models.read(file, schema)
    if models.clusters_records:
        labels = models.predict(records.x, 0)
        counts = [int((labels == j).sum()) for j in range(models.card.clusters)]
        if as_json:
            print_json({"clusters": counts, "records": len(labels)})
            return
        print(*(f"cluster {j}: {count} records" for j, count in enumerate(counts)), sep="\n")
        return
    assignment = models.assign(records)
    if as_json:
        losses = [loss if math.isfinite(loss) else None for loss in assignment.losses]
        print_json({"cluster": assignment.cluster, "losses": losses, "records": assignment.records})
        return
    lines = [f"cluster {j}: mean loss {loss:.4f}" for j, loss in enumerate(assignment.losses)]
    lines[assignment.cluster] += "   <- smallest"
    print(f"{assignment.records} records of {records.where}", *lines, sep="\n")


def export(
    run: RunFolder,
    onnx: Annotated[Path, typer.Option(metavar="DIR", help="Folder for cluster-0.onnx, cluster-1.onnx, ...")],
    site: Site = None,
    trust_code: Trust = False,
) -> None:
    """Export the models of a run to ONNX; requires coterie[onnx]."""
    from coterie.inference import load

    models = load(run, site=site, trust_code=trust_code)
    for path in models.export_onnx(onnx):
        print(path)
    card = models.card
    before = "" if card.features == "none" else f", then features {card.features}"
    print(
        f"input: float32 (n, {', '.join(map(str, models.input_shape))}); scaling: {card.scaling}{before}",
        file=sys.stderr,
    )


def choose_cluster(models: TrainedModels, records: LocalRecords, site: int | None, cluster: int | None) -> int:
    """Return the cluster whose model to use: the given one, that of a site, or the one that fits the labels best.

    Raises:
        InferenceError: there is none, or the records have no labels.
    """
    from coterie.inference import InferenceError

    if cluster is not None:
        return cluster
    if site is not None:
        return models.cluster_of(site)
    if len(models) == 1:
        return 0
    if records.y is None:
        raise InferenceError(
            f"which of {len(models)} models? {records.where} has no labels to choose by; give --site or --cluster"
        )
    return models.assign(records).cluster


def _decision(models: TrainedModels, positive: str | None, threshold: float | None) -> tuple[int, float] | None:
    """Return the positive class of two and its least probability; None: the most probable class is predicted."""
    from coterie.inference import InferenceError

    if threshold is None:
        if positive is not None:
            raise InferenceError(f"--positive {positive} requires --threshold P")
        return None
    one = models.positive(positive)
    models.check_threshold(threshold, one)
    if models.task.num_classes != 2:
        raise InferenceError("--threshold requires models of two classes; the probabilities of all classes are written")
    assert one is not None
    return one, threshold


def _rows(
    models: TrainedModels, records: LocalRecords, outputs: Outputs, cluster: int, decision: tuple[int, float] | None
) -> list[dict[str, Any]]:
    """Return a row of the output per record."""
    index = range(len(outputs)) if records.index is None else records.index.tolist()
    rows: list[dict[str, Any]] = [{"record": i} for i in index]
    if records.ids is not None:
        rows = [{**row, "id": text} for row, text in zip(rows, records.ids, strict=True)]
    if models.clusters_records:
        return [{**row, "cluster": int(label)} for row, label in zip(rows, outputs.argmax(axis=1), strict=True)]
    columns = models.task.columns(outputs, models.class_names, decision)
    results = (dict(zip(columns, texts, strict=True)) for texts in zip(*columns.values(), strict=True))
    return [{**row, "cluster": cluster, **result} for row, result in zip(rows, results, strict=True)]


def _notes(models: TrainedModels, records: LocalRecords, cluster: int, outputs: Outputs) -> list[str]:
    """Return remarks about the predictions, which are no part of the output."""
    notes = [f"note: {loss}" for loss in records.left_out.losses]
    if records.unused:
        notes.append(f"note: {records.where} also has {records.unused} test records, which are not read")
    if models.clusters_records:
        return notes
    text = f"{len(outputs)} predictions by the model of cluster {cluster}"
    if records.y is not None:
        text += f"; {models.task.agreement(outputs, records.y, records.where)}"
    return [*notes, text]
