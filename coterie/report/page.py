"""Self-contained HTML report of one or several runs, without scripts or external resources."""

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from coterie.files import FileError, open_regular
from coterie.privacy.certificate import ODDS, UNIT_COLUMN
from coterie.report import clustered_records as records
from coterie.report import formats, sites
from coterie.report.comparison import OUTSIDE, compare
from coterie.report.configuration import has_effect, shown_settings
from coterie.report.figures import accuracy_graphic, cluster_graphic, comparison_graphic, epsilon_graphic
from coterie.report.graphics import THEME, Data
from coterie.report.predictions import federation_pays, named_metrics, released_metrics, verdict
from coterie.report.runs import ReportError, Run, read_run
from coterie.report.sites import Site, read_sites, spread, standard_error
from coterie.report.template import PAGE

# Entries of a certificate that have places of their own.
_PROSE_KEYS = {
    *("unit", "certified", "reasons", "epsilon_participation_visible", "epsilon", "delta", "accountants", "charged"),
    *("composed", "covers", "outside", "public_inputs", "tuned_outside"),
}

_UNEVALUATED = "not evaluated; a site does, on its held-out records: coterie evaluate RUN FILE --held-out"
# Sites whose rows are not folded.
_WORST = 10


@dataclass(frozen=True)
class _Tile:
    label: str
    value: str
    note: str = ""
    badge: str = ""
    good: bool = True
    question: str = ""


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
    environment.globals |= {"fmt": formats, "records": records}
    several = len(runs) > 1
    comparison = compare(runs, damaged)
    heads, rows = comparison.cells()
    page = environment.from_string(PAGE).render(
        title=f"{len(runs)} runs compared" if several else f"{runs[0].strategy} · {runs[0].dataset}",
        theme=THEME,
        sections=[_section(run, f"run-{index}") for index, run in enumerate(runs, 1)],
        curves=comparison_graphic(comparison) if several else None,
        score=comparison.scores["accuracy"],
        clusters_records=all(run.clusters_records for run in runs),
        heads=heads,
        settings=len(comparison.settings),
        rows=rows,
        row_of={run.path: number for number, row in enumerate(comparison.rows) for run in row.runs},
        left_out=comparison.left_out,
        remarks=comparison.notes,
        outside=OUTSIDE if several and any(row.exact for row in comparison.rows) else "",
    )
    return page.lstrip()


def _section(run: Run, anchor: str) -> dict[str, Any]:
    run_sites = read_sites(run)
    personal = any(site.personal is not None for site in run_sites)
    heads = [each.name for each in fields(Site)][: None if personal else -1]
    total, directions = run.traffic, (("down", "from the server to clients"), ("up", "from clients to the server"))
    by_accuracy = sorted(run_sites, key=lambda site: (site.accuracy is None, site.accuracy or 0, site.client))
    charged = run.certificate.get("charged") or ()
    return {
        "run": run,
        "anchor": anchor,
        "summary": _summary(run),
        "status": _status(run),
        "glance": [_how_good(run), _how_fair(run, run_sites), _privacy_tile(run), _how_sure(run, run_sites)],
        "details": _scores(run) + _resources(run),
        "accuracy": None if run.clusters_records else accuracy_graphic(run),
        "clusters": None if run.clusters_records else cluster_graphic(run),
        "privacy": epsilon_graphic(run),
        "sites": run_sites,
        "worst": by_accuracy if len(run_sites) <= 2 * _WORST else by_accuracy[:_WORST],
        "clustered": run.clustered and any(site.cluster is not None for site in run_sites),
        "scored": any(site.accuracy is not None for site in run_sites),
        "site_sentence": _site_sentence(run, run_sites),
        "personal": personal,
        "site_data": Data("sites", heads, [astuple(site)[: len(heads)] for site in run_sites]),
        "guarantee": _guarantee(run),
        "traffic": [
            (label, f"{total[f'messages_{direction}']:,}", formats.size(total[f"bytes_{direction}"]))
            for direction, label in directions
            if total
        ],
        "facts": [
            *(
                (f"ε by {name}", formats.epsilon(value))
                for name, value in (run.certificate.get("accountants") or {}).items()
            ),
            *_pairs({key: value for key, value in run.certificate.items() if key not in _PROSE_KEYS}),
            *(
                ("charged" if len(charged) == 1 else f"charged ({number})", _charged(line))
                for number, line in enumerate(charged, 1)
            ),
        ],
        "public_inputs": _pairs(_with_effect(run, "public_inputs")),
        "tuned": _pairs(_with_effect(run, "tuned_outside")),
        "settings": shown_settings(run.config),
    }


