"""The table that ends a run in the terminal."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from coterie.report import formats


def result_table(result: Mapping[str, Any], certificate: Mapping[str, Any]) -> Table:
    """What a run achieved and what it may claim, for a terminal.

    Args:
        result: `result.json`; any value may be missing or None.
        certificate: `privacy.json`; empty when the run wrote none, which counts as no privacy.

    Text from either is shown as it is: rich markup in it has no effect.
    """
    table = Table(
        title=Text(" · ".join(str(result.get(key) or formats.MISSING) for key in ("strategy", "dataset"))),
        title_style="bold",
        title_justify="left",
        box=box.ROUNDED,
        show_header=False,
        pad_edge=True,
    )
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    groups = result.get("group_accuracy") or ()
    noisy = result.get("evaluate") == "private"
    table.add_row("Noisy mean accuracy" if noisy else "Accuracy", Text(formats.percent(result.get("accuracy")), "bold"))
    if not noisy:  # nothing else was released
        table.add_row("Worst group", formats.percent(result.get("worst_group_accuracy")))
        if groups:
            table.add_row("Each group", ", ".join(map(formats.percent, groups)))
        table.add_row("Clusters found", formats.of_total(result.get("groups_found"), result.get("groups")))
        table.add_row("Clustering accuracy", formats.percent(result.get("clustering_accuracy")))
    if found := formats.mixture(result.get("notes")):
        table.add_row("Mixture", found)
    table.add_section()
    for label, value in _privacy(certificate):
        table.add_row(label, value)
    table.add_section()
    table.add_row("Rounds", Text(_effort(result)))
    return table


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


def _effort(result: Mapping[str, Any]) -> str:
    training = result.get("seconds_training")
    parts = [
        f"{formats.number(result.get('rounds'))} in {formats.duration(training)}",
        f"{formats.duration(result.get('seconds_per_round'))} each",
    ]
    if result.get("seconds_total") is not None:
        parts.append(f"{formats.duration(result['seconds_total'])} in all")
    if result.get("peak_rss_mb") is not None:
        parts.append(f"peak memory {result['peak_rss_mb']:.0f} MB")
    return ", ".join(parts)
