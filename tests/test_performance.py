"""Metrics of predictions: definitions, weights, undefined cases, intervals, and what users read of them."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
from kit.commands import assert_refused
from kit.tables import for_rows
from sklearn.metrics import (
    accuracy_score,
    balanced_accuracy_score,
    brier_score_loss,
    confusion_matrix,
    f1_score,
    log_loss,
    roc_auc_score,
)

from coterie.inference import InferenceError, load
from coterie.report.predictions import named_metrics, verdict
from coterie.results import Diagnostics
from coterie.tasks import Performance, beats_constant
from coterie.tasks.performance import calibration, decide, intervals, of_classes, of_numbers, probabilities

SCHEMA = """version = 1
ignore = ["patient"]
[label]
column = "outcome"
classes = ["no", "yes"]
[[columns]]
name = "a"
type = "number"
mean = 0
scale = 1
"""


def of_two(labels, scores, weights=None, **options):
    return of_classes(np.asarray(labels), np.stack([1 - np.asarray(scores), scores], axis=1), weights, **options)


def flat(metrics):
    """Metrics without lists, which become an entry per class."""
    lists = {name: value for name, value in metrics.items() if isinstance(value, list)}
    singles = {name: value for name, value in metrics.items() if name not in lists}
    return singles | {f"{name} {j}": value for name, values in lists.items() for j, value in enumerate(values)}


@pytest.fixture(scope="module")
def drawn():
    rng = np.random.default_rng(0)
    labels = (rng.random(400) < 0.2).astype(np.int64)
    return labels, 1 / (1 + np.exp(1.5 - rng.normal(size=400) - 1.2 * labels))


def test_metrics_are_those_of_scikit_learn(drawn):
    labels, scores = drawn
    metrics = of_two(labels, scores)
    assert metrics.pooled_accuracy == pytest.approx(accuracy_score(labels, scores >= 0.5))
    assert metrics.balanced_accuracy == pytest.approx(balanced_accuracy_score(labels, scores >= 0.5))
    assert metrics.roc_auc == pytest.approx(roc_auc_score(labels, scores))
    assert metrics.brier == pytest.approx(brier_score_loss(labels, scores))
    assert metrics.baseline_accuracy == pytest.approx(1 - labels.mean())
    assert metrics.baseline_brier == pytest.approx(labels.mean() * (1 - labels.mean()))
    assert metrics.class_recall == pytest.approx((metrics.specificity, metrics.sensitivity))


def test_weighted_metrics_of_several_classes_are_those_of_scikit_learn():
    rng = np.random.default_rng(3)
    labels, shares = rng.integers(0, 3, 200), probabilities(rng.normal(size=(200, 3)).round(1))
    weights = rng.integers(0, 3, 200).astype(float)
    metrics, predicted = of_classes(labels, shares, weights), decide(shares)
    areas = [roc_auc_score(labels == j, shares[:, j], sample_weight=weights) for j in range(3)]
    assert metrics.roc_auc == pytest.approx(np.mean(areas), rel=1e-12)
    assert metrics.macro_f1 == pytest.approx(f1_score(labels, predicted, average="macro", sample_weight=weights))
    assert metrics.log_loss == pytest.approx(log_loss(labels, shares, sample_weight=weights))
    assert metrics.pooled_accuracy == pytest.approx(accuracy_score(labels, predicted, sample_weight=weights))
    matrix = confusion_matrix(labels, predicted, sample_weight=weights)
    assert metrics.class_recall == pytest.approx(tuple(matrix.diagonal() / matrix.sum(axis=1)))


def test_a_weight_repeats_a_record(drawn):
    labels, scores = drawn
    times = np.random.default_rng(1).integers(0, 4, len(labels))
    weighted, repeated = of_two(labels, scores, times.astype(float)), of_two(labels.repeat(times), scores.repeat(times))
    assert flat(weighted.to_json()) == pytest.approx(flat(repeated.to_json()))


def test_the_sensitivity_at_a_specificity_is_the_largest_of_all_thresholds(drawn):
    labels, scores = (each[:100] for each in drawn)
    metrics = [of_two(labels, scores, threshold=threshold) for threshold in np.unique(scores)]
    best = max(each.sensitivity for each in metrics if each.specificity >= 0.9)
    assert of_two(labels, scores).sensitivity_at_90 == pytest.approx(best)


def test_a_threshold_moves_decisions_and_no_curve(drawn):
    low, high = (of_two(*drawn, threshold=threshold) for threshold in (0.05, 0.9))
    assert low.sensitivity > high.sensitivity
    assert low.specificity < high.specificity
    assert low.roc_auc == high.roc_auc
    assert low.brier == high.brier
    assert decide(np.array([[0.5, 0.5]]), 0.5).tolist() == [1]


@pytest.mark.parametrize("labels", [[0, 0, 0], [1, 1]])
def test_what_one_class_does_not_define_is_left_out(labels):
    metrics = of_two(labels, np.linspace(0.2, 0.8, len(labels)))
    assert metrics.roc_auc is metrics.sensitivity is metrics.average_precision is None
    assert metrics.baseline_accuracy == 1
    assert beats_constant(metrics) is False
    assert Performance.from_json(json.loads(json.dumps(metrics.to_json()))).roc_auc is None


def test_several_classes_are_compared_one_against_the_rest():
    rng = np.random.default_rng(0)
    labels, outputs = rng.integers(0, 3, 300), rng.normal(size=(300, 4))  # nobody has class 3
    outputs[np.arange(300), labels] += 1
    shares = probabilities(outputs)
    metrics = of_classes(labels, shares)
    areas = [roc_auc_score(labels == j, shares[:, j]) for j in range(3)]
    assert metrics.roc_auc == pytest.approx(np.mean(areas))
    assert np.isnan(metrics.class_recall[3])
    assert metrics.to_json()["class_recall"][3] is None
    assert metrics.sensitivity is None
    assert 0 < metrics.brier < metrics.baseline_brier + 1


def test_probabilities_of_large_outputs_are_finite():
    assert probabilities(np.array([[1e4, -1e4], [0, 0]], np.float32)).tolist() == [[1, 0], [0.5, 0.5]]


def test_the_calibration_curve_holds_every_record():
    curve = calibration(np.array([0, 1, 1, 0]), np.array([0.05, 0.95, 1.0, 0.0]))
    assert curve[:, 2].sum() == 4
    assert curve[:, :2].tolist() == [[0.025, 0.0], [0.975, 1.0]]
    assert of_two([0, 1, 1, 0], [0.0, 1.0, 1.0, 0.0]).calibration_error == 0


def test_errors_of_numbers_stand_beside_those_of_the_mean():
    targets = np.array([1.0, 2.0, 3.0, 6.0])
    metrics = of_numbers(targets, np.full(4, 3.0))
    assert metrics.rmse == pytest.approx(metrics.baseline_rmse)
    assert metrics.r2 == pytest.approx(0)
    assert beats_constant(metrics) is False
    worse = of_numbers(targets, -targets)
    assert worse.r2 < 0
    assert beats_constant(worse) is False
    assert beats_constant(of_numbers(targets, targets)) is True


def test_intervals_draw_patients_with_all_their_records(drawn):
    labels, scores = drawn

    def measure(weights):
        return of_two(labels, scores, weights)

    records = intervals(measure, np.arange(len(labels)), draws=60)
    patients = intervals(lambda w: of_two(labels.repeat(4), scores.repeat(4), w), np.arange(400).repeat(4), draws=60)
    low, high = records["roc_auc"]
    assert low < of_two(labels, scores).roc_auc < high
    assert patients["roc_auc"] == pytest.approx(records["roc_auc"])  # four times the records, no more patients
    assert intervals(measure, np.zeros(len(labels))) == {}  # one patient gives no interval


@for_rows(
    ("scores", "expected"),
    [
        (Diagnostics(pooled_accuracy=0.8, baseline_accuracy=0.8), "always the most frequent class (80.0"),
        (Diagnostics(rmse=2.0, baseline_rmse=1.5), "mean of the targets"),
        (Diagnostics(pooled_accuracy=0.81, baseline_accuracy=0.8), ""),
        (Diagnostics(accuracy=0.5), ""),
    ],
)
def test_a_model_that_is_no_better_than_a_constant_is_called_so(scores, expected):
    assert expected in verdict(scores)
    assert bool(verdict(scores)) == bool(expected)


def test_classes_are_named_where_the_schema_names_them():
    scores = Diagnostics(**of_two([0, 0, 1, 1], [0.1, 0.6, 0.4, 0.9]).metrics)
    assert "class 1 is positive" in named_metrics(scores)[1][2]
    named = named_metrics(replace(scores, class_names=("no", "yes")))
    assert "yes is positive" in named[1][2]
    assert "50.0\u00a0% of no" in named[2][2]


@pytest.fixture(scope="module")
def hospital(tmp_path_factory):
    """A finished run of five sites with a rare outcome, and their tables."""
    from coterie.server import RunConfig, RunFolder
    from coterie.server.simulate import simulate

    folder, rng = tmp_path_factory.mktemp("hospital"), np.random.default_rng(0)
    (folder / "schema.toml").write_text(SCHEMA)
    for site in range(5):
        outcome = rng.random(120) < (0 if site == 4 else 0.15)
        rows = [f"P{site}-{i // 2},{rng.normal() + 1.5 * y:.4f},{'yes' if y else 'no'}" for i, y in enumerate(outcome)]
        (folder / f"client-{site}.csv").write_text("\n".join(["patient,a,outcome", *rows]) + "\n")
    values = {"strategy": "fedavg", "dataset": "own", "table-schema": str(folder / "schema.toml"), "seed": 0}
    values |= {"data-dir": str(folder), "clients": 5, "rounds": 15, "privacy-unit": "none", "model": "linear"}
    values |= {"lr": 0.2, "sampling-rate": 1.0}
    run = RunFolder.create(folder / "run", RunConfig(values))
    try:
        outcome = simulate(run, cores=1)
    finally:
        run.close()
    return folder, outcome


def test_a_simulation_states_what_a_constant_cannot_win(hospital):
    folder, outcome = hospital
    scores = Diagnostics.from_json(json.loads((folder / "run" / "diagnostics.json").read_text()))
    assert scores.to_json() == outcome.diagnostics.to_json()
    assert scores.class_names == ("no", "yes")
    assert beats_constant(scores) is not None
    models = load(folder / "run")
    records = [models.read(folder / f"client-{site}.csv", held_out=True) for site in range(5)]
    labels = np.concatenate([site.y for site in records])
    shares = np.concatenate([probabilities(models.outputs(site.x, 0)) for site in records])
    assert scores.evaluated_records == len(labels)
    stored = {name: value for name, value in scores.to_json().items() if name in Performance.stored()}
    assert flat(of_classes(labels, shares).to_json()) == pytest.approx(flat(stored), abs=1e-6)


def test_the_page_says_how_good_predictions_are(hospital):
    from coterie.report.page import write_report

    folder, _ = hospital
    page = write_report([folder / "run"], folder / "page.html").read_text()
    assert "Area under ROC curve" in page
    assert "Constant prediction" in page
    assert "yes is positive" in page


@pytest.mark.slow
def test_the_command_evaluates_at_the_site(hospital, coterie):
    folder, _ = hospital
    arguments = ("evaluate", folder / "run", folder / "client-0.csv")
    output = coterie(*arguments)[1]
    assert "positive class yes" in output
    assert "area under the ROC curve" in output
    held_out = json.loads(coterie(*arguments, "--held-out", "--unit", "patient", "--json")[1])
    everything = json.loads(coterie(*arguments, "--json")[1])
    assert 0 < held_out["records"] < everything["records"] == 120
    low, high = everything["intervals"]["roc_auc"]
    assert low <= everything["metrics"]["roc_auc"] <= high
    other = json.loads(coterie(*arguments, "--positive", "no", "--threshold", "0.9", "--json")[1])["metrics"]
    assert other["roc_auc"] == pytest.approx(everything["metrics"]["roc_auc"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--positive", "maybe"], ["'maybe'", "no, yes"]),
        (["--threshold", "1.5"], ["threshold", "from 0 to 1"]),
        (["--unit", "person"], ["no column 'person'", "'patient'"]),
        (["--cluster", "3"], ["cluster 3 does not exist"]),
    ],
)
def test_an_evaluation_that_is_impossible_is_refused_in_one_line(hospital, coterie, options, words):
    folder, _ = hospital
    assert_refused(coterie("evaluate", folder / "run", folder / "client-0.csv", *options), *words)


def test_predictions_have_ids_and_all_probabilities(hospital, coterie):
    folder, _ = hospital
    arguments = ("predict", folder / "run", folder / "client-0.csv", "--id", "patient")
    rows = list(csv.DictReader(coterie(*arguments)[1].splitlines()))
    assert list(rows[0]) == [
        "record",
        "id",
        "cluster",
        "prediction",
        "probability",
        "probability_no",
        "probability_yes",
    ]
    assert [row["id"] for row in rows[:3]] == ["P0-0", "P0-0", "P0-1"]
    assert all(
        float(row["probability_no"]) + float(row["probability_yes"]) == pytest.approx(1, abs=1e-5) for row in rows
    )
    bold = list(csv.DictReader(coterie(*arguments, "--threshold", "0.1")[1].splitlines()))
    assert [row["prediction"] for row in bold] == [
        "yes" if float(row["probability_yes"]) >= 0.1 else "no" for row in rows
    ]
    certain = list(csv.DictReader(coterie(*arguments, "--threshold", "0.8", "--positive", "no")[1].splitlines()))
    assert [row["prediction"] for row in certain] == [
        "no" if float(row["probability_no"]) >= 0.8 else "yes" for row in rows
    ]
    assert all(float(row["probability"]) == float(row[f"probability_{row['prediction']}"]) for row in certain)


@pytest.mark.parametrize(
    ("options", "words"), [(["--positive", "yes"], ["requires --threshold"]), (["--threshold", "-1"], ["from 0 to 1"])]
)
def test_a_decision_that_is_impossible_is_refused_in_one_line(hospital, coterie, options, words):
    folder, _ = hospital
    assert_refused(coterie("predict", folder / "run", folder / "client-0.csv", *options), *words)


def test_ids_belong_to_the_records_that_the_rules_keep(tmp_path, hospital):
    folder, _ = hospital
    (tmp_path / "new.csv").write_text("patient,a,outcome\nP1,0.1,no\nP2,oops\nP3,0.3,yes\n")
    models = load(folder / "run")
    with pytest.raises(ValueError, match="2 cells"):
        models.read(tmp_path / "new.csv", ids="patient")
    (tmp_path / "new.csv").write_text('patient,a,outcome\n"P\n1",0.1,no\n\nP3,0.3,yes\n')
    assert models.read(tmp_path / "new.csv", ids="patient").ids == ("P\n1", "P3")


def test_records_without_labels_cannot_be_evaluated(tmp_path, hospital):
    folder, _ = hospital
    (tmp_path / "blind.csv").write_text("patient,a\nP1,0.1\n")
    models = load(folder / "run")
    with pytest.raises(InferenceError, match="no labelled records"):
        models.evaluate(models.read(tmp_path / "blind.csv"), 0)


def test_models_that_diverged_have_no_metrics(tmp_path):
    from coterie.privacy import Streams
    from coterie.server.config import RunConfig
    from coterie.server.run import initial_models
    from coterie.server.simulated_scores import with_metrics

    config = RunConfig({"clients": 8, "rounds": 1, "seed": 0, "clusters": 1, "strategy": "fedavg"})
    models, layout = initial_models(config, Streams(0))
    scores = Diagnostics(accuracy=0.1, client_id=(0, 1), client_cluster=(0, 0))
    assert with_metrics(config, scores, models, layout, tmp_path, additive=False).evaluated_records
    models[:] = np.nan
    assert with_metrics(config, scores, models, layout, tmp_path, additive=False) == scores
