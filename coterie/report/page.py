"""Self-contained HTML report of one or several runs, without scripts or external resources."""

import io
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from coterie.files import FileError, open_regular
from coterie.report import formats, records
from coterie.report.comparison import OUTSIDE, compare
from coterie.report.evidence import leaves, read_pairs, similarity_files, split_rounds
from coterie.report.evidence_plots import distance_figure, similarity_figure, tree_figure
from coterie.report.plots import accuracy_figure, cluster_figure, comparison_figure, run_style
from coterie.report.runs import ReportError, Run, read_run
from coterie.report.template import PAGE

_PROSE_KEYS = {
    "unit",
    "certified",
    "reasons",
    "epsilon",
    "delta",
    "accountants",
    "epsilon_participation_visible",
    "charged",
    "covers",
    "outside",
    "public_inputs",
    "tuned_outside",
}


_MAX_MATRICES = 12


@dataclass(frozen=True)
class _Tile:
    label: str
    value: str
    note: str = ""
    badge: str = ""
    good: bool = True


@dataclass(frozen=True)
class _Section:
    """One run as the template shows it."""

    run: Run
    anchor: str
    summary: str
    status: str
    scores: list[_Tile]
    privacy: list[_Tile]
    resources: list[_Tile]
    accuracy: Markup | None
    clusters: Markup | None
    evidence: list[tuple[Markup, str]]
    unreadable: list[str]
    reseeded: int
    guarantee: list[str]
    traffic: list[tuple[str, str, str]]
    facts: list[tuple[str, str]]
    public_inputs: list[tuple[str, str]]
    tuned: list[tuple[str, str]]


