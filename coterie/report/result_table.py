"""Result table of a run in the terminal."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from coterie.report import formats
from coterie.report.runs import clusters_records


def result_table(result: Mapping[str, Any], certificate: Mapping[str, Any]) -> Table:
    """Return the table of scores and privacy guarantee for a terminal.

    Args:
        result: `result.json`, with the exact scores of `diagnostics.json` or None as "diagnostics"; any value may be
            missing or None.
        certificate: `privacy.json`; empty if there is none, which means no privacy.

    Rich markup in either is not interpreted.
    """
    table = Table(
        title=Text(" · ".join(str(result.get(key) or formats.MISSING) for key in ("strategy", "dataset"))),
        title_style="bold",
        title_justify="left",
        box=box.ROUNDED,
        show_header=False,
        pad_edge=True,
    )
    scores = {**result, **(result.get("diagnostics") or {})}
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in _scores(scores):
        table.add_row(label, value)
    if result.get("diagnostics") and (certificate.get("unit") or "none") != "none":
        table.add_row("", Text("exact diagnostics: outside the guarantee", "yellow"))
    if scores.get("evaluated_clients"):
        table.add_row("", Text(f"of {scores['evaluated_clients']} clients, drawn at random"))
    if found := formats.mixture(result.get("notes")):
        table.add_row("Mixture", found)
    table.add_section()
    for label, value in _privacy(certificate):
        table.add_row(label, value)
    table.add_section()
    table.add_row("Rounds", Text(_timing(result)))
    return table


def _scores(result: Mapping[str, Any]) -> list[tuple[str, str | Text]]:
    if clusters_records(result.get("strategy")):
        return _record_scores(result)
    groups = result.get("group_accuracy") or ()
    noisy = result.get("evaluate") == "private"
    accuracy = Text(formats.percent(result.get("accuracy")), "bold")
    if noisy:  # the only released score
        return [("Noisy mean accuracy", accuracy)]
    return [
        ("Accuracy", accuracy),
        ("Worst group", formats.percent(result.get("worst_group_accuracy"))),
        *([("Each group", ", ".join(map(formats.percent, groups)))] if groups else []),
        ("Clusters found", formats.of_total(result.get("groups_found"), result.get("groups"))),
        ("Clustering accuracy", formats.percent(result.get("clustering_accuracy"))),
    ]


def _record_scores(result: Mapping[str, Any]) -> list[tuple[str, str | Text]]:
    """Return scores of record clusters against classes, and the clients without a reply."""
    missing = (result.get("notes") or {}).get("missing")
    missing_text = formats.MISSING if missing is None else formats.listed(missing) if missing else "none"
    return [
        ("NMI", Text(formats.index(result.get("nmi")), "bold")),
        ("Kappa", formats.index(result.get("kappa"))),
        ("Adjusted Rand", formats.index(result.get("ari"))),
        ("Accuracy", f"{formats.percent(result.get('accuracy'))} of records, with clusters matched to classes"),
        ("Clients missing", missing_text),
    ]


def _privacy(certificate: Mapping[str, Any]) -> list[tuple[str, Text]]:
    unit = certificate.get("unit") or "none"
    reasons = "; ".join(map(str, certificate.get("reasons") or ()))
    if unit == "none":
        return [("Privacy", Text.assemble(("none, ε = ∞", "bold yellow"), reasons and f": {reasons}"))]
    loss = f"ε = {formats.epsilon(certificate.get('epsilon'))}, δ = {formats.number(certificate.get('delta'))}"
    adjacency = certificate.get("adjacency") or f"per {unit}"
    rows = [("Privacy", Text(f"{loss} ({adjacency})"))]
    if certificate.get("certified"):
        return [*rows, ("Certified", Text("yes", "bold green"))]
    reasons = reasons or "no reason was recorded"
    return [*rows, ("Certified", Text.assemble(("no", "bold yellow"), f": {reasons}"))]


def _timing(result: Mapping[str, Any]) -> str:
    training = result.get("seconds_training")
    parts = [
        f"{formats.number(result.get('rounds'))} in {formats.duration(training)}",
        f"{formats.duration(result.get('seconds_per_round'))} each",
    ]
    if result.get("seconds_total") is not None:
        parts.append(f"{formats.duration(result['seconds_total'])} in total")
    if result.get("peak_rss_mb") is not None:
        parts.append(f"peak memory {result['peak_rss_mb']:.0f} MB")
    return ", ".join(parts)