def _charged(line: Mapping[str, Any]) -> str:
    rate, noise = formats.number(line["sampling_rate"]), formats.number(line["noise_multiplier"])
    text = f"{line['charges']} × {line['sampler']} at rate {rate}, noise {noise}"
    if slots := line.get("slots"):
        text += f", in {slots} slots; a client pays for the charges of its own slot"
    return text


def _with_effect(run: Run, entry: str) -> dict[str, Any]:
    """Return an entry of the certificate without settings that have no effect on the run."""
    values = run.certificate.get(entry) or {}
    return {
        name: value
        for name, value in values.items()
        if has_effect(run.config, name.replace("_", "-").rpartition(".")[2])
    }


def _pairs(values: Mapping[str, Any]) -> list[tuple[str, str]]:
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
        groups = run.scores.groups or 1
        hidden = f" in {groups} hidden groups" if groups > 1 and not run.clusters_records else ""
        parts.append(f"{formats.clients(config['clients'])}{hidden}")
    if run.clusters_records:
        parts += [f"{config['clusters']} clusters of records"] if "clusters" in config else []
        kind, _, level = config.get("label-skew", "none").partition(":")
        parts += [f"non-IID level {formats.number(float(level))}"] if kind == "non-iid" else []
    elif "clusters" in config:
        models = config["clusters"]
        parts.append(f"{models} model{'' if models == 1 else 's'}" if models else "one model per detected group")
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
    if run.unit == "none":
        return "not private"
    if not run.finished:
        return "not certified yet"
    return "certified" if run.certified else "not certified"


def _how_good(run: Run) -> _Tile:
    scores = run.scores
    outside = "outside the guarantee" if run.exact else ""
    look: dict[str, Any] = {"badge": outside, "good": False, "question": "How good?"}
    if run.clusters_records:
        note = "normalised mutual information of clusters and classes"
        return _Tile("NMI", formats.index(scores.nmi), note, **look)
    value = formats.percent(scores.accuracy)
    name = formats.capitalised(run.score_name)
    if warning := verdict(scores):
        return _Tile(name, value, warning, "not better than a constant", good=False, question="How good?")
    if run.noisy:
        if run.unit == "record":
            return _Tile("Noisy accuracy", value, "of held-out records of all clients; ε covers this release", **look)
        note = "mean over all clients, each with its own model; ε covers this release"
        return _Tile("Noisy mean accuracy", value, note, **look)
    sampled = scores.evaluated_clients
    of = f"{sampled} clients, drawn at random" if sampled else "clients"
    note = f"mean over {of}, each with its own model" if scores.accuracy is not None else _UNEVALUATED
    return _Tile(name, value, note, **look)


def _how_fair(run: Run, run_sites: Sequence[Site]) -> _Tile:
    disparity = spread(run, run_sites)
    if disparity is None:
        why = (
            "only the mean over all clients is released"
            if run.noisy
            else "no accuracy of parts of the clients is known"
        )
        return _Tile("Disparity", formats.MISSING, why, question="How fair?")
    parts = filter(None, (disparity.worst, sites.describe(disparity)))
    outside = "outside the guarantee" if run.exact else ""
    value = formats.percent(disparity.lowest)
    return _Tile(f"Worst {disparity.part}", value, "; ".join(parts), outside, good=False, question="How fair?")


