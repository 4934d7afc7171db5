"""Multi-label tables: schema, targets, runs, metrics and predictions."""

import csv
import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from kit.commands import assert_refused, document
from kit.own_files import read_shard
from kit.site_tables import rows_of, settings_on, simulated
from kit.tables import for_rows
from sklearn.metrics import average_precision_score, f1_score, roc_auc_score

from coterie.datasets import DataError, SchemaError, Source, TableSchema, read_table
from coterie.datasets.client_data import report
from coterie.datasets.own import Declared
from coterie.fields.plugins import PluginError
from coterie.fields.settings import ConfigError
from coterie.inference import load
from coterie.server import RunConfig
from coterie.server.simulate import prepare
from coterie.tasks import TaskError, encode_labels, multi_label
from coterie.tasks.performance import of_labels
from coterie.testing.training import check_loss

LABELS = ("diabetes", "anaemia", "copd")
SCHEMA = f"""version = 1
[labels]
columns = {list(LABELS)}
""" + "".join(f'[[columns]]\nname = "f{j}"\ntype = "number"\nmean = 0\nscale = 1\n' for j in range(4))
HEADS = [*(f"f{j}" for j in range(4)), *LABELS]
settings = partial(settings_on, rounds=3)


def write(path, n=60, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 4))
    labels = (x[:, :3] + 0.3 * rng.normal(size=(n, 3)) > [0.0, 0.5, 1.2]).astype(int)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(
            [HEADS, *([*row.round(3), *has] for row, has in zip(x, labels.tolist(), strict=True))]
        )


@pytest.fixture(scope="module")
def sites(tmp_path_factory):
    folder = tmp_path_factory.mktemp("labels")
    (folder / "schema.toml").write_text(SCHEMA)
    for site in range(4):
        write(folder / f"client-{site}.csv", seed=site)
    return folder


@pytest.fixture(scope="module")
def run(sites, tmp_path_factory):
    values = settings(sites, **{"privacy-unit": "none", "sampling-rate": 1.0, "model": "linear"})
    return simulated(tmp_path_factory.mktemp("run") / "run", values)


# ---- the schema and the targets ---------------------------------------------------------------------------


def test_a_schema_names_several_labels(sites):
    schema = TableSchema.parse(SCHEMA)
    assert TableSchema.parse(str(schema)) == schema
    assert (schema.task, schema.num_classes, schema.class_names) == (multi_label(3), 0, LABELS)
    assert schema.fingerprint != TableSchema.parse(SCHEMA.replace("anaemia", "asthma")).fingerprint
    table = read_table(sites / "client-0.csv", schema)
    rows = rows_of(sites / "client-0.csv")
    assert schema.task.bits(table.y).tolist() == [[int(row[name]) for name in LABELS] for row in rows]


@for_rows(
    ("old", "new", "words"),
    [
        (str([*LABELS]), '["diabetes"]', "list of at least 2 distinct"),
        (str([*LABELS]), '["a", "a"]', "distinct"),
        (str([*LABELS]), '["f0", "copd"]', "'f0' is named twice"),
        (str([*LABELS]), str([f"l{j}" for j in range(21)]), "columns has 21 entries; the limit is 20"),
        (str([*LABELS]), "3", "must be a list"),
        ("[labels]\n", '[labels]\nmissing = "mean"\n', "missing = 'mean'; must be 'error' or 'drop'"),
        ("[labels]\n", "[labels]\nclasses = [0, 1]\n", "unknown key 'classes'"),
        ("[labels]\n", '[target]\ncolumn = "y"\n[labels]\n', "must have one of [label]"),
    ],
)
def test_wrong_labels_are_named(old, new, words):
    with pytest.raises(SchemaError, match=re.escape(words)) as raised:
        TableSchema.parse(SCHEMA.replace(old, new))
    assert "\n" not in str(raised.value)


@for_rows(
    ("cells", "what"),
    [
        ("1,2,0", "'anaemia': not one of its values"),
        ("1,,0", "'anaemia': missing"),
        ("1,nan,0", "'anaemia': missing"),
        ("1,0.5,0", "'anaemia': not one of its values"),
        ("-1,0,0", "'diabetes': not one of its values"),
        ("1,0,maybe", "'copd': not one of its values"),
    ],
)
def test_a_record_whose_label_is_no_label_is_left_out_and_named(tmp_path, cells, what):
    path = tmp_path / "client-0.csv"
    path.write_text(f"{','.join(HEADS)}\n1,2,3,4,1,true,False\n1,2,3,4,{cells}\n0,0,0,0,0,0,0\n")
    table = read_table(path, TableSchema.parse(SCHEMA))
    assert table.y.tolist() == [3, 0]
    assert what.split(":")[1] in str(table.errors[0])
    assert table.errors[0].column == what.split("'")[1]
    with pytest.raises(DataError, match=table.errors[0].column):
        shard_of(path)
    left = shard_of(path, strict=False)
    assert sorted({*left.y.tolist(), *left.test.y.tolist()}) == [0, 3]


