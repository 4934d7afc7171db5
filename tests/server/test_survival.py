"""Times until an event: schema, targets, likelihood, concordance, runs and predictions."""

import csv
import json
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from kit.commands import document
from kit.site_tables import rows_of, settings_on, simulated

from coterie import models as networks
from coterie.client import dpsgd
from coterie.client.backend import Examples
from coterie.datasets import DataError, SchemaError, Source, TableSchema, own_shard, read_table
from coterie.fields.settings import ConfigError
from coterie.inference import load
from coterie.server import RunConfig
from coterie.tasks import TaskError, encode_times, survival
from coterie.tasks.performance import concordance, of_times

EDGES = (30.0, 90.0, 180.0)
SCHEMA = """version = 1
[survival]
time = "days"
event = "died"
time-bins = [30, 90, 180]
""" + "".join(f'[[columns]]\nname = "f{j}"\ntype = "number"\nmean = 0\nscale = 1\n' for j in range(3))
HEADS = [*(f"f{j}" for j in range(3)), "days", "died"]
settings = partial(settings_on, rounds=6)


def write(path, n=80, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 3))
    times = rng.exponential(100 * np.exp(-1.2 * x[:, 0]))
    censored = rng.exponential(200, size=n)
    days, died = np.minimum(times, censored).round(1), times <= censored
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(
            [HEADS, *([*row.round(3), *end] for row, *end in zip(x, days, died * 1, strict=True))]
        )


@pytest.fixture(scope="module")
def sites(tmp_path_factory):
    folder = tmp_path_factory.mktemp("times")
    (folder / "schema.toml").write_text(SCHEMA)
    for site in range(4):
        write(folder / f"client-{site}.csv", seed=site)
    return folder


@pytest.fixture(scope="module")
def run(sites, tmp_path_factory):
    values = settings(sites, **{"privacy-unit": "none", "sampling-rate": 1.0, "model": "linear"})
    return simulated(tmp_path_factory.mktemp("run") / "run", values)


# ---- the schema and the targets ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("days", "died", "free", "event"),
    [
        (0, 1, 0, 1),
        (0, 0, 0, 0),
        (29.9, 1, 0, 1),
        (30, 1, 0, 1),  # bins hold their ends
        (30, 0, 1, 0),  # free of the event for the whole bin
        (29.9, 0, 0, 0),
        (30.1, 1, 1, 1),
        (180, 1, 2, 1),
        (180, 0, 3, 0),
        (500, 1, 3, 0),  # an event after the last bin is none within the bins
        (500, 0, 3, 0),
    ],
)
def test_a_time_becomes_the_bins_without_the_event(tmp_path, days, died, free, event):
    path = tmp_path / "client-0.csv"
    path.write_text(f"{','.join(HEADS)}\n1,2,3,{days},{died}\n")
    schema = TableSchema.parse(SCHEMA)
    assert read_table(path, schema).y.tolist() == [2 * free + event]
    assert encode_times(np.array([days]), np.array([died]), EDGES).tolist() == [2 * free + event]
    assert survival(EDGES).target_names(())[2 * free + event].startswith("event" if event else "censored")


@pytest.mark.parametrize(
    ("cells", "column", "what"),
    [
        ("-1,1", "days", "below 0"),
        ("nan,1", "days", "missing"),
        (",1", "days", "missing"),
        ("inf,1", "days", ""),
        ("soon,1", "days", "not a number"),
        (">90,0", "days", "not a number"),
        ("5,2", "died", "not one of its values"),
        ("5,", "died", "missing"),
        ("5,0.5", "died", "not one of its values"),
    ],
)
def test_a_record_without_a_time_is_left_out_and_named(tmp_path, cells, column, what):
    path = tmp_path / "client-0.csv"
    path.write_text(f"{','.join(HEADS)}\n1,2,3,4,true\n1,2,3,{cells}\n0,0,0,100,0\n")
    schema = TableSchema.parse(SCHEMA)
    table = read_table(path, schema)
    assert table.y.tolist() == [1, 4]
    assert table.errors[0].column == column
    assert what in str(table.errors[0])
    with pytest.raises(DataError, match=column):
        own_shard(str(path), 0, (3,), schema.task.num_targets, None, schema=schema)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[30, 90, 180]", "[]", "time-bins = []: the ends of bins must be 1 to 1000 finite numbers above 0"),
        ("[30, 90, 180]", "[30, 30]", "each larger than the last"),
        ("[30, 90, 180]", "[0, 30]", "above 0"),
        ("[30, 90, 180]", "[30, inf]", "finite numbers"),
        ("[30, 90, 180]", '[30, "x"]', "time-bins = "),
        ("[30, 90, 180]", "30", "time-bins = 30"),
        ("time-bins = [30, 90, 180]", "", "time-bins = "),
        ('event = "died"', 'event = "days"', "'days' is named twice"),
        ('event = "died"', "", "event is missing"),
        ("[survival]", "[survival]\nmean = 3", "unknown key 'mean'"),
    ],
)
def test_a_wrong_declaration_is_named(old, new, words):
    with pytest.raises(SchemaError, match=re.escape(words)) as raised:
        TableSchema.parse(SCHEMA.replace(old, new))
    assert "\n" not in str(raised.value)