def _how_sure(run: Run, run_sites: Sequence[Site]) -> _Tile:
    again = "the spread over seeds is unknown; coterie sweep measures it"
    error = standard_error(run_sites)
    if run.noisy and run.unit == "client" and (noise := run.config.get("evaluate-noise")):
        note = f"standard deviation of the noise on the accuracy; one run: {again}"
        return _Tile("Noise", _plus_minus(noise), note, question="How sure?")
    if error is not None and not run.noisy:
        many = sum(site.accuracy is not None for site in run_sites)
        note = f"of the mean {run.score_name} over {many} sites; one run: {again}"
        outside = "outside the guarantee" if run.exact else ""
        return _Tile("Standard error", _plus_minus(error), note, outside, good=False, question="How sure?")
    sampled, total = run.scores.evaluated_clients, run.config.get("clients")
    of = f"{sampled} of {total} clients evaluated; " if sampled and total else ""
    return _Tile("Repetitions", "1 run", of + again, question="How sure?")


def _plus_minus(share: float) -> str:
    return f"±{formats.NBSP}{100 * share:.2g}{formats.NBSP}points"


def _site_sentence(run: Run, run_sites: Sequence[Site]) -> str:
    sizes = Counter(site.cluster for site in run_sites if site.cluster is not None and run.clustered)
    parts = [f"cluster {cluster} has {formats.clients(size)}" for cluster, size in sorted(sizes.items())]
    sentences = [f"{len(run_sites)} sites"] + ([f"{', '.join(parts)}"] if 0 < len(parts) <= _WORST else [])
    disparity = spread(run, run_sites)
    if disparity is not None and disparity.part == "site":
        sentences.append(
            f"worst: {disparity.worst} with {formats.percent(disparity.lowest)}; {sites.describe(disparity)}"
        )
        if len(run_sites) > 2 * _WORST:
            sentences.append(f"the {_WORST} worst are listed")
    elif run.exact and run.certified and all(site.accuracy is None for site in run_sites):
        sentences.append("a certified run keeps no accuracy of single sites")
    return ". ".join(text[0].upper() + text[1:] for text in sentences) + "."


def _scores(run: Run) -> list[_Tile]:
    scores = run.scores
    if run.clusters_records:
        return [
            _Tile("Kappa", formats.index(scores.kappa), "chance-corrected agreement after matching"),
            _Tile("Adjusted Rand", formats.index(scores.ari), "chance-corrected agreement on pairs of records"),
            _Tile("Accuracy", formats.percent(scores.accuracy), "share of records, clusters matched to classes"),
        ]
    outside = "outside the guarantee" if run.exact else ""
    own = [_Tile(*metric, outside, good=False) for metric in named_metrics(scores)]
    own += [_Tile(*metric) for metric in released_metrics(run.outcome.estimates)]
    if scores.personal_accuracy is not None:
        worst_group, worst = scores.personal_worst_group_accuracy, scores.personal_worst_client_accuracy
        note = (
            f"each client fits the model to its own records ({run.config.get('personalize')}) and sends nothing of "
            f"it; worst group {formats.percent(worst_group)}, worst client {formats.percent(worst)}"
        )
        own.append(_Tile("Personalised", formats.percent(scores.personal_accuracy), note, outside, good=False))
    if (paid := federation_pays(scores)) is not None:
        answer, _, why = paid[1].partition(": ")
        own.append(_Tile("Does federation pay here?", answer, why, outside, good=False))
    if run.noisy or not run.clustered or scores.groups_found is None:
        return own
    matched = scores.clustering_accuracy
    return [
        *own,
        _Tile(
            "Clusters found",
            formats.of_total(scores.groups_found, scores.groups),
            "" if matched is None else f"{formats.percent(matched)} of clients assigned correctly",
        ),
    ]


