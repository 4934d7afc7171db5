"""Run folders in, pages, figures and tables out; the folders are made up and small."""

import csv
import html
import io
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from kit.tables import for_rows
from matplotlib.figure import Figure
from rich.console import Console

from coterie.privacy import Banded, RRSlot, certificate
from coterie.report import formats, graphics
from coterie.report.figures import accuracy_graphic, cluster_graphic, epsilon_graphic
from coterie.report.graphics import THEME
from coterie.report.page import write_report
from coterie.report.plots import save_figure
from coterie.report.result_table import result_table
from coterie.report.runs import ReportError, read_run
from coterie.report.sites import read_sites
from coterie.results import Diagnostics, Outcome

CERTIFICATE: dict[str, Any] = {"unit": "client", "adjacency": "add/remove one client", "mechanism": "joint"}
CERTIFICATE |= {"certified": True, "reasons": [], "epsilon": 7.993, "epsilon_budget": 8.0, "delta": 2e-5}
CERTIFICATE |= {"epsilon_participation_visible": 24.61, "sampler": "poisson", "rounds": 4, "charges": 4}
CERTIFICATE |= {"charged": [{"sampler": "poisson", "sampling_rate": 0.2, "noise_multiplier": 1.0825, "charges": 4}]}
CERTIFICATE |= {"accountant": "dp-accounting 0.6.0, PLD", "accountants": {"pld": 7.993, "rdp": 9.4321}}
CERTIFICATE |= {"outside": ["Hyperparameters were chosen on other runs."]}
CERTIFICATE |= {"public_inputs": {"clients": 500, "clusters": 3, "noise_multiplier_counts": None}}
CERTIFICATE |= {"tuned_outside": {"lr": 0.25, "model": "mlp-32"}}
RESULT: dict[str, Any] = {"strategy": "ifca", "dataset": "digits", "seed": None, "accuracy": 0.8124}
RESULT |= {"worst_group_accuracy": 0.7312, "group_accuracy": [0.8936, 0.7312], "clustering_accuracy": 0.9876}
RESULT |= {"groups_found": 1, "groups": 2, "epsilon": 7.993, "delta": 2e-5, "certified": True, "rounds": 4}
RESULT |= {"seconds_total": 250.0, "seconds_training": 200.0, "seconds_per_round": 50.0, "peak_rss_mb": 512.4}
WITHOUT_PRIVACY = {"unit": "none", "certified": False, "reasons": ["privacy-unit = none"], "epsilon": None}


def metrics(number: int, **changes: Any) -> dict[str, Any]:
    line = {"round": number, "seconds": 0.5, "epsilon": 2.0 * number - 0.007, "histogram": [60.5, -1.25, 38.0]}
    scores = {"accuracy": 0.2 * number, "worst_group_accuracy": 0.1 * number, "clustering_accuracy": 0.75}
    scores |= {"group_accuracy": [0.1 * number, 0.24 * number], "groups_found": 1}
    scores = scores if number % 2 == 0 else dict.fromkeys(scores)
    return {**line, **scores, "reseeded": [[0, 1]] if number == 2 else [], **changes}


EXACT = ("accuracy", "worst_group_accuracy", "group_accuracy", "clustering_accuracy", "groups_found", "groups")
EXACT += ("rmse", "baseline_rmse")