def test_a_schema_of_times_is_a_contract():
    schema = TableSchema.parse(SCHEMA)
    assert TableSchema.parse(str(schema)) == schema
    assert schema.task == survival(EDGES)
    assert schema.fingerprint != TableSchema.parse(SCHEMA.replace("180", "181")).fingerprint


def test_wrong_times_of_a_library_are_refused():
    for time, event in (([-1.0], [1]), ([np.nan], [1]), ([np.inf], [0]), ([1.0], [2]), ([1.0], [np.nan])):
        with pytest.raises(TaskError):
            encode_times(np.array(time), np.array(event), EDGES)
    x, y = np.zeros((2, 3), np.float32), np.array([0, 6])
    assert Source("mine", x, y, x, y, 3, predicts="survival").task.num_targets == 7
    with pytest.raises(DataError, match=r"labels span 0..6; allowed: 0..4"):
        Source("mine", x, y, x, y, 2, predicts="survival")


# ---- likelihood and metrics -------------------------------------------------------------------------------


def test_the_loss_is_the_likelihood_of_a_censored_time():
    task, outputs = survival(EDGES), torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
    hazard = torch.sigmoid(outputs).double().numpy()
    likelihoods = []
    for target, row in zip(range(7), hazard, strict=True):
        free, event = divmod(target, 2)
        likelihoods.append(np.prod(1 - row[:free]) * (row[free] if event else 1.0))
    np.testing.assert_allclose(task(outputs, torch.arange(7)).numpy(), -np.log(likelihoods), rtol=1e-5)


def test_probabilities_of_all_ends_sum_to_one():
    task, outputs = survival(EDGES), torch.randn(1, 3)
    ends = torch.tensor([1, 3, 5, 6])  # the event in each bin, or after all of them
    total = torch.exp(-task(outputs.expand(4, 3), ends)).sum()
    assert float(total) == pytest.approx(1.0, abs=1e-6)


def brute_force(risks, free, event, weights):
    right = total = 0.0
    for i in range(len(risks)):
        for j in range(len(risks)):
            if event[i] and free[j] > free[i]:
                total += weights[i] * weights[j]
                right += weights[i] * weights[j] * ((risks[i] > risks[j]) + 0.5 * (risks[i] == risks[j]))
    return right / total if total else None


@pytest.mark.parametrize("seed", range(5))
def test_concordance_is_that_of_all_pairs(seed):
    rng = np.random.default_rng(seed)
    risks, free = rng.integers(6, size=60) / 3, rng.integers(5, size=60)
    event, weights = rng.integers(2, size=60) * (free < 4), rng.random(60) * rng.integers(2, size=60)
    for weight in (weights, np.ones(60)):
        assert concordance(risks, free, event, weight) == pytest.approx(brute_force(risks, free, event, weight))
    assert concordance(-risks, free, event) == pytest.approx(1 - concordance(risks, free, event))


def test_without_a_comparable_pair_there_is_no_concordance():
    censored = of_times(np.array([1, 2, 3]), np.zeros(3, int), np.full((3, 3), 0.1))
    assert censored.concordance is None
    assert censored.survival == (1.0, 1.0, 1.0)
    assert of_times(np.zeros(3, int), np.ones(3, int), np.full((3, 3), 0.1)).concordance is None
    task = survival(EDGES)
    assert task.score(np.zeros(3), np.array([2, 4, 6])) == 0.5


