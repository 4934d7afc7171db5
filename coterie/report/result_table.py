"""Result table of a run in the terminal."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from coterie.privacy.certificate import ODDS, epsilon_observers
from coterie.report import formats
from coterie.report.predictions import federation_pays, named_metrics, released_metrics, verdict
from coterie.report.runs import clusters_records
from coterie.results import Diagnostics, Outcome
from coterie.tasks import of_metrics


def result_table(outcome: Outcome, certificate: Mapping[str, Any]) -> Table:
    """Return the table of scores and privacy guarantee for a terminal.

    Args:
        outcome: the result.
        certificate: `privacy.json`; empty if there is none, which means no privacy.

    Rich markup in either is not interpreted.
    """
    table = Table(
        title=Text(" · ".join(name or formats.MISSING for name in (outcome.strategy, outcome.dataset))),
        title_style="bold",
        title_justify="left",
        box=box.ROUNDED,
        show_header=False,
        pad_edge=True,
    )
    scores = outcome.diagnostics or Diagnostics()
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    if warning := verdict(scores):
        table.add_row("No use", Text(warning, "bold yellow"))
    for label, value in _scores(outcome, scores):
        table.add_row(label, value)
    if outcome.diagnostics and (certificate.get("unit") or "none") != "none":
        table.add_row("", Text("exact diagnostics: outside the guarantee", "yellow"))
    if scores.evaluated_clients:
        table.add_row("", Text(f"of {scores.evaluated_clients} clients, drawn at random"))
    if (paid := federation_pays(scores)) is not None:
        table.add_row("Federation pays", Text(paid[1], "" if paid[0] else "bold yellow"))
    if mixture := formats.mixture(outcome.notes):
        table.add_row("Mixture", mixture)
    table.add_section()
    for label, value in _privacy(certificate):
        table.add_row(label, value)
    table.add_section()
    parts = [
        f"{formats.number(outcome.rounds)} in {formats.duration(outcome.seconds_training)}",
        f"{formats.duration(outcome.seconds_per_round)} each",
    ]
    if outcome.seconds_total is not None:
        parts.append(f"{formats.duration(outcome.seconds_total)} in total")
    if outcome.peak_rss_mb is not None:
        parts.append(f"peak memory {outcome.peak_rss_mb:.0f} MB")
    table.add_row("Rounds", Text(", ".join(parts)))
    return table


def _scores(outcome: Outcome, scores: Diagnostics) -> list[tuple[str, str | Text]]:
    if clusters_records(outcome.strategy):
        missing = outcome.notes.get("missing")
        missing_text = formats.MISSING if missing is None else formats.listed(missing) if missing else "none"
        return [
            ("NMI", Text(formats.index(scores.nmi), "bold")),
            ("Kappa", formats.index(scores.kappa)),
            ("Adjusted Rand", formats.index(scores.ari)),
            ("Accuracy", f"{formats.percent(scores.accuracy)} of records, with clusters matched to classes"),
            ("Clients missing", missing_text),
        ]
    if outcome.evaluate == "private":  # the only released scores
        noisy = [(label, f"{value} {note}") for label, value, note in released_metrics(outcome.estimates)]
        return [("Noisy mean accuracy", Text(formats.percent(outcome.accuracy), "bold")), *noisy]
    groups = scores.group_accuracy or ()
    rows: list[tuple[str, str | Text]] = [
        (formats.capitalised(of_metrics(scores).score_name), Text(formats.percent(scores.accuracy), "bold")),
        *((label, f"{value}; {note}") for label, value, note in named_metrics(scores)),
        ("Worst group", formats.percent(scores.worst_group_accuracy)),
        *([("Each group", ", ".join(map(formats.percent, groups)))] if len(groups) > 1 else []),
    ]
    if scores.personal_accuracy is not None:
        worst_group, worst = scores.personal_worst_group_accuracy, scores.personal_worst_client_accuracy
        text = (
            f"{formats.percent(scores.personal_accuracy)}, worst group {formats.percent(worst_group)}, worst client "
            f"{formats.percent(worst)}: models that clients fit to their own records and keep"
        )
        rows.append(("Personalised", text))
    if scores.groups_found is not None:
        rows.append(("Clusters found", formats.of_total(scores.groups_found, scores.groups)))
        rows.append(("Clustering accuracy", formats.percent(scores.clustering_accuracy)))
    return rows


def _privacy(certificate: Mapping[str, Any]) -> list[tuple[str, Text]]:
    unit = certificate.get("unit") or "none"
    reasons = "; ".join(map(str, certificate.get("reasons") or ()))
    if unit == "none":
        return [("Privacy", Text.assemble(("none, ε = ∞", "bold yellow"), reasons and f": {reasons}"))]
    loss, delta = formats.epsilon(certificate.get("epsilon")), formats.number(certificate.get("delta"))
    adjacency = certificate.get("adjacency") or f"per {unit}"
    shown = epsilon_observers(certificate)
    rows = [("Privacy", Text(f"ε = {loss if shown is None else formats.epsilon(shown)}, δ = {delta} ({adjacency})"))]
    if shown is not None:
        rows += [("", Text(f"ε = {loss} where nobody observes which clients take part"))]
    if (right := certificate.get(ODDS)) is not None and right < 1:
        rows += [("Attacker's guess", Text(f"right in at most {formats.of_100(right)} of 100 cases; chance 50"))]
    if certificate.get("certified"):
        return [*rows, ("Certified", Text("yes", "bold green"))]
    reasons = reasons or "no reason was recorded"
    return [*rows, ("Certified", Text.assemble(("no", "bold yellow"), f": {reasons}"))]