def split(document: dict[str, Any], noisy: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is released, and the exact scores."""
    exact = [key for key in EXACT if key in document and not (noisy and key == "accuracy")]
    return {key: value for key, value in document.items() if key not in exact}, {key: document[key] for key in exact}


def outcome(result: dict[str, Any]) -> Outcome:
    """As ``coterie run`` passes it to the table."""
    released, exact = split(result)
    return replace(
        Outcome.from_json(released), diagnostics=Diagnostics.from_json(exact) if any(exact.values()) else None
    )


def make_run(
    folder: Path,
    strategy: str = "ifca",
    lines: list[dict[str, Any]] | None = None,
    torn: str = "",
    certificate: dict[str, Any] | None = CERTIFICATE,
    result: dict[str, Any] | None = RESULT,
    noisy: bool = False,
) -> Path:
    """``noisy``: the accuracy is a private release."""
    folder.mkdir()
    unit = certificate["unit"] if certificate else "client"
    (folder / "config.toml").write_text(
        f"[config]\nstrategy = {json.dumps(strategy)}\ndataset = 'digits'\nclients = 500\ngroups = '2:1'\n"
        f"clusters = 3\nrounds = 4\nsampling-rate = 0.2\nprivacy-unit = '{unit}'\nmechanism = 'joint'\n"
        "epsilon = 8.0\ndelta = 'auto'\n[versions]\nflwr = '1.39.0'\n[machine]\ngit-commit = 'abc1234'\n"
    )
    lines = [metrics(number) for number in (1, 2, 3, 4)] if lines is None else lines
    divided = [split(line, noisy) for line in lines]
    evaluated = [{"round": line["round"], **exact} for line, exact in divided if any(exact.values())]
    (folder / "diagnostics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in evaluated))
    lines = [line for line, _ in divided]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + torn)
    if certificate is not None:
        (folder / "privacy.json").write_text(json.dumps(certificate))
    if result is not None:
        released, exact = split(result, noisy)
        (folder / "result.json").write_text(json.dumps(released))
        if any(exact.values()):
            (folder / "diagnostics.json").write_text(json.dumps(exact))
    return folder


def amend(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def edit(file: Path, old: str, new: str) -> None:
    file.write_text(file.read_text().replace(old, new))


def page(*runs: Path, drawn: bool = False) -> str:
    """The page; figures are empty unless ``drawn``, since their text takes most of the time."""
    with pytest.MonkeyPatch.context() as patched:
        if not drawn:
            patched.setattr(graphics, "svg", lambda figure, name, description: "<svg></svg>")
        return write_report(runs, runs[0].parent / "report.html").read_text(encoding="utf-8")


def assert_shown(text: str, *values: str) -> None:
    assert [value for value in values if value not in text] == []


def words(html: str) -> str:
    """The text of the page outside of figures, with every run of white space as one space."""
    html = re.sub(r"<(style|svg).*?</\1>", " ", html, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", html).replace(formats.NBSP, " ").split())


def downloads(html: str) -> dict[str, list[list[str]]]:
    """Rows of the files on the page, by name."""
    return {
        name: list(csv.reader(unquote(target.partition(",")[2]).splitlines()))
        for name, target in re.findall(r'<a download="([^"]+)" href="([^"]+)"', html)
    }


def shown(result: Outcome, certificate: dict[str, Any]) -> str:
    console = Console(width=200, file=io.StringIO(), color_system=None)
    with console.capture() as capture:
        console.print(result_table(result, certificate))
    return capture.get().replace(formats.NBSP, " ")


def test_a_finished_run_is_read_as_written(tmp_path):
    run = read_run(make_run(tmp_path / "demo"))
    assert (run.name, run.strategy, run.dataset) == ("demo", "ifca", "digits")
    assert run.finished
    assert run.certified
    assert (run.epsilon, run.delta) == (7.993, 2e-5)
    assert run.rounds[1].reseeded == ((0, 1),)
    assert run.rounds[1].scores.group_accuracy == pytest.approx((0.2, 0.48))
    assert run.rounds[2].mean_accuracy is None
    assert run.scores.accuracy == 0.8124
    assert run.result == outcome(RESULT)
    assert run.result.accuracy is None
    assert run.machine == {"git-commit": "abc1234"}


def test_a_folder_of_an_earlier_version_is_refused(tmp_path):
    folder = make_run(tmp_path / "old")
    edit(folder / "config.toml", "flwr =", "coterie = '0.1.0'\nflwr =")
    with pytest.raises(ReportError, match=r"old was written by Coterie 0\.1\.0; this version reads folders of 0\.2"):
        read_run(folder)


def test_exact_scores_stand_apart_from_what_epsilon_covers(tmp_path):
    text = words(page(make_run(tmp_path / "demo")))
    glance, _, rest = text.partition("Exact diagnostics: outside the guarantee")
    exact, _, released = rest.partition("Released and charged")
    assert "do not publish them with the models" in exact
    assert "How private? Privacy loss ε 24.61 ✓ certified" in glance
    assert_shown(glance, *(f"{value} ! outside the guarantee" for value in ("Accuracy 81.2 %", "Worst group 73.1 %")))
    assert_shown(released, "Released noisy size of each cluster", "Cumulative privacy loss ε")
    values = ("1 of 2 98.8 %", "Held-out accuracy", "3 min 20 s")
    assert_shown(exact, *values)
    assert not [value for value in values if value in released + glance]
    quiet, plain = private_run(tmp_path / "quiet"), make_run(tmp_path / "plain", certificate=WITHOUT_PRIVACY)
    for folder in (quiet, plain):  # nothing exact, and nothing guaranteed
        text = words(page(folder))
        before = text.replace("Tuned outside the guarantee", "").lower().partition("how sure")[0]
        assert "outside the guarantee" not in before
        assert "Released and charged" not in text
        assert "Exact diagnostics" not in text
    note = "without noise: outside the guarantee"
    assert note in words(page(make_run(tmp_path / "a"), make_run(tmp_path / "b")))
    assert note not in words(page(quiet, plain))


def test_an_unfinished_run_is_read_as_far_as_it_got(tmp_path):
    lines = [metrics(1), metrics(2), metrics(3)]
    folder = make_run(tmp_path / "cut", lines=lines, torn='{"round": 4, "acc', certificate=None, result=None)
    run = read_run(folder)
    assert (run.finished, run.certified, run.unreadable_lines) == (False, False, 1)
    assert (run.epsilon, run.scores.accuracy) == (pytest.approx(5.993), pytest.approx(0.4))
    assert (run.outcome.rounds, run.scores.groups) == (3, 2)
    unread = "1 unreadable line of metrics.jsonl or diagnostics.jsonl was skipped."
    assert_shown(words(page(folder)), "This run is unfinished: 3 of 4 rounds.", unread, "not certified yet", "40.0 %")
    with (folder / "diagnostics.jsonl").open("a") as file:  # scores of rounds that were cut short are left out
        file.write('{"round": 4, "accuracy": 0.9}\n{"round": 6, "acc')
    run = read_run(folder)
    assert ([r.round for r in run.rounds], run.unreadable_lines, run.scores.accuracy) == ([1, 2, 3], 2, 0.4)
    early = read_run(make_run(tmp_path / "early", lines=[metrics(1)], result=None))  # its certificate is there already
    assert (early.certified, early.epsilon) == (False, pytest.approx(1.993))
    new = make_run(tmp_path / "new", lines=[], certificate=None, result=None)
    (new / "config.toml").write_text("[config]\nstrategy = 'cfl'\n")
    assert_shown(words(page(new)), "No round was evaluated", "This run released no cluster sizes")


def test_a_repeated_round_counts_once_with_its_last_line(tmp_path):
    lines = [metrics(1), metrics(2), metrics(2, accuracy=0.9), metrics(3)]
    rounds = read_run(make_run(tmp_path / "resumed", lines=lines)).rounds
    assert [(r.round, r.mean_accuracy) for r in rounds] == [(1, None), (2, 0.9), (3, None)]


@for_rows(
    ("files", "message"),
    [
        (None, "does not exist"),
        ({}, "has no config.toml"),
        ({"config.toml": "strategy = 'ifca'"}, r"no \[config\] table"),
        ({"config.toml": "[config"}, "not valid TOML"),
        ({"config.toml": "[config]", "result.json": "{"}, "not valid JSON"),
        ({"config.toml": "[config]", "privacy.json": "[]"}, "expected a JSON object"),
    ],
)
def test_what_is_no_run_folder_is_refused_by_name(tmp_path_factory, files, message):
    folder = tmp_path_factory.mktemp("runs") / "elsewhere"
    if files is not None:
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_text(content)
    with pytest.raises(ReportError, match=message) as caught:
        read_run(folder)
    assert str(folder) in str(caught.value)


def test_the_page_shows_the_values(tmp_path):
    folder = make_run(tmp_path / "demo", certificate=CERTIFICATE | {"covers": ["the models of all rounds"]})
    assert_shown(
        words(page(folder)),
        "A dashed line marks a re-seeding",
        "Covered by the guarantee the models of all rounds",
        "ifca · digits",
        "500 clients in 2 hidden groups, 3 models, 4 rounds at sampling rate 0.2",
        "client-level privacy (joint)",
        "81.2 %",
        "group 1; disparity (best − worst) 16.2 points; standard deviation 8.1 points over 2 groups",
        "1 of 2 98.8 % of clients assigned correctly",
        "24.61 ✓ certified δ = 2×10⁻⁵, per client, ε = 8.00 where participation is secret",
        "3 min 20 s",
        "client-level differential privacy with ε = 24.61 at δ = 2×10⁻⁵",
        "This holds even if the adversary observes who takes part, as messages on the network show.",
        "Against an adversary who does not, ε = 8.00",
        "Hyperparameters were chosen on other runs.",
        "ε by pld 8.00 ε by rdp 9.44",
        "charged 4 × poisson at rate 0.2, noise 1.083",
        "dp-accounting 0.6.0, PLD",
        "Tuned outside the guarantee lr 0.25 model mlp-32",
        "removing one client with all of its data changes the probability by a factor of at most e^ε ≈ ",
        "flwr 1.39.0",
        "abc1234",
    )


def test_a_certificate_from_the_ledger_is_shown(tmp_path):
    """Not a made-up one: the page shows every entry."""
    numbers = {"clients": 20, "num_clusters": 2, "sampling_rate": 0.5, "rounds": 2, "clip_norm": 1.0, "delta": 1e-3}
    plan = RRSlot(
        **numbers, noise_multiplier=1.0, identifier_share=0.2, epsilon=20.0, evaluations=1, evaluation_noise=0.1
    )
    ledger = plan.ledger(tuned={"lr": 0.2})
    ledger.charge_round(1, plan.event())
    ledger.charge_round(1, plan.evaluation_event())
    document = certificate({"plan": plan.terms(), "tuned": {"lr": 0.2}}, ledger.charges)
    text = words(page(make_run(tmp_path / "slots", certificate=document)))
    assert_shown(
        text,
        "removing or replacing one client",
        f"ε by pld {formats.epsilon(document['accountants']['pld'])}",
        f"differential privacy with ε = {formats.epsilon(document['epsilon_participation_visible'])} at",
        f"Against an adversary who does not, ε = {formats.epsilon(document['epsilon'])}.",
        "charged (1) 1 × fixed at rate 0.5, noise 1",
        "charged (2) 1 × fixed at rate 1, noise 2",
        "noise multiplier counts 3.162",
        "Tuned outside the guarantee lr 0.2",
    )
    assert "{" not in text


def test_a_certificate_for_visible_participation_assumes_no_secret(tmp_path):
    numbers = {"clients": 20, "num_clusters": 2, "sampling_rate": 0.5, "rounds": 2, "clip_norm": 1.0, "delta": 1e-3}
    plan = Banded(**numbers, noise_multiplier=1.0, epsilon=20.0)
    ledger = plan.ledger()
    ledger.charge_round(1, plan.round_event(1))
    document = certificate({"plan": plan.terms(), "seed": None}, ledger.charges)
    text = words(page(make_run(tmp_path / "banded", certificate=document)))
    assert_shown(
        text,
        "leaving out all contributions of one client with all of its data changes the probability",
        "This holds even if the adversary observes who takes part.",
        "1 × poisson at rate 1, noise 1, in 2 slots; a client pays for the charges of its own slot",
    )
    assert "Against an adversary" not in text
    hidden = replace(plan, sampling_rate=0.25, participation="secret", min_separation=2)
    document = certificate({"plan": hidden.terms(), "seed": None}, ledger.charges)
    assert "Against an adversary who does not" in words(page(make_run(tmp_path / "two", certificate=document)))


def private_run(folder: Path) -> Path:
    """Only the noisy mean of all clients was released."""
    nothing = dict.fromkeys(("worst_group_accuracy", "group_accuracy", "clustering_accuracy", "groups_found"))
    result = RESULT | nothing | {"evaluate": "private", "groups": None, "epsilon_rdp": 9.4}
    lines = [
        {key: value for key, value in metrics(number, epsilon_rdp=3.0 * number).items() if key not in nothing}
        for number in (1, 2, 3, 4)
    ]
    make_run(folder, lines=lines, result=result, noisy=True)
    edit(folder / "config.toml", "[versions]", "evaluate = 'private'\nevaluate-noise = 0.01\n[versions]")
    return folder


def test_estimates_of_a_histogram_stand_beside_the_error_of_their_noise(tmp_path):
    folder = private_run(tmp_path / "histogram")
    names = ("roc_auc", "average_precision", "sensitivity_at_90", "brier", "positive_share")
    estimates = dict(zip(names, (0.834, 0.61, 0.55, 0.121, 0.2), strict=True))
    estimates |= {"errors": dict.fromkeys(names, 0.012), "calibration": [[0.1, 0.12, 0.5], [0.4, 0.3, 0.5]]}
    amend(folder / "result.json", {"estimates": estimates})
    text = words(page(folder))
    values = ("Noisy area under ROC curve", "0.834", "± 0.012 by the noise")
    values += ("a constant has 0.160; predicted → observed in %: 10 → 12, 40 → 30",)
    for where in (text, " ".join(shown(Outcome.read(folder), {}).split())):
        assert_shown(where, *values)


def test_a_private_evaluation_is_called_a_noisy_mean(tmp_path):
    folder = private_run(tmp_path / "quiet")
    run = read_run(folder)
    assert run.noisy
    assert not read_run(make_run(tmp_path / "open")).noisy
    text = words(page(folder))
    values = ("Noisy mean accuracy 81.2 %", "the private noisy mean over all clients")
    values += ("Noise ± 1 points standard deviation of the noise on the accuracy",)
    assert_shown(text, *values, "only the mean over all clients is released")
    assert "Worst group" not in text
    graphic = accuracy_graphic(run)
    assert "held-out records" not in graphic.caption
    ((heading, figure),) = graphic.panels
    assert heading.startswith("noisy mean")
    assert figure.axes[0].get_ylabel() == "noisy mean accuracy"
    assert len(figure.axes[0].lines) == 1
    assert "81.2 % (noisy)" in words(page(folder, tmp_path / "open"))
    table = shown(run.result, CERTIFICATE)
    assert "Noisy mean accuracy │ 81.2 %" in table
    assert "Worst group" not in table
    assert "exact" not in table
    assert "Noisy" not in shown(outcome(RESULT), CERTIFICATE)


def test_scores_of_real_numbers_are_called_r_squared(tmp_path):
    score, result = "R², at least 0", RESULT | {"rmse": 2.5, "baseline_rmse": 4.0}
    folders = [make_run(tmp_path / name, result=result) for name in ("a", "b")]
    text = words(page(folders[0]))
    assert_shown(text, f"How good? {score} 81.2 %", f"Held-out {score}: the mean over clients")
    assert "accuracy" not in text.replace("accuracy.csv", "")
    assert accuracy_graphic(read_run(folders[0])).panels[0][1].axes[0].get_ylabel() == score
    assert re.search(rf"{score} +│ 81.2 %", shown(outcome(result), CERTIFICATE))
    text = words(page(*folders)).partition("a ifca")[0]
    assert_shown(text, f"runs {score} worst group", f"Held-out {score}, mean over clients", f"seed {score} ε δ")
    folders.append(make_run(tmp_path / "classes"))
    assert f"runs {score} or accuracy worst group" in words(page(*folders))


def test_an_uncertified_run_says_why_and_claims_nothing(tmp_path):
    """Nor what others see to cost less: a loose bound made epsilon larger than the tight one of all rounds."""
    certificate = CERTIFICATE | {"certified": False, "reasons": ["seeded noise, for simulation only"], "epsilon": 30.0}
    text = words(page(make_run(tmp_path / "seeded", certificate=certificate)))
    assert_shown(text, "! not certified", "Why this run is not certified seeded noise, for simulation only")
    assert [claim for claim in ("✓", "This run satisfies", "Against an adversary") if claim in text] == []


def test_a_run_without_privacy_says_infinity(tmp_path):
    lines = [metrics(number, epsilon=None, histogram=None) for number in (1, 2)]
    folder = make_run(tmp_path / "plain", lines=lines, certificate=WITHOUT_PRIVACY)
    run = read_run(folder)
    assert math.isinf(run.epsilon)
    assert epsilon_graphic(run) is None
    exact_sizes = make_run(tmp_path / "sizes", lines=[metrics(1, epsilon=None)], certificate=WITHOUT_PRIVACY)
    sizes, text = (html.unescape(words(page(path))) for path in (exact_sizes, folder))
    assert_shown(sizes, "Size of each cluster in each round's cohort (points)")
    assert "noisy" not in (sizes + text).lower()
    assert_shown(text, "∞ ! not private", "no privacy guarantee", "This run released no cluster sizes")


def test_nulls_are_dashes_not_zeros(tmp_path):
    text = words(page(make_run(tmp_path / "off", result=dict.fromkeys(RESULT))))
    assert "Accuracy –" in text
    assert "None" not in text


def test_everything_is_escaped(tmp_path):
    attack = "<script>alert('$x^$')</script>"
    certificate = CERTIFICATE | {"certified": False, "reasons": [attack], "outside": [attack]}
    html = page(
        make_run(tmp_path / "<b>", strategy=attack, certificate=certificate), make_run(tmp_path / "b"), drawn=True
    )
    assert "<script" not in html
    assert "<b>" not in html
    assert html.count("&lt;script&gt;") >= 4


def test_a_page_with_figures_is_whole_follows_its_colours_and_is_the_same_every_time(tmp_path):
    runs = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    html = page(*runs, drawn=True)
    assert html == page(*runs, drawn=True)
    assert "ifca on digits" in html  # repetitions of one configuration
    assert "://" not in html
    assert not re.search(r"<(script|link|img|iframe|object|embed|image)\b|@import|\bsrc=", html)
    assert all(target.startswith(("#", "data:text/csv;")) for target in re.findall(r'href="([^"]*)"', html))
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", html))
    figures = re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)
    assert len(figures) == 2 * (1 + 2 + 3 + 1) + 1  # accuracy, groups, clusters, ε; and one row of repetitions
    for figure in figures:
        ElementTree.fromstring(figure)
        assert not re.search(r"(fill|stroke): #|\b(fill|stroke)=\"#", figure)
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    references = re.findall(r'(?:href="|url\()#([^")]+)', html)
    assert len(references) > 50
    assert set(references) <= set(ids)
    used = set(re.findall(r"var\(--([\w-]+)\)", html))
    assert used - {"share"} <= set(re.findall(r"--([\w-]+):", html))


def test_several_runs_are_compared_and_shown_one_by_one(tmp_path):
    other = make_run(tmp_path / "other", strategy="fedcam", result=RESULT | {"accuracy": 0.6543})
    html = page(make_run(tmp_path / "first"), other, make_run(tmp_path / "cut", result=None))
    text = words(html)
    assert [html.count(f'id="run-{number}"') for number in (1, 2, 3, 4)] == [1, 1, 1, 0]
    runs = ("1 first ifca digits auto 81.2 % *", "2 other fedcam digits auto 65.4 % *", "! unfinished")
    comparison = "strategy runs accuracy worst group clustering accuracy ε seconds 1 ifca 1 81.2 %*"
    assert_shown(text, "3 runs compared", *runs, comparison)
    with pytest.raises(ReportError, match="at least one run folder"):
        write_report([], tmp_path / "report.html")
    assert write_report([read_run(other)], other) == other / "report.html"


def lines_of(figure):
    (axes,) = figure.axes
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines]


def test_a_panel_for_all_clients_and_one_for_each_group(tmp_path):
    run = read_run(make_run(tmp_path / "demo"))
    graphic = accuracy_graphic(run)
    assert [heading.replace("\u00a0", " ") for heading, _ in graphic.panels] == [
        *("all clients, 80.0 % at the end", "group 0, 40.0 % at the end", "group 1, 96.0 % at the end")
    ]
    (mean,), (grey, first), (_, second) = (lines_of(figure) for _, figure in graphic.panels)
    assert mean == grey == ([2, 4], pytest.approx([0.4, 0.8]))
    assert first == ([2, 4], pytest.approx([0.2, 0.4]))
    assert second == ([2, 4], pytest.approx([0.48, 0.96]))
    assert len({figure.axes[0].get_ylim() for _, figure in graphic.panels}) == 1
    assert graphic.caption.endswith("Only the last evaluation reads more than 2,000 held-out records of a client.")
    assert graphic.data.heads == ("round", "all clients", "group 0", "group 1")
    assert graphic.data.rows[1] == [4, *map(pytest.approx, (0.8, 0.4, 0.96))]
    ((_, figure),) = epsilon_graphic(run).panels
    assert lines_of(figure)[0][1] == pytest.approx([1.993, 3.993, 5.993, 7.993])


def test_the_lowest_of_many_groups_are_drawn(tmp_path):
    lines = [metrics(n, accuracy=0.5, group_accuracy=[1 - 0.01 * group for group in range(40)]) for n in (1, 2)]
    graphic = accuracy_graphic(read_run(make_run(tmp_path / "many", lines=lines)))
    assert [heading.split(",")[0] for heading, _ in graphic.panels[1:]] == [f"group {n}" for n in range(28, 40)]
    assert "the 12 with the lowest accuracy of the hidden groups" in graphic.caption
    assert len(graphic.data.rows[0]) == 42


def test_lines_of_cluster_sizes_break_at_a_reseeding_which_is_marked(tmp_path):
    lines = [metrics(number, histogram=[10.0 * number, 4.0, 7.0]) for number in (1, 2, 3, 4)]
    graphic = cluster_graphic(read_run(make_run(tmp_path / "demo", lines=lines)))
    source, copy, other = (figure for _, figure in graphic.panels)
    _, dots, before, after = lines_of(source)
    assert dots[1] == [10, 20, 30, 40]
    assert before == ([1, 2], [10, 15])
    assert after == ([3, 4], [30, 35])
    assert [[text.get_text() for text in figure.axes[0].texts] for figure in (source, copy, other)] == [
        *([], ["copy of 0"], [])
    ]
    assert lines_of(copy)[-1][0] == [2, 2]
    assert graphic.data.rows[0] == [1, 10.0, 4.0, 7.0]


def test_sizes_that_end_before_the_run_are_drawn_up_to_their_last_round(tmp_path):
    lines = [metrics(number, histogram=[10.0, 4.0] if number < 4 else None) for number in range(1, 7)]
    graphic = cluster_graphic(read_run(make_run(tmp_path / "demo", lines=lines)))
    assert [row[0] for row in graphic.data.rows] == [1, 2, 3]
    assert graphic.caption.endswith("Sizes were released up to round 3: later rounds do not need them.")


def test_clusters_that_multiply_are_drawn(tmp_path):
    lines = [metrics(1, histogram=[9.0]), metrics(2, histogram=[4.0, 5.0], reseeded=[])]
    graphic = cluster_graphic(read_run(make_run(tmp_path / "cfl", lines=lines)))
    assert [heading for heading, _ in graphic.panels] == ["cluster 0", "cluster 1"]
    assert graphic.data.rows == [[1, 9.0, None], [2, 4.0, 5.0]]


def test_sizes_follow_the_models_that_a_search_for_their_number_kept(tmp_path):
    """Model 1 is removed after round 1, and model 0, now the second, is copied after round 2."""
    lines = [
        metrics(1, histogram=[10.0, 1.0, 7.0], reseeded=[], notes={"origins": [2, 0]}),
        metrics(2, histogram=[6.0, 11.0], reseeded=[[1, 2]], notes={"origins": [0, 1, -1]}),
        metrics(3, histogram=[6.0, 5.0, 5.5], reseeded=[]),
        metrics(4, histogram=[6.5, 5.0, 4.5], reseeded=[], notes={"origins": [1, 2, 0]}),
    ]
    run = read_run(make_run(tmp_path / "search", lines=lines))
    graphic = cluster_graphic(run)
    assert graphic.data.rows == [[1, 10.0, None, 7.0], [2, 11.0, None, 6.0], [3, 5.0, 5.5, 6.0], [4, 5.0, 4.5, 6.5]]
    assert "that the search for their number kept" in graphic.caption
    texts = [[text.get_text() for text in figure.axes[0].texts] for _, figure in graphic.panels]
    assert texts == [[], ["copy of 0"], []]


def test_damaged_origins_of_models_are_drawn_as_unknown_sizes(tmp_path):
    for origins in ([7, -9], [0], [0, 1, 2, 3, 4]):
        lines = [metrics(1, histogram=[9.0, 3.0], notes={"origins": origins}), metrics(2, histogram=[4.0, 5.0])]
        graphic = cluster_graphic(read_run(make_run(tmp_path / str(len(origins)), lines=lines)))
        assert len(graphic.panels) == len(origins)


def test_a_single_round_at_the_edge_of_the_scale_is_drawn(tmp_path):
    for share in (0.0, 1.0):
        line = metrics(1, epsilon=0.0, histogram=[0.0], accuracy=share, group_accuracy=[share, None])
        assert "all clients" in page(make_run(tmp_path / str(share), lines=[line]), drawn=True)


def test_figures_are_saved_the_same_every_time_or_refused_by_name(tmp_path):
    figure = Figure()
    figure.add_subplot().plot([1, 50, 100], [0.5, 2.0, 2.8])
    for name in ("curve.png", "new/curve.svg", "curve.PDF"):
        paths = [save_figure(figure, tmp_path / part / name) for part in ("a", "b")]
        assert paths[0].read_bytes() == paths[1].read_bytes()
    with pytest.raises(ReportError, match=r"curve\.gif.*\.png"):
        save_figure(figure, tmp_path / "curve.gif")
    (tmp_path / "file").write_text("")
    with pytest.raises(ReportError, match="cannot be written"):
        save_figure(figure, tmp_path / "file" / "curve.png")


def test_the_table_shows_what_matters():
    text = shown(outcome(RESULT), CERTIFICATE)
    values = ("ifca · digits", "81.2 %", "73.1 %", "1 of 2", "98.8 %", "3 min 20 s", "512 MB", "yes")
    losses = ("ε = 24.61, δ = 2×10⁻⁵ (add/remove one client)", "ε = 8.00 where nobody observes which clients take part")
    assert_shown(text, *values, *losses)
    caption = "exact diagnostics: outside the guarantee"
    assert text.index("Clustering accuracy") < text.index(caption) < text.index("Privacy")
    assert caption not in shown(outcome(RESULT), WITHOUT_PRIVACY)
    assert caption not in shown(outcome(dict.fromkeys(RESULT)), CERTIFICATE)


def test_the_table_says_why_a_run_is_not_certified():
    text = shown(outcome(RESULT), CERTIFICATE | {"certified": False, "reasons": ["[bold]true counts[/bold]"]})
    assert "no: [bold]true counts[/bold]" in text
    assert "none, ε = ∞: privacy-unit = none" in shown(outcome(RESULT), WITHOUT_PRIVACY)
    assert "none, ε = ∞" in shown(Outcome(), {})  # of empty files


@for_rows(
    ("written", "value", "text"),
    [
        *((formats.epsilon, *row) for row in ((7.99, "7.99"), (7.991, "8.00"), (0.0341, "0.035"), (14.6, "14.60"))),
        *((formats.epsilon, *row) for row in ((0.0, "0"), (None, "∞"), (math.inf, "∞"), (math.nan, "∞"))),
        *((formats.number, *row) for row in ((2e-5, "2×10⁻⁵"), (1.25e-6, "1.25×10⁻⁶"), (80, "80"), (8.0, "8"))),
        *((formats.number, *row) for row in ((1.08251, "1.083"), (0, "0"), (math.nan, "–"))),
        *((formats.duration, *row) for row in ((0.05, "0.05 s"), (41, "41 s"), (59.6, "1 min 00 s"))),
        *((formats.duration, *row) for row in ((200, "3 min 20 s"), (7500, "2 h 05 min"), (None, "–"))),
    ],
)
def test_numbers_are_written_and_epsilon_is_never_rounded_to_the_better_side(written, value, text):
    assert written(value).replace(formats.NBSP, " ") == text


def test_what_a_mixture_found_is_told():
    notes = {"clusters": 4, "mss": 24.31, "mpo": 1e-9, "switch_round": 30}
    assert formats.mixture(notes) == (
        "4 groups in the first updates, well separated: minimum separation score 24.3 (threshold 3), overlap 1e-09, "
        "used up to round 30"
    )
    assert "not well separated" in formats.mixture(notes | {"mss": 1.7})
    alone = notes | {"clusters": 1, "mss": None}
    assert formats.mixture(alone) == "one group in the first updates, used up to round 30"
    assert formats.mixture({}) == formats.mixture(None) == ""


# ---- sites ------------------------------------------------------------------------------------------------


def with_sites(
    folder: Path, sites: Any, accuracy: Any, certificate: dict[str, Any] = WITHOUT_PRIVACY, **run: Any
) -> Path:
    make_run(folder, certificate=certificate, **run)
    amend(folder / "result.json", {"sites": sites})
    ids = list(range(len(accuracy))) if isinstance(accuracy, list) else accuracy
    amend(folder / "diagnostics.json", {"client_accuracy": accuracy, "client_id": ids, "client_cluster": None})
    return folder


SITES = [{"client": 0, "cluster": 1}, {"client": 1, "cluster": 0}, {"client": 2, "cluster": None}]


def test_sites_have_their_cluster_and_accuracy(tmp_path):
    run = read_run(with_sites(tmp_path / "run", SITES, [0.9, 0.5, None, 0.7]))
    assert [(site.label, site.cluster, site.accuracy) for site in read_sites(run)] == [
        *(("client 0", 1, 0.9), ("client 1", 0, 0.5), ("client 2", None, None), ("client 3", None, 0.7))
    ]
    html = page(tmp_path / "run")
    assert_shown(
        words(html),
        "How fair? Worst site 50.0 % client 1; disparity (best − worst) 40.0 points;",
        "standard deviation 16.3 points over 3 sites",
        "How sure? Standard error ± 12 points of the mean accuracy over 3 sites",
        "site cluster accuracy client 1 0 50.0 % client 3 – 70.0 % client 0 1 90.0 % client 2 – –",
        "Cluster 0 has 1 client, cluster 1 has 1 client",
    )
    heads, *rows = downloads(html)["sites.csv"]
    assert heads == ["client", "cluster", "accuracy"]
    assert rows == [["0", "1", "0.9"], ["1", "0", "0.5"], ["2", "", ""], ["3", "", "0.7"]]


PERSONAL = {"personal_accuracy": 0.9412, "client_personal_accuracy": [0.95, 0.5333]}
PERSONAL |= {"personal_worst_group_accuracy": 0.9321, "personal_worst_client_accuracy": 0.5333}


@for_rows("certificate", [WITHOUT_PRIVACY, CERTIFICATE])
def test_accuracies_of_personalised_models_stand_beside_those_of_released_ones(tmp_path, certificate):
    folder = with_sites(tmp_path / certificate["unit"], SITES[:2], [0.9, 0.5], certificate)
    amend(folder / "diagnostics.json", PERSONAL)
    html = page(folder)
    assert_shown(
        words(html),
        "Personalised 94.1 %",
        "and sends nothing of it; worst group 93.2 %, worst client 53.3 %",
        "site cluster accuracy personalised client 1 0 50.0 % 53.3 % client 0 1 90.0 % 95.0 %",
    )
    assert downloads(html)["sites.csv"][0] == ["client", "cluster", "accuracy", "personal"]
    table = shown(read_run(folder).outcome, certificate)
    assert re.search(r"Personalised +│ 94.1 %, worst group 93.2 %, worst client 53.3 %: models", table)


def test_clusters_alone_are_released_and_accuracies_alone_are_exact(tmp_path):
    assert_shown(words(page(with_sites(tmp_path / "clusters", SITES, None))), "site cluster client 0", "Worst group")
    text = words(page(with_sites(tmp_path / "accuracies", None, [0.25, 0.75], CERTIFICATE)))
    error = "Standard error ± 25 points ! outside the guarantee of the mean"
    assert_shown(text, "Worst site 25.0 % ! outside the guarantee client 0;", error)
    exact = text.partition("Exact diagnostics")[2].partition("Released and charged")[0]
    assert "site accuracy client 0 25.0 % client 1 75.0 %" in exact
    text = words(page(with_sites(tmp_path / "released", SITES, None, CERTIFICATE)))
    assert "site cluster client 0" in text.partition("Released and charged")[2]


@for_rows(
    ("sites", "accuracy", "reason"),
    [
        ("many", None, r"result\.json cannot be read: sites is 'many'; expected a list"),
        ([1], None, "sites is 1; expected an object"),
        ([{"cluster": 0}], None, "'client'"),
        ([{"client": True}], None, "client is True; expected an integer"),
        (SITES, "good", r"diagnostics\.json cannot be read: client_id is 'good'; expected a list"),
        (SITES, [True], "client_accuracy is True; expected a number"),
    ],
)
def test_sites_of_another_form_are_refused(tmp_path_factory, sites, accuracy, reason):
    folder = with_sites(tmp_path_factory.mktemp("runs") / "run", sites, accuracy)
    with pytest.raises(ReportError, match=rf"{reason}.*restore it from a copy"):
        read_run(folder)


def test_exact_scores_of_evaluated_clients_have_their_ids(tmp_path):
    folder = make_run(tmp_path / "run", certificate=WITHOUT_PRIVACY)
    scores = {"client_id": [4, 7], "client_accuracy": [0.25, 0.75], "client_cluster": [1, 0]}
    amend(folder / "diagnostics.json", scores)
    found = [(site.client, site.cluster, site.accuracy) for site in read_sites(read_run(folder))]
    assert found == [(4, 1, 0.25), (7, 0, 0.75)]


def test_of_many_sites_the_worst_are_listed_and_the_others_folded(tmp_path):
    sites = [{"client": client, "cluster": client % 4} for client in range(1000)]
    html = page(with_sites(tmp_path / "run", sites, [client / 1000 for client in range(1000)]))
    shown, _, folded = html.partition("<summary>All 1000 sites</summary>")
    assert shown.count('<th scope="row">client ') == 10
    assert ">client 9<" in shown
    assert folded.count('<th scope="row">client ') == 1000
    assert "Cluster 0 has 250 clients" in shown


# ---- colours and data -------------------------------------------------------------------------------------


def contrast(first: str, second: str) -> float:
    """Contrast ratio of two colours (WCAG 2)."""

    def luminance(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def test_lines_stand_out_from_light_and_dark_pages():
    dark_card = {name: dark for name, _, dark in THEME}["card"]
    for name, light, dark in THEME:
        if name.startswith("group-") and name != "group-5":  # the sixth colour of Okabe and Ito is pale
            assert contrast(light, "#ffffff") > 2.1, name
        if name.startswith(("group-", "cluster-")):
            assert contrast(dark, dark_card) > 4.5, name
        if name in ("ink", "muted"):
            assert contrast(light, "#ffffff") > 4.5
            assert contrast(dark, dark_card) > 4.5


def test_every_figure_has_its_data_as_a_table_and_as_a_file(tmp_path):
    html = page(make_run(tmp_path / "demo"))
    files = downloads(html)
    assert set(files) == {"accuracy.csv", "cluster-sizes.csv", "epsilon.csv"}
    assert html.count("<figure>") == 3
    heads, *rows = files["accuracy.csv"]
    assert heads == ["round", "all clients", "group 0", "group 1"]
    assert rows == [["2", "0.4", "0.2", "0.48"], ["4", "0.8", "0.4", "0.96"]]
    assert files["cluster-sizes.csv"][1] == ["1", "60.5", "-1.25", "38.0"]
    assert "round all clients group 0 group 1 2 0.4 0.2 0.48 4 0.8 0.4 0.96" in words(html)


def test_a_long_table_is_whole_in_its_file_only(tmp_path):
    lines = [metrics(number) for number in range(1, 301)]
    html = page(make_run(tmp_path / "long", lines=lines))
    assert len(downloads(html)["epsilon.csv"]) == 301
    assert "Download epsilon.csv , which has 200 more rows" in words(html)


def test_settings_of_the_certificate_without_effect_are_not_on_the_page(tmp_path):
    tuned = {"training.lr": 0.2, "record-level.loss-noise": 5.0, "record-level.loss-bound": 4.0}
    public = {"clients": 500, "loss_noise": 5.0, "reseed-every": 5}
    certificate = CERTIFICATE | {"tuned_outside": tuned, "public_inputs": public}
    text = words(page(make_run(tmp_path / "run", certificate=certificate)))
    assert "Tuned outside the guarantee training.lr 0.2 Public inputs, not protected clients 500 reseed-every 5" in text


def test_a_method_without_clusters_has_none_on_its_page(tmp_path):
    result = RESULT | {"groups": 1, "groups_found": None, "clustering_accuracy": None, "group_accuracy": [0.8124]}
    lines = [metrics(number, histogram=None, group_accuracy=None, reseeded=[]) for number in (1, 2)]
    folder = with_sites(
        tmp_path / "run", SITES, [0.9, 0.5, 0.7], CERTIFICATE, strategy="fedavg", result=result, lines=lines
    )
    edit(folder / "config.toml", "clusters = 3", "clusters = 1")
    text = words(page(folder))
    assert [part for part in ("hidden groups,", "Clusters", "Cluster 0", "site cluster") if part in text] == []
    assert_shown(text, "500 clients, 1 model, 4 rounds", "site accuracy client 1 50.0 %")


def test_sites_of_a_certified_run_say_why_they_have_no_accuracy(tmp_path):
    text = words(page(with_sites(tmp_path / "run", SITES, None, CERTIFICATE)))
    assert "A certified run keeps no accuracy of single sites" in text
    (tmp_path / "run" / "diagnostics.json").unlink()
    assert "keeps no accuracy" not in words(page(tmp_path / "run"))
    assert "keeps no accuracy" not in words(page(with_sites(tmp_path / "none", SITES, None)))


def test_the_configuration_is_folded_and_has_what_the_run_uses(tmp_path):
    html = page(make_run(tmp_path / "demo", certificate=WITHOUT_PRIVACY))
    folded = re.search(r'<details class="card flow">.*?</details>', html, flags=re.DOTALL)
    assert folded is not None
    text = words(folded[0])
    assert_shown(text, "strategy ifca", "clusters 3")
    assert [name for name in ("epsilon", "mechanism") if name in text] == []