def write_report(runs: Sequence[Path | str | Run], out: Path | str, damaged: Sequence[tuple[str, str]] = ()) -> Path:
    """Write a self-contained HTML page about `runs` to `out` and return its path.

    With several runs, a comparison precedes the sections of the runs in the given order. If `out` is an existing
    folder, the page is written to `report.html` in it.

    Raises:
        ReportError: there are no runs, or a path is not a run folder.
    """
    loaded = [run if isinstance(run, Run) else read_run(run) for run in runs]
    if not loaded:
        raise ReportError("no runs given; give at least one run folder")
    out = Path(out)
    if out.is_dir():
        out = out / "report.html"
    page = _render(loaded, damaged)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(open_regular(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
            file.write(page.encode())
    except FileError as error:
        raise ReportError(f"{error}; choose another --out") from None
    except OSError as error:
        raise ReportError(f"{out} cannot be written: {error.strerror or error}; choose another --out") from None
    return out


def _render(runs: Sequence[Run], damaged: Sequence[tuple[str, str]]) -> str:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.globals["fmt"] = formats
    several = len(runs) > 1
    comparison = compare(runs, damaged)
    heads, rows = comparison.cells()
    clusters_records = all(run.clusters_records for run in runs)
    evaluated = several and not clusters_records and any(r.accuracy is not None for run in runs for r in run.rounds)
    return environment.from_string(PAGE).render(
        title=f"{len(runs)} runs compared" if several else f"{runs[0].strategy} · {runs[0].dataset}",
        sections=[_section(run, f"run-{index}") for index, run in enumerate(runs, 1)],
        curves=_svg(comparison_figure(runs), "comparison", "Mean accuracy of each run") if evaluated else None,
        clusters_records=clusters_records,
        records=records,
        colours=[run_style(index)[0] for index in range(len(runs))],
        heads=heads,
        settings=len(comparison.settings),
        rows=rows,
        left_out=comparison.left_out,
        remarks=comparison.notes,
        outside=OUTSIDE if several and any(row.exact for row in comparison.rows) else "",
    )


def _section(run: Run, anchor: str) -> _Section:
    evaluated = any(r.accuracy is not None for r in run.rounds) and not run.clusters_records
    released = any(r.histogram is not None for r in run.rounds)
    evidence, unreadable = _points(run, anchor) if run.clusters_records else _evidence(run, anchor)
    return _Section(
        run=run,
        anchor=anchor,
        summary=_summary(run),
        status=_status(run),
        scores=_scores(run),
        privacy=[_privacy_tile(run)],
        resources=_resources(run),
        accuracy=_svg(accuracy_figure(run), f"{anchor}-accuracy", "Accuracy by round") if evaluated else None,
        clusters=_svg(cluster_figure(run), f"{anchor}-clusters", "Cluster sizes by round") if released else None,
        evidence=evidence,
        unreadable=unreadable,
        reseeded=sum(len(r.reseeded) for r in run.rounds),
        guarantee=_guarantee(run),
        traffic=_traffic(run),
        facts=_facts(run.certificate),
        public_inputs=_pairs(run.certificate.get("public_inputs") or {}),
        tuned=_pairs(run.certificate.get("tuned_outside") or {}),
    )


def _points(run: Run, anchor: str) -> tuple[list[tuple[Markup, str]], list[str]]:
    """Return figures of the clustered points with captions, and the files that could not be read."""
    drawn, unreadable = records.point_figures(run)
    return [
        (_svg(each.figure, f"{anchor}-points-{number}", each.title), each.caption) for number, each in enumerate(drawn)
    ], unreadable


def _traffic(run: Run) -> list[tuple[str, str, str]]:
    """Return direction, messages and bytes; empty if traffic was not recorded."""
    total = run.traffic
    if not total:
        return []
    directions = (("down", "from the server to clients"), ("up", "from clients to the server"))
    return [
        (label, f"{total[f'messages_{direction}']:,}", formats.size(total[f"bytes_{direction}"]))
        for direction, label in directions
    ]


def _evidence(run: Run, anchor: str) -> tuple[list[tuple[Markup, str]], list[str]]:
    """Return figures of the clustering evidence with captions, and the files that could not be read."""
    drawn: list[tuple[Markup, str]] = []
    unreadable = []
    path = run.path / "evidence" / "distances.npz"
    if (distances := read_pairs(path)) is not None:
        caption = (
            "Pairwise distances between clients; dark means close. Lines separate clusters, within which distances "
            "should be small. The diagonal is omitted."
        )
        name = "Distances between clients"
        drawn.append((_svg(distance_figure(distances), f"{anchor}-distances", name), caption))
    elif path.exists():
        unreadable.append(path.name)
    tree = run.tree
    if tree:
        last = max([1] + [r.number for r in run.rounds] + [node.ended or node.born for node in tree])
        caption = (
            "The tree of splits, with one line per cluster, whose width is proportional to its number of clients. A "
            "ring marks a split, with the maximum similarity between the two halves; a square marks a stationary "
            "cluster, whose model no longer changes."
        )
        drawn.append((_svg(tree_figure(tree, last), f"{anchor}-tree", "Splits by round"), caption))
    files = similarity_files(run.path)
    at = [number for number in files if number in split_rounds(tree) or number == max(files)]
    at = at if len(at) <= _MAX_MATRICES else [*at[: _MAX_MATRICES - 1], at[-1]]
    read = {number: read_pairs(files[number]) for number in at}
    unreadable += [files[number].name for number, pairs in read.items() if pairs is None]
    matrices = {number: pairs for number, pairs in read.items() if pairs is not None}
    if matrices:
        found = [client for leaf in leaves(tree) for client in sorted(leaf.clients)]
        order = found or matrices[max(matrices)].ordered().clients.tolist()
        caption = (
            "Pairwise cosine similarity of client updates, in the rounds with splits and in the last one. Clients are "
            "ordered by their final cluster. Grey pairs were not compared: the clients were already in different "
            "clusters, or one of them did not reply."
        )
        name = "Similarities between clients"
        drawn.append((_svg(similarity_figure(matrices, order), f"{anchor}-similarities", name), caption))
    return drawn, unreadable


def _facts(certificate: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the certificate table: ε per accountant, charges, and other facts."""
    charged = certificate.get("charged") or ()
    return [
        *((f"ε by {name}", formats.epsilon(value)) for name, value in (certificate.get("accountants") or {}).items()),
        *_pairs({key: value for key, value in certificate.items() if key not in _PROSE_KEYS}),
        *(
            (
                "charged" if len(charged) == 1 else f"charged ({number})",
                f"{line['charges']} × {line['sampler']} at rate {formats.number(line['sampling_rate'])}, "
                f"noise {formats.number(line['noise_multiplier'])}",
            )
            for number, line in enumerate(charged, 1)
        ),
    ]


def _pairs(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return formatted names and values; null values are omitted."""
    return [
        (key.replace("_", " "), formats.number(value) if type(value) in (int, float) else formats.setting(value))
        for key, value in values.items()
        if value is not None
    ]


def _summary(run: Run) -> str:
    """Summarise strategy, data and training in one line without dates."""
    config = run.config
    parts = []
    if "clients" in config:
        groups = run.outcome.get("groups")
        hidden = f" in {groups} hidden groups" if groups and not run.clusters_records else ""
        parts.append(f"{config['clients']} clients{hidden}")
    if run.clusters_records:
        parts += [f"{config['clusters']} clusters of records"] if "clusters" in config else []
        level = config.get("non-iid-level", -1)
        parts += [] if level == -1 else [f"non-IID level {formats.number(level)}"]
    elif "clusters" in config:
        parts.append(f"{config['clusters']} models" if config["clusters"] else "one model per detected group")
    if run.clusters_records:
        parts.append("one round")
    elif "rounds" in config:
        rate = f" at sampling rate {config['sampling-rate']}" if "sampling-rate" in config else ""
        parts.append(f"{config['rounds']} rounds{rate}")
    if run.unit == "none":
        parts.append("no privacy")
    else:
        mechanism = "dp-sgd" if run.unit == "record" else config.get("mechanism")
        parts.append(f"{run.unit}-level privacy" + (f" ({mechanism})" if mechanism else ""))
    return ", ".join(parts)


def _status(run: Run) -> str:
    """Return the text of the badge."""
    if run.unit == "none":
        return "not private"
    if not run.finished:
        return "not certified yet"
    return "certified" if run.certified else "not certified"


def _scores(run: Run) -> list[_Tile]:
    """Return the score tiles: exact diagnostics, or a noisy accuracy."""
    outcome = run.outcome
    if run.clusters_records:
        return [
            _Tile("NMI", formats.index(outcome["nmi"]), "normalised mutual information of clusters and classes"),
            _Tile("Kappa", formats.index(outcome["kappa"]), "chance-corrected agreement after matching"),
            _Tile("Adjusted Rand", formats.index(outcome["ari"]), "chance-corrected agreement on pairs of records"),
            _Tile("Accuracy", formats.percent(outcome["accuracy"]), "share of records, clusters matched to classes"),
        ]
    if run.noisy:
        note = "mean over all clients, each with its own model; ε covers this release"
        return [_Tile("Noisy mean accuracy", formats.percent(outcome["accuracy"]), note)]
    groups = [
        (accuracy, group) for group, accuracy in enumerate(outcome["group_accuracy"] or ()) if accuracy is not None
    ]
    matched, sampled = outcome["clustering_accuracy"], outcome["evaluated_clients"]
    of = f"{sampled} clients, drawn at random" if sampled else "clients"
    return [
        _Tile("Accuracy", formats.percent(outcome["accuracy"]), f"mean over {of}, each with its own model"),
        _Tile(
            "Worst group", formats.percent(outcome["worst_group_accuracy"]), f"group {min(groups)[1]}" if groups else ""
        ),
        _Tile(
            "Clusters found",
            formats.of_total(outcome["groups_found"], outcome["groups"]),
            "" if matched is None else f"{formats.percent(matched)} of clients assigned correctly",
        ),
    ]


def _resources(run: Run) -> list[_Tile]:
    """Return the tiles of time, traffic and participation, which the guarantee does not cover."""
    outcome, notes, traffic = run.outcome, run.notes, run.traffic
    if not run.clusters_records:
        training = outcome["seconds_training"]
        rounds, each = formats.number(outcome["rounds"]), formats.duration(outcome["seconds_per_round"])
        return [
            _Tile(
                "Training time",
                formats.duration(outcome["seconds_total"] if training is None else training),
                f"{rounds} rounds, {each} each",
            )
        ]
    points, missing = notes.get("points"), notes.get("missing") or []
    note = f"missing: {formats.listed(missing)}" if missing else "" if points is None else "none missing"
    return [
        _Tile("Replies", formats.of_total(None if points is None else len(points), run.config.get("clients")), note),
        _Tile("Time", formats.duration(outcome["seconds_total"]), "one round, including labelling"),
        *(
            [_Tile("Upload", formats.size(traffic["bytes_up"]), f"download: {formats.size(traffic['bytes_down'])}")]
            if traffic
            else []
        ),
    ]


def _privacy_tile(run: Run) -> _Tile:
    notes = []
    if run.unit != "none":
        notes += [] if run.finished else ["spent so far"]
        notes += [] if run.delta is None else [f"δ = {formats.number(run.delta)}"]
        notes += [f"per {run.unit}"]
    note = ", ".join(notes) or "privacy is disabled"
    reasons = run.certificate.get("reasons")
    if reasons and run.finished and not run.certified and run.unit != "none":
        note += f"; {reasons[0]}"
    return _Tile("Privacy loss ε", formats.epsilon(run.epsilon), note, _status(run), run.certified)


def _guarantee(run: Run) -> list[str]:
    """Describe the certificate in plain language, one string per paragraph."""
    if run.unit == "none":
        return [
            "This run provides no privacy guarantee (ε = ∞): its models are exact functions of the clients' data and "
            "may reveal information about any client."
        ]
    loss, delta = formats.epsilon(run.epsilon), formats.number(run.delta)
    if not run.finished:
        paragraphs = [f"The run is not finished. It has spent ε = {loss} so far; the certificate is issued at the end."]
    elif not run.certified:
        paragraphs = [f"The accountant reports ε = {loss} at δ = {delta}, but the guarantee is not certified."]
    elif math.isinf(run.epsilon):
        paragraphs = ["The certificate gives no bound: ε = ∞."]
    else:
        one = {"client": "one client with all of its data", "record": "one training record"}
        factor = formats.number(float(f"{math.exp(min(run.epsilon, 700.0)):.2g}"))
        change = "removing or replacing" if run.certificate.get("sampler") == "fixed" else "removing"
        paragraphs = [
            f"This run satisfies {run.unit}-level differential privacy with ε = {loss} at δ = {delta}.",
            f"For every set of published outcomes, {change} {one.get(run.unit, f'one {run.unit}')} changes the "
            f"probability by a factor of at most e^ε ≈ {factor}, up to an additive δ = {delta}.",
        ]
    visible = run.certificate.get("epsilon_participation_visible")
    hidden = "the records of each batch" if run.unit == "record" else "the cohort of each round"
    if visible is not None and run.finished and visible >= run.epsilon:  # less only where a loose bound made epsilon
        paragraphs.append(
            f"This assumes that the adversary does not observe {hidden}. Against an adversary who does, "
            f"ε = {formats.epsilon(visible)}."
        )
    return paragraphs


def _svg(figure: Figure, name: str, description: str) -> Markup:
    """Render the figure as scalable inline SVG; `name` makes its ids unique on the page."""
    target = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(target, format="svg", metadata={"Date": None})
    svg = target.getvalue()
    svg = svg[svg.index("<svg") :]
    # Inline SVG needs no metadata or namespace, and a style sheet inside it would reach the whole page.
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, count=1, flags=re.DOTALL)
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, count=1, flags=re.DOTALL)
    svg = svg.replace("xlink:href=", "href=")
    svg = re.sub(r'(\bid="|\bhref="#|\burl\(#)', rf"\g<1>{name}-", svg)
    view_box = re.search(r'viewBox="[\d. ]+"', svg)
    assert view_box is not None, "matplotlib's SVG has a viewBox"
    head = f'<svg {view_box.group()} role="img" aria-label="{description}">'
    return Markup(re.sub(r"<svg[^>]*>", head, svg, count=1).strip())