def _resources(run: Run) -> list[_Tile]:
    """Return the tiles of time, traffic and participation, which the guarantee does not cover."""
    outcome, notes, traffic = run.outcome, run.notes, run.traffic
    if not run.clusters_records:
        training = outcome.seconds_training
        rounds, per_round = formats.number(outcome.rounds), formats.duration(outcome.seconds_per_round)
        return [
            _Tile(
                "Training time",
                formats.duration(outcome.seconds_total if training is None else training),
                f"{rounds} rounds, {per_round} each",
            )
        ]
    points, missing = notes.get("points"), notes.get("missing") or []
    note = f"missing: {formats.listed(missing)}" if missing else "" if points is None else "none missing"
    return [
        _Tile("Replies", formats.of_total(None if points is None else len(points), run.config.get("clients")), note),
        _Tile("Time", formats.duration(outcome.seconds_total), "one round, including labelling"),
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
    shown = run.epsilon_observers
    notes += [] if shown is None else [f"ε = {formats.epsilon(run.epsilon)} where participation is secret"]
    note = ", ".join(notes) or "privacy is disabled"
    reasons = run.certificate.get("reasons")
    if reasons and run.finished and not run.certified and run.unit != "none":
        note += f"; {reasons[0]}"
    loss = formats.epsilon(run.epsilon if shown is None else shown)
    return _Tile("Privacy loss ε", loss, note, _status(run), run.certified, "How private?")


def _odds(run: Run) -> list[str]:
    """Return what ε means to an attacker, and how to check it."""
    right = run.certificate.get(ODDS)
    if right is None:
        return []
    seen = " and who takes part" if run.unit == "client" else ""
    column = (run.certificate.get("public_inputs") or {}).get(UNIT_COLUMN)
    one = f"one {run.unit}" if column is None else f"one {column!r} with all records"
    return [
        f"In other words: somebody who knows all other data, sees all that is published{seen}, and guesses whether "
        f"{one} took part, as likely as not, is right in at most {formats.of_100(right)} of 100 cases; blind "
        f"guesses are right in 50. Anyone can derive this from the ledger: coterie privacy check "
        f"{run.name}."
    ]


def _guarantee(run: Run) -> list[str]:
    """Describe the certificate in plain language, one string per paragraph."""
    if run.unit == "none":
        return [
            "This run provides no privacy guarantee (ε = ∞): its models are exact functions of the clients' data and "
            "may reveal information about any client."
        ]
    shown = run.epsilon_observers
    guaranteed = run.epsilon if shown is None else shown
    loss, delta = formats.epsilon(guaranteed), formats.number(run.delta)
    if not run.finished:
        paragraphs = [f"The run is not finished. It has spent ε = {loss} so far; the certificate is issued at the end."]
    elif not run.certified:
        paragraphs = [f"The accountant reports ε = {loss} at δ = {delta}, but the guarantee is not certified."]
    elif math.isinf(guaranteed):
        paragraphs = ["The certificate gives no bound: ε = ∞."]
    else:
        column = (run.certificate.get("public_inputs") or {}).get(UNIT_COLUMN)
        record = "one training record" if column is None else f"all training records with one value of {column!r}"
        one = {"client": "one client with all of its data", "record": record}
        factor = formats.number(float(f"{math.exp(min(guaranteed, 700.0)):.2g}"))
        change = "removing or replacing" if run.certificate.get("sampler") == "fixed" else "removing"
        if run.certificate.get("mechanism") in ("banded", "secure"):
            change = "leaving out all contributions of"
        paragraphs = [
            f"This run satisfies {run.unit}-level differential privacy with ε = {loss} at δ = {delta}.",
            f"For every set of published outcomes, {change} {one.get(run.unit, f'one {run.unit}')} changes the "
            f"probability by a factor of at most e^ε ≈ {factor}, up to an additive δ = {delta}.",
            *_odds(run),
        ]
    visible = run.certificate.get("epsilon_participation_visible")
    if not run.finished or (visible is None and shown is None):
        return paragraphs
    if run.unit == "record":
        if visible is not None and visible >= run.epsilon:  # less only where a loose bound made epsilon
            paragraphs.append(
                "This assumes that the adversary does not observe the records of each batch. Against an adversary who "
                f"does, ε = {formats.epsilon(visible)}."
            )
    elif shown is None:
        paragraphs.append(
            "This holds even if the adversary observes who takes part. It does not hide whether a client replies, "
            "which must not depend on its data."
        )
        if run.certificate.get("mechanism") == "secure":
            paragraphs.append(
                "It holds against the server as well, which learns sums with this noise alone. This assumes that "
                "enough clients of every round are honest, and that nobody breaks the cryptography."
            )
    else:
        paragraphs.append(
            "This holds even if the adversary observes who takes part, as messages on the network show. Against an "
            f"adversary who does not, ε = {formats.epsilon(run.epsilon)}."
        )
    return paragraphs