def test_the_baseline_is_the_kaplan_meier_curve():
    rng = np.random.default_rng(0)
    free, event = rng.integers(4, size=200), rng.integers(2, size=200)
    event = event * (free < 3)
    curve, left = [], 1.0
    for j in range(3):
        at_risk = (free > j) | ((free == j) & (event > 0))
        left *= 1 - ((free == j) & (event > 0)).sum() / at_risk.sum()
        curve.append(left)
    found = of_times(free, event, np.full((200, 3), 0.2))
    np.testing.assert_allclose(found.survival, curve)
    hazards = 1 - np.array(curve) / np.array([1.0, *curve[:-1]])
    assert found.baseline_log_loss == pytest.approx(of_times(free, event, np.tile(hazards, (200, 1))).log_loss)
    assert found.baseline_log_loss < found.log_loss  # no constant has a larger likelihood


def test_the_target_of_a_check_of_times_has_a_gradient_at_every_output():
    """That of a record which is censored at once has none, so that the check would compare zeros."""
    task = survival(EDGES)
    records = dpsgd._random_records(Examples((4,), torch.float32, torch.int64, "cpu"), task)
    gradients = dpsgd.BatchesOfOne(networks.build("linear", (4,), 3), task).gradients(*records)
    assert all(bool(gradient.flatten(1).any(dim=1).all()) for gradient in gradients)


# ---- runs -------------------------------------------------------------------------------------------------


def test_a_run_learns_times(run, sites, coterie):
    scores = json.loads((run / "diagnostics.json").read_text())
    assert scores["concordance"] > 0.65
    assert scores["log_loss"] < scores["baseline_log_loss"]
    assert 0.5 < scores["accuracy"] <= 1
    assert coterie("report", run, "--out", "page.html")[0] == 0
    assert "Concordance" in Path("page.html").read_text()
    status, shown, _ = coterie("evaluate", run, sites / "client-0.csv", "--held-out")
    assert status == 0
    assert "concordance index" in shown


def test_predictions_are_probabilities_of_survival(run, sites, coterie):
    status, _, notes = coterie("predict", run, sites / "client-1.csv", "--out", "p.csv")
    assert status == 0
    assert "concordance 0." in notes
    rows = rows_of(Path("p.csv"))
    assert [*rows[0]] == ["record", "cluster", "survival_30", "survival_90", "survival_180"]
    assert all(1 >= float(r["survival_30"]) >= float(r["survival_90"]) >= float(r["survival_180"]) >= 0 for r in rows)


@pytest.mark.parametrize("method", ["last-layer", "mixture"])
def test_a_site_fits_a_model_of_times_to_its_records(run, sites, method):
    models = load(run)
    own = models.read(sites / "client-2.csv")
    assert models.personalised(own, 0, method).evaluate(own, 0).log_loss <= models.evaluate(own, 0).log_loss + 0.05


def test_a_run_at_record_level_trains_on_times(sites, tmp_path):
    more = {"privacy-unit": "record", "epsilon": 8, "samples-per-client": 60, "batch-size": 20, "task": "survival"}
    simulated(tmp_path / "run", settings(sites, **more))
    assert json.loads((tmp_path / "run" / "privacy.json").read_text())["unit"] == "record"
    assert load(tmp_path / "run").task == survival(EDGES)


def test_sites_whose_times_are_all_censored_train_and_say_so(sites, tmp_path, coterie):
    for site in range(4):
        rows = rows_of(sites / f"client-{site}.csv")
        lines = [",".join([*(row[head] for head in HEADS[:-1]), "0"]) for row in rows]
        (tmp_path / f"client-{site}.csv").write_text("\n".join([",".join(HEADS), *lines]) + "\n")
    (tmp_path / "schema.toml").write_text(SCHEMA)
    folder = simulated(tmp_path / "run", settings(tmp_path, **{"privacy-unit": "none", "model": "linear"}))
    scores = json.loads((folder / "diagnostics.json").read_text())
    assert "concordance" not in scores
    assert scores["accuracy"] == 0.5
    words = "data", "check", tmp_path / "client-0.csv", "--schema", tmp_path / "schema.toml"
    (entry,) = document(coterie(*words, "--json")[1])["files"].values()
    assert entry["events"] == {"until 30": 0, "until 90": 0, "until 180": 0, "censored": 80}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"task": "regression"}, "task = 'regression': the data have times in 3 bins, whose task is survival"),
        ({"strategy": "ffcm"}, "but the data have times in 3 bins"),
        ({"pos-weight": "2"}, "survival has no weights; leave it out"),
        ({"evaluate": "private", "score-share": 0.1}, "the task is to predict times in 3 bins, not two to 10 classes"),
    ],
)
def test_what_needs_classes_is_refused_in_one_line(sites, more, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        RunConfig(settings(sites, **more))
    assert "\n" not in str(raised.value)