def shard_of(path, *, strict=True):
    schema = TableSchema.parse(SCHEMA)
    return read_shard(path, (4,), schema.task.num_targets, schema=schema, strict=strict)


def test_a_report_counts_sets_of_labels(sites):
    found = report(sites / "client-0.csv", Declared.of(str(sites / "schema.toml"), None, None, None)).classes
    assert set(found) <= {"none", *(" + ".join(s) for s in (LABELS, LABELS[:2], LABELS[1:], LABELS[::2])), *LABELS}
    assert sum(found.values()) == 60


def test_labels_of_a_library_are_encoded():
    bits = np.array([[0, 1, 1], [1, 0, 0]])
    y = encode_labels(bits)
    np.testing.assert_array_equal(multi_label(3).bits(y), bits)
    x = np.zeros((2, 5), np.float32)
    assert Source("mine", x, y, x, y, 3, predicts="multi-label").task == multi_label(3)
    with pytest.raises(DataError, match=r"labels span 1..6; allowed: 0..3"):
        Source("mine", x, y, x, y, 2, predicts="multi-label")
    with pytest.raises(DataError, match="task 'several': 3 outputs are those of multi-class"):
        Source("mine", x, y, x, y, 3, predicts="several")
    for wrong in (np.array([[0, 2]]), np.array([[0.0, np.nan]]), np.array([[0, -1]])):
        with pytest.raises(TaskError, match="labels must be 0 or 1"):
            encode_labels(wrong)
    for many in (1, 21):
        with pytest.raises(TaskError, match="has 2 to 20 labels"):
            multi_label(many)


def focal(outputs, targets):
    bits = (targets[:, None] >> torch.arange(outputs.shape[1]) & 1).to(outputs.dtype)
    nats = torch.nn.functional.binary_cross_entropy_with_logits(outputs, bits, reduction="none")
    return ((1 - torch.exp(-nats)) ** 2 * nats).mean(dim=1)


def test_a_loss_of_users_gets_the_targets_of_labels():
    check_loss(focal, 3, task="multi-label")
    with pytest.raises(PluginError):
        check_loss(torch.nn.functional.cross_entropy, 3, task="multi-label")


# ---- metrics ----------------------------------------------------------------------------------------------


def test_metrics_are_those_of_scikit_learn():
    rng = np.random.default_rng(0)
    truth, shares, weights = rng.integers(2, size=(50, 3)), rng.random((50, 3)), rng.random(50)
    found = of_labels(truth, shares, weights)
    areas = [roc_auc_score(truth[:, j], shares[:, j], sample_weight=weights) for j in range(3)]
    precisions = [average_precision_score(truth[:, j], shares[:, j], sample_weight=weights) for j in range(3)]
    f1 = [f1_score(truth[:, j], shares[:, j] >= 0.5, sample_weight=weights) for j in range(3)]
    np.testing.assert_allclose(found.label_roc_auc, areas)
    np.testing.assert_allclose(found.label_average_precision, precisions)
    np.testing.assert_allclose(found.label_f1, f1)
    np.testing.assert_allclose(
        [found.roc_auc, found.average_precision, found.macro_f1], [np.mean(v) for v in (areas, precisions, f1)]
    )


def test_a_label_that_all_records_have_has_no_area():
    truth = np.array([[1, 0], [1, 1], [1, 0]])
    found = of_labels(truth, np.full((3, 2), 0.5))
    assert np.isnan(found.label_roc_auc[0])
    assert found.roc_auc == found.label_roc_auc[1] == 0.5
    assert of_labels(np.ones((3, 2), int), np.full((3, 2), 0.9)).roc_auc is None


# ---- runs -------------------------------------------------------------------------------------------------


def test_a_run_learns_labels_and_states_their_metrics(run, sites, coterie):
    scores = json.loads((run / "diagnostics.json").read_text())
    assert scores["class_names"] == list(LABELS)
    assert min(scores["label_roc_auc"]) > 0.85
    assert scores["brier"] < scores["baseline_brier"]
    assert coterie("report", run, "--out", "page.html")[0] == 0
    page = Path("page.html").read_text()
    assert "Accuracy of labels" in page
    status, shown, _ = coterie("evaluate", run, sites / "client-0.csv", "--held-out")
    assert status == 0
    assert "anaemia" in shown
    assert "average precision" in shown


