"""Results of a table: a JSON-ready document, and its terminal and Markdown forms."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table as RichTable
from safetensors.numpy import load_file

from coterie.bench.cells import Done
from coterie.bench.table import Column, Table, decimals, score_at
from coterie.client.cohort import federation
from coterie.datasets import assign_groups, parse_groups
from coterie.results import read_rounds
from coterie.server import RunConfig, applicable
from coterie.server.folder import machine, versions

_MISSING = "–"

Document = Mapping[str, Any]


def document(
    table: Table, done: Sequence[Done], tuned: Mapping[tuple[str, str], Mapping[str, Any]], *, command: str, device: str
) -> dict[str, Any]:
    """Return the whole table with its settings and environment.

    Args:
        table: the table.
        done: its finished cells.
        tuned: tuned settings by (row, column of tuning).
        command: command that produced it.
        device: training device of the clients.
    """
    by_place: dict[tuple[str, str], list[Done]] = {}
    for one in done:
        by_place.setdefault((one.cell.row, one.cell.column), []).append(one)
    return {
        "table": table.name,
        "title": table.title,
        "source": table.source,
        "plot": table.plot,
        "quick": table.quick,
        "command": command,
        "machine": machine(device),
        "versions": versions(),
        "axis": table.axis,
        "seeds": list(table.seeds),
        "tuning": {"seeds": list(table.tuning_seeds), "set": dict(table.tuning_settings), "grid": dict(table.grid)},
        "set": {**table.settings, **table.overrides},
        "columns": [
            {
                "name": c.name,
                "setting": c.setting,
                "score": c.score,
                "percent": c.percent,
                "set": dict(c.settings),
                "x": c.x,
                "panel": c.panel,
                "tuned-at": c.tuned_at,
            }
            | ({"points": _points(table, c)} if table.plot == "pictures" else {})
            for c in table.columns
        ],
        "rows": [
            {
                "name": row.name,
                "set": dict(row.settings),
                "cells": [
                    _cell(
                        table,
                        c,
                        row.paper[index],
                        by_place.get((row.name, c.setting), []),
                        tuned.get((row.name, c.tuned_at)),
                    )
                    for index, c in enumerate(table.columns)
                ],
            }
            for row in table.rows
        ],
    }


def _cell(
    table: Table, column: Column, paper: float | None, done: Sequence[Done], tuned: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """Return the published value, ours and the difference of a cell; None if the row lacks the column."""
    if not done:
        return None
    scale = 100 if column.percent else 1
    results = [one.result for one in done if one.result is not None]
    scores = [_score(column.score, one.result, one.folder) for one in done if one.result is not None]
    values = [scale * float(value) for value in scores if value is not None]
    mean = statistics.fmean(values) if values else None
    return {
        "paper": paper,
        "mean": mean,
        "std": statistics.stdev(values) if len(values) > 1 else None,
        "difference": mean - paper if mean is not None and paper is not None else None,
        "values": values,
        "tuned": dict(tuned or {}),
        "epsilon": next((r["epsilon"] for r in results), None),
        "delta": next((r["delta"] for r in results), None),
        "worst group": _mean(results, "worst_group_accuracy", 100),
        "clustering accuracy": _mean(results, "clustering_accuracy", 100),
        "groups found": _mean(results, "groups_found", 1),
        "seconds": _mean(results, "seconds_training", 1),
        "why": next((one.error for one in done if one.error), None),
        **(_drawn[table.plot](column, done) if table.plot in _drawn else {}),
    }


def _score(score: str, result: Mapping[str, Any], folder: Path) -> Any:
    key, number = score_at(score)
    if number is None:
        return result.get(key)
    return next((value for at, value in _over_rounds(key, folder) if at == number), None)


def _over_rounds(score: str, folder: Path) -> list[tuple[int, Any]]:
    """Return the evaluated rounds with a score; empty for centralised clustering."""
    values = ((record.round, {**record.to_json(), **record.exact()}.get(score)) for record in read_rounds(folder)[0])
    return [(number, value) for number, value in values if value is not None]


def _curve(column: Column, done: Sequence[Done]) -> dict[str, Any]:
    """Return the score over rounds: round, mean and standard deviation over seeds."""
    if score_at(column.score)[1] is not None:
        return {}
    scale = 100 if column.percent else 1
    values: dict[int, list[float]] = {}
    for one in done:
        for number, value in _over_rounds(column.score, one.folder) if one.result is not None else ():
            values.setdefault(number, []).append(scale * value)
    return {
        "curve": [
            [number, round(statistics.fmean(every), 3), round(statistics.stdev(every), 3) if len(every) > 1 else 0.0]
            for number, every in sorted(values.items())
        ]
    }


def _by_group(column: Column, done: Sequence[Done]) -> dict[str, Any]:
    """Return the accuracy of every group, mean and standard deviation over seeds, and clustering over rounds."""
    if column.score == "clustering_accuracy":
        return _curve(column, done)
    groups = [one.result["group_accuracy"] for one in done if one.result and one.result.get("group_accuracy")]
    if column.score != "accuracy" or not groups:
        return {}
    values = 100 * np.array(groups)
    spread = values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(values.shape[1])
    return {"groups": [values.mean(axis=0).tolist(), spread.tolist()]}


def _projected(column: Column, done: Sequence[Done]) -> dict[str, Any]:
    """Return the projected first updates of the first seed, with the cluster and true group of each client."""
    one = next((one for one in done if one.result is not None), None)
    notes = {} if one is None or one.result is None else one.result["notes"]
    if one is None or "projection" not in notes:
        return {}
    config = RunConfig({**one.cell.settings, "seed": one.cell.seed})
    truth = assign_groups(config.data.clients, parse_groups(config.data.groups))
    return {"projection": notes["projection"], "labels": notes["labels"], "groups": truth[notes["clients"]].tolist()}


def _fitted(column: Column, done: Sequence[Done]) -> dict[str, Any]:
    one = next((one for one in done if one.result is not None), None)
    files = [] if one is None else sorted((one.folder / "models").glob("cluster-*.safetensors"))
    models = [{name.rpartition(".")[2]: value.item() for name, value in load_file(file).items()} for file in files]
    return {"lines": [[model["weight"], model["bias"]] for model in models]}


_drawn = {"curves": _curve, "pictures": _fitted, "groups": _by_group, "projections": _projected}


def _points(table: Table, column: Column) -> list[list[float]]:
    """Return group, x and y of a sample of the client data of a column."""
    data = federation(
        RunConfig(applicable({**table.settings, **column.settings, "seed": table.seeds[0]})).for_clients()
    )
    shards = [data.shard(client) for client in range(data.clients)]
    groups = np.repeat([shard.group for shard in shards], [len(shard.y) for shard in shards])
    x, y = np.concatenate([s.x[:, 0] for s in shards]), np.concatenate([s.y for s in shards])
    some = np.random.default_rng(0).permutation(len(y))[:400]
    return [groups[some].tolist(), x[some].tolist(), y[some].tolist()]


def _mean(results: Sequence[Mapping[str, Any]], key: str, scale: float) -> float | None:
    values = [scale * float(result[key]) for result in results if result.get(key) is not None]
    return statistics.fmean(values) if values else None


def _figure(value: float | None, places: int) -> str:
    return _MISSING if value is None else f"{value:.{places}f}"


def _notes(document: Document) -> dict[str, int]:
    why = [cell["why"] for row in document["rows"] for cell in row["cells"] if cell and cell["why"]]
    return {reason: number for number, reason in enumerate(dict.fromkeys(why), 1)}


def _text(cell: Mapping[str, Any] | None, notes: Mapping[str, int], places: int) -> str:
    """Format the published value, ours and the difference in one line with ``places`` decimals."""
    if cell is None:
        return ""
    paper = "" if cell["paper"] is None else f"{_figure(cell['paper'], places)} → "
    if cell["why"]:
        return f"{paper}{_MISSING} [{notes[cell['why']]}]"
    both = cell["paper"] is not None and cell["mean"] is not None
    difference = f" ({cell['difference']:+.{places}f})" if both else ""
    spread = "" if cell["std"] is None else f" ± {cell['std']:.{places}f}"
    return f"{paper}{_figure(cell['mean'], places)}{spread}{difference}"


def _texts(document: Document, row: Mapping[str, Any], notes: Mapping[str, int]) -> list[str]:
    columns = document["columns"]
    return [_text(cell, notes, decimals(column)) for cell, column in zip(row["cells"], columns, strict=True)]


def console_table(document: Document) -> tuple[RichTable, list[str]]:
    """Return the table for a terminal, and the notes."""
    notes = _notes(document)
    published = any(cell and cell["paper"] is not None for row in document["rows"] for cell in row["cells"])
    source = f" ({document['source']})" if document["source"] else ""
    title = document["title"] + source + (": paper → ours" if published else "")
    view = RichTable(title=title, title_justify="left")
    view.add_column("method", style="cyan", overflow="fold")
    for column in document["columns"]:
        view.add_column(column["name"], justify="right", overflow="fold")
    for row in document["rows"]:
        view.add_row(row["name"], *(text.replace("[", r"\[") for text in _texts(document, row, notes)))
    return view, [f"[{number}] {reason}" for reason, number in notes.items()]


def markdown(document: Document) -> str:
    """Return the document as Markdown."""
    notes = _notes(document)
    heads = ["method", *(column["name"] for column in document["columns"])]
    lines = ["| " + " | ".join(heads) + " |", "| --- |" + " ---: |" * (len(heads) - 1)]
    lines += ["| " + " | ".join([row["name"], *_texts(document, row, notes)]) + " |" for row in document["rows"]]
    lines += ["", *(f"[{number}] {reason}" for reason, number in notes.items())] if notes else []
    return "\n".join(lines) + "\n"