def test_predictions_have_every_label(run, sites, coterie):
    status, _, notes = coterie("predict", run, sites / "client-1.csv", "--out", "p.csv")
    assert status == 0
    assert "of the predicted labels agree" in notes
    rows = rows_of(Path("p.csv"))
    assert [*rows[0]] == [
        "record",
        "cluster",
        *(f"{what}_{n}" for what in ("prediction", "probability") for n in LABELS),
    ]
    assert all((float(r["probability_copd"]) > 0.5) == (r["prediction_copd"] == "1") for r in rows)
    models = load(run)
    assert models.predict(models.read(sites / "client-1.csv").x, 0).shape == (60, 3)
    assert models.assign(models.read(sites / "client-1.csv")).cluster == 0


@pytest.mark.parametrize("method", ["last-layer", "all", "mixture"])
def test_a_site_fits_a_model_of_labels_to_its_records(run, sites, method):
    models = load(run)
    own = models.read(sites / "client-2.csv")
    fitted = models.personalised(own, 0, method)
    assert fitted.evaluate(own, 0).log_loss <= models.evaluate(own, 0).log_loss + 0.05


def test_a_check_states_each_label(sites, coterie):
    words = "data", "check", sites / "client-0.csv", "--schema", sites / "schema.toml"
    assert "labels: diabetes" in coterie(*words)[1]
    (entry,) = document(coterie(*words, "--json")[1])["files"].values()
    rows = rows_of(sites / "client-0.csv")
    assert entry["labels"] == {name: sum(row[name] == "1" for row in rows) for name in LABELS}


DIGITS = """
import numpy as np
from sklearn.datasets import load_digits

from coterie.datasets import Source
from coterie.tasks import encode_labels


def split(x, y, n, task):
    return Source("mine", x[:1200], y[:1200], x[1200:], y[1200:], n, predicts=task)


def labels():
    digits = load_digits()
    x = (digits.images[:, None] / 16).astype(np.float32)
    has = np.stack([digits.target % 2, digits.target >= 5, np.isin(digits.target, (0, 6, 8, 9))], axis=1)
    return split(x, encode_labels(has), 3, "multi-label")
"""


@pytest.fixture
def library(tmp_path, monkeypatch):
    (tmp_path / "own_tasks.py").write_text(DIGITS)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize(
    ("least", "more"),
    [
        (0.85, {"privacy-unit": "none", "groups": "2", "shift": "rotation-90"}),
        (0.6, {"privacy-unit": "record", "epsilon": 8, "samples-per-client": 60, "class-weights": "1,2,4"}),
    ],
)
def test_a_data_set_of_a_library_states_its_task(library, tmp_path, least, more):
    values = {"dataset": "own_tasks:labels", "clients": 12, "rounds": 4, "strategy": "fedavg", "seed": 1}
    values |= {"sampling-rate": 1.0, "lr": 0.3, "shift": "none", "groups": "1", **more}
    folder = simulated(tmp_path / "run", values)
    scores = json.loads((folder / "diagnostics.json").read_text())
    assert scores["roc_auc"] > least
    models = load(folder)
    assert models.task == replace(multi_label(3), weights=(1.0, 2.0, 4.0) if "class-weights" in more else ())
    assert models.card.task == "multi-label"


@for_rows(
    ("more", "message"),
    [
        ({"label-skew": "dirichlet:0.5"}, "label-skew = dirichlet:0.5 requires classes, but mine has 3 labels"),
        ({"shift": "label-shift", "groups": "3"}, "'label-shift' requires labels of classes"),
        ({"shift": "label-permutation", "groups": "3"}, "'label-permutation' requires labels of classes"),
        ({"shift": "lines"}, "'lines' requires points with real targets"),
    ],
)
def test_partitions_and_shifts_by_class_are_refused(library, tmp_path, more, message):
    values = {"dataset": "own_tasks:labels", "clients": 12, "rounds": 1, "strategy": "fedavg", "seed": 1, **more}
    with pytest.raises((DataError, ConfigError), match=message) as raised:
        prepare(RunConfig(values))
    assert "\n" not in str(raised.value)


@for_rows(
    ("more", "message"),
    [
        ({"task": "multi-class"}, "task = 'multi-class': the data have 3 labels, whose task is multi-label"),
        ({"strategy": "kfed"}, "kfed compares clusters of records with classes, but the data have 3 labels"),
        ({"class-weights": "1,2"}, "class-weights = '1,2': one number, or one for each of 3 labels, is required"),
        ({"evaluate": "private", "score-share": 0.1}, "the task is to predict 3 labels, not two to 10 classes"),
        ({"num-classes": 8}, "num-classes = 8: the table-schema makes it 3"),
    ],
)
def test_what_needs_classes_is_refused_in_one_line(sites, more, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        RunConfig(settings(sites, **more))
    assert "\n" not in str(raised.value)


def test_personalisation_by_shares_of_classes_is_refused(sites, coterie):
    words = [
        word for pair in settings(sites, personalize="prior").items() for word in ("--set", "=".join(map(str, pair)))
    ]
    assert_refused(coterie("run", *words, "--out", "r"), "the task is multi-label")
