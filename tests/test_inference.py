"""Models are used again as they were evaluated: loading, prediction, assignment, export, and damaged files."""

import csv
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from kit.commands import assert_refused, document
from kit.run_folders import execute
from kit.site_tables import AGE, SEX
from kit.tables import for_rows
from safetensors.numpy import load_file, save_file
from sklearn.datasets import load_digits

import coterie as package
from coterie.datasets import DataError, Facts, TableSchema
from coterie.datasets.local_files import local_records
from coterie.fields import PERSONAL_METHODS
from coterie.inference import InferenceError
from coterie.models import MODELS, initialise
from coterie.tasks import task_of
from coterie.wire.model_card import ModelCard

CLIENTS = 4
CARD = {
    "strategy": "ifca",
    "dataset": "own",
    "model": "linear",
    "features": "none",
    "kind": "vectors",
    "shape": [3],
    "num-classes": 2,
    "cluster": 0,
    "clusters": 1,
    "scaling": "none",
    "rounds": 1,
    "unit": "none",
    "certificate": "0" * 64,
    "version": "0",
}


@pytest.fixture(scope="module")
def sites(tmp_path_factory):
    """A folder with digits of four clients, upright and upside down in turn, and their test images once more."""
    folder, digits = tmp_path_factory.mktemp("sites"), load_digits()
    images = (digits.images * 255 / 16).astype(np.uint8)[:, None]
    order = np.random.default_rng(0).permutation(len(images))
    for client in range(CLIENTS):
        rows = order[client * 200 : (client + 1) * 200]
        x, y = np.rot90(images[rows], 2 * (client % 2), axes=(2, 3)), digits.target[rows]
        np.savez(folder / f"client-{client}.npz", x=x[:150], y=y[:150], x_test=x[150:], y_test=y[150:])
        np.savez(folder / f"test-{client}.npz", x=x[150:], y=y[150:])
        np.savez(folder / f"blind-{client}.npz", x=x[150:])
    return folder


@pytest.fixture(scope="module")
def trained(sites, tmp_path_factory):
    """Trains once for each set of options; returns the run folder."""
    made = {}

    def train(**changes):
        key = json.dumps(changes, sort_keys=True)
        if key not in made:
            values = {"dataset": "own", "input-shape": "1x8x8", "num-classes": 10, "data-dir": str(sites), "seed": 1}
            values |= {"clients": CLIENTS, "clusters": 2, "rounds": 12, "sampling-rate": 1.0, "privacy-unit": "none"}
            values |= {"local-epochs": 2, "reseed-every": 0} if "strategy" not in changes else {}
            values |= {name.replace("_", "-"): value for name, value in changes.items()}
            path = tmp_path_factory.mktemp("run") / "run"
            execute(path, {name: value for name, value in values.items() if value is not None})
            made[key] = path
        return made[key]

    return train


def exact(run):
    return json.loads((run / "diagnostics.json").read_text())


#: Calls the command with each of the lists of words on standard input; what each call writes, as one list.
CALLS = """
import contextlib, io, json, sys
from coterie.cli import main

answers = []
for words in json.load(sys.stdin):
    sys.argv, written = ["coterie", *words], io.StringIO()
    with contextlib.redirect_stdout(written), contextlib.suppress(SystemExit):
        main()
    answers.append(written.getvalue())
print(json.dumps(answers))
"""


def predicted(calls, cwd):
    """The rows that the command writes for each (run, file, site), in a process of its own, in another folder."""
    done = subprocess.run(
        [sys.executable, "-c", CALLS],
        input=json.dumps([["predict", str(run), str(file), "--site", str(site)] for run, file, site in calls]),
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return [list(csv.DictReader(answer.splitlines())) for answer in json.loads(done.stdout)]


@pytest.mark.slow
def test_predictions_of_another_process_equal_the_run_s_own_evaluation(trained, sites, tmp_path):
    networks = [{"model": "cnn-tiny", "rounds": 4}, {"strategy": "fedcam", "rounds": 4}]
    runs = [trained(**changes) for changes in [{}, {}, *networks, {"strategy": "fedavg", "clusters": 1}]]
    clients = [CLIENTS - 1, *[0] * (len(runs) - 1)]
    calls = [(run, sites / f"blind-{client}.npz", client) for run, client in zip(runs, clients, strict=True)]
    for (run, _, client), rows in zip(calls, predicted(calls, tmp_path), strict=True):
        known = exact(run)
        assert known["client_id"] == list(range(CLIENTS))
        truth = np.load(sites / f"test-{client}.npz")["y"]
        assert [int(row["record"]) for row in rows] == list(range(len(truth)))
        assert {int(row["cluster"]) for row in rows} == {known["client_cluster"][client]}
        hits = np.mean([int(row["prediction"]) == label for row, label in zip(rows, truth, strict=True)])
        assert hits == pytest.approx(known["client_accuracy"][client], abs=1e-12)
        assert all(0.1 <= float(row["probability"]) <= 1 for row in rows)


def test_personal_layers_of_a_site_complete_its_model(trained, sites):
    run = trained(strategy="fedper", clusters=1, rounds=4)
    with pytest.raises(InferenceError, match=r"output.weight, output.bias of fedper are personal: name a site"):
        package.load(run)
    with pytest.raises(InferenceError, match="no personal layers of site 9"):
        package.load(run, site=9)
    for client in (0, 1):
        models = package.load(run, site=client)
        records = models.read(sites / f"test-{client}.npz")
        hits = np.mean(models.predict(records.x, 0) == records.y)
        assert hits == pytest.approx(exact(run)["client_accuracy"][client], abs=1e-12)


def test_new_records_are_assigned_to_the_model_of_their_group(trained, sites):
    run = trained()
    models = package.load(run)
    known = exact(run)["client_cluster"]
    assert known[0] == known[2] != known[1] == known[3]
    for client in range(CLIENTS):
        found = models.assign(models.read(sites / f"client-{client}.npz"))
        assert found.cluster == known[client] == models.cluster_of(client)
        assert found.losses[found.cluster] == min(found.losses) == pytest.approx(exact(run)["client_loss"][client])
        assert found.records == 150
    with pytest.raises(InferenceError, match="no labelled records"):
        models.assign(models.read(sites / "blind-0.npz"))
    with pytest.raises(InferenceError, match=r"site 9 is not in result.json \(known sites: 0, 1, 2, 3\)"):
        models.cluster_of(9)
    with pytest.raises(InferenceError, match="cluster 2 does not exist: clusters are 0 to 1"):
        models.predict(models.read(sites / "blind-0.npz").x, 2)


def test_a_site_fits_a_released_model_to_its_own_records(trained, sites, coterie, tmp_path):
    run = trained(strategy="fedavg", clusters=1, rounds=2)
    few = np.load(sites / "client-1.npz")
    rows = np.flatnonzero(few["y"] < 3)
    np.savez(tmp_path / "own.npz", x=few["x"][rows[:-20]], y=few["y"][rows[:-20]])
    np.savez(tmp_path / "test.npz", x=few["x"][rows[-20:]], y=few["y"][rows[-20:]])
    np.savez(tmp_path / "blind.npz", x=few["x"][rows[-20:]])
    models = package.load(run)
    before = [dict(models[0].state_dict()), models.folder.joinpath("cluster-0.safetensors").read_bytes()]
    own, test = models.read(tmp_path / "own.npz"), models.read(tmp_path / "test.npz")
    hits, answers = {"released": np.mean(models.predict(test.x, 0) == test.y)}, {}
    for method in PERSONAL_METHODS:
        personal = models.personalised(own, 0, method)
        hits[method] = np.mean(personal.predict(test.x, 0) == test.y)
        again = models.personalised(own, 0, method)
        torch.testing.assert_close(personal[0].state_dict(), again[0].state_dict(), rtol=0, atol=0)
        words = (run, tmp_path / "blind.npz", "--own", tmp_path / "own.npz", "--personalize", method)
        status, answers[method], _ = coterie("predict", *words)
        assert status == 0
        labels = [int(row["prediction"]) for row in csv.DictReader(answers[method].splitlines())]
        np.testing.assert_array_equal(labels, personal.predict(test.x, 0))
    assert min(hits[method] for method in PERSONAL_METHODS) > hits["released"]
    torch.testing.assert_close(dict(models[0].state_dict()), before[0], rtol=0, atol=0)
    assert models.folder.joinpath("cluster-0.safetensors").read_bytes() == before[1]
    default = coterie("predict", run, tmp_path / "blind.npz", "--own", tmp_path / "own.npz")[1]
    assert default == answers["last-layer"]


def test_own_records_choose_the_cluster_that_is_fitted(trained, sites, coterie):
    run = trained()
    for client in (0, 1):
        _, out, _ = coterie("predict", run, sites / f"blind-{client}.npz", "--own", sites / f"client-{client}.npz")
        assert {int(row["cluster"]) for row in csv.DictReader(out.splitlines())} == {
            exact(run)["client_cluster"][client]
        }


def test_a_model_that_cannot_be_fitted_is_refused_in_one_line(trained, sites, coterie, tmp_path):
    run, file = trained(), sites / "blind-0.npz"
    assert_refused(coterie("predict", run, file, "--personalize", "prior"), "requires --own OWN")
    own = ("--own", sites / "client-0.npz")
    assert_refused(
        coterie("predict", run, file, *own, "--personalize", "head"), "it must be last-layer, all, prior, mixture"
    )
    assert_refused(coterie("predict", run, file, "--own", file), "no labels to choose by")
    assert_refused(coterie("predict", run, file, "--own", file, "--cluster", 0), "has no labelled records")
    assert_refused(coterie("predict", run, file, *own, "--cluster", 5), "cluster 5 does not exist")
    bare = package.load(run / "models")
    bare.folder = tmp_path / "models"
    for method in ("all", "mixture"):
        with pytest.raises(InferenceError, match=rf"{method}' takes lr and batch-size from config\.toml of the run"):
            bare.personalised(bare.read(sites / "client-0.npz"), 0, method)
    numbers = trained(strategy="kfed", clusters=3, rounds=1, privacy_unit=None, sampling_rate=None)
    models = package.load(numbers)
    with pytest.raises(InferenceError, match="trains no model that a site could fit"):
        models.personalised(models.read(sites / "client-1.npz"), 0)


def test_the_card_describes_the_run(trained):
    run = trained()
    models = package.load(run)
    guarantee = json.loads((run / "privacy.json").read_text())
    assert [card.cluster for card in models.cards] == [0, 1]
    card = models.card
    assert (card.strategy, card.dataset, card.model, card.shape, card.num_classes) == (
        "ifca",
        "own",
        "mlp-32",
        (1, 8, 8),
        10,
    )
    assert (card.unit, card.epsilon, card.certified, card.rounds) == ("none", None, guarantee["certified"], 12)
    assert card.scaling.endswith("to [-1, 1]")
    assert isinstance(models[0], torch.nn.Module)
    assert not models[0].training
    assert len(models) == len(list(models)) == len(models[:]) == 2
    shutil_free = package.load(run / "models")  # a copy of the model files alone
    assert shutil_free.sites == {}
    torch.testing.assert_close(shutil_free[1].state_dict(), models[1].state_dict(), rtol=0, atol=0)


def test_a_private_run_s_card_names_its_certificate(trained):
    from hashlib import sha256

    run = trained(privacy_unit="client", seed=None, epsilon=8, evaluate="off", rounds=2)
    card = package.load(run).card
    guarantee = json.loads((run / "privacy.json").read_text())
    assert card.certified
    assert (card.epsilon, card.delta) == (guarantee["epsilon"], guarantee["delta"])
    assert card.certificate == sha256((run / "privacy.json").read_bytes()).hexdigest()
    assert "sites" not in json.loads((run / "result.json").read_text())  # labels are secret
    with pytest.raises(InferenceError, match="site 0 is not released under client-level privacy"):
        package.load(run).cluster_of(0)


RECORD_LEVEL = {"privacy_unit": "record", "seed": None, "epsilon": 30, "delta": 1e-3, "rounds": 4}
RECORD_LEVEL |= {"samples_per_client": 150, "first_round_noise_ratio": 1}


@for_rows("strategy", ["rc-dpfl", "lcfl"])
def test_clusters_of_sites_are_published_at_record_level(trained, strategy):
    run = trained(strategy=strategy, **RECORD_LEVEL)
    sites = json.loads((run / "result.json").read_text())["sites"]
    assert [site["client"] for site in sites] == list(range(CLIENTS))
    assert {site["cluster"] for site in sites} <= {0, 1}
    assert package.load(run).sites == {site["client"]: site["cluster"] for site in sites}


def test_at_record_level_a_site_finds_the_model_of_its_own_evaluation(trained, sites, coterie):
    """Released labels are noisy; clients evaluate the model that fits their training data best."""
    run = trained(strategy="rc-dpfl", **RECORD_LEVEL)
    accuracies = []
    for client in range(CLIENTS):
        truth = np.load(sites / f"test-{client}.npz")["y"]
        fits = document(coterie("assign", run, sites / f"client-{client}.npz", "--json")[1])["cluster"]
        status, out, _ = coterie("predict", run, sites / f"blind-{client}.npz", "--cluster", fits)
        assert status == 0
        rows = csv.DictReader(out.splitlines())
        accuracies.append(np.mean([int(row["prediction"]) == label for row, label in zip(rows, truth, strict=True)]))
    assert np.mean(accuracies) == pytest.approx(exact(run)["accuracy"], abs=1e-12)
    assert min(accuracies) == pytest.approx(exact(run)["worst_client_accuracy"], abs=1e-12)
    _, _, err = coterie("predict", run, sites / "blind-0.npz", "--site", 0)
    assert "the cluster of site 0 is the one that the run released under noise" in err
    assert "coterie assign" in err


def test_records_are_labelled_by_one_shot_methods(trained, sites, coterie):
    run = trained(strategy="kfed", clusters=3, rounds=1, privacy_unit=None, sampling_rate=None)
    models = package.load(run)
    assert len(models) == 1
    labels = models.predict(models.read(sites / "client-1.npz").x, 0)
    stored = load_file(run / "clients" / "client-1.safetensors")["labels"]
    np.testing.assert_array_equal(labels, stored)
    status, out, _ = coterie("assign", run, sites / "client-1.npz", "--json")
    assert (status, document(out)) == (0, {"clusters": np.bincount(stored, minlength=3).tolist(), "records": 150})
    with pytest.raises(InferenceError, match="kfed clusters records, not sites"):
        models.assign(models.read(sites / "client-1.npz"))


def test_real_targets_are_predicted_as_numbers(tmp_path, trained):
    rng = np.random.default_rng(0)
    for client in range(CLIENTS):
        x = rng.normal(size=(200, 3))
        rows = np.column_stack([x, x @ [1, -2, 0.5] + 0.01 * rng.normal(size=200)])
        np.savetxt(tmp_path / f"client-{client}.csv", rows, delimiter=",", header="a,b,c,target", comments="")
    np.savetxt(tmp_path / "blind.csv", np.eye(3), delimiter=",", header="a,b,c", comments="")
    run = trained(data_dir=str(tmp_path), input_shape="3", num_classes=0, clusters=1, strategy="fedavg", lr=0.1)
    models = package.load(run)
    found = models.predict(models.read(tmp_path / "blind.csv").x, 0)
    assert found == pytest.approx([1, -2, 0.5], abs=0.05)
    assert models.assign(models.read(tmp_path / "client-0.csv")).losses[0] < 0.01


TABLE_SCHEMA = 'version = 1\n[target]\ncolumn = "days"\nmean = 1000\nscale = 500\n' + AGE + 'missing = "drop"\n' + SEX


def test_tables_are_read_by_the_schema_in_the_card(tmp_path, trained, coterie):
    """Raw units in, raw units out, and numbers of records as in the file."""
    rng = np.random.default_rng(0)
    for client in range(CLIENTS):
        age, sex = rng.uniform(20, 80, 200), rng.integers(0, 2, 200)
        rows = [f"{a:.6f},{'fm'[s]},{1000 + 20 * (a - 50) + 300 * s:.6f}" for a, s in zip(age, sex, strict=True)]
        (tmp_path / f"client-{client}.csv").write_text("\n".join(["age,sex,days", *rows, ""]))
    (tmp_path / "s.toml").write_text(TABLE_SCHEMA)
    run = trained(
        data_dir=str(tmp_path),
        table_schema=str(tmp_path / "s.toml"),
        input_shape=None,
        num_classes=None,
        clusters=1,
        strategy="fedavg",
        lr=0.1,
        rounds=20,
    )
    models = package.load(run)
    card = models.card
    assert (card.columns, card.classes, card.shape) == (("age", "sex = f", "sex = m"), None, (3,))
    assert card.scaling == "by the schema of the table"
    (tmp_path / "s.toml").unlink()
    (tmp_path / "new.csv").write_text("sex,age\nf,50\nm,\nm,150\nm,60\n")
    status, out, _ = coterie("predict", run, "new.csv")
    assert status == 0
    rows = list(csv.DictReader(out.splitlines()))
    assert [row["record"] for row in rows] == ["0", "2", "3"]  # the second has no age, and is dropped by the schema
    assert [float(row["prediction"]) for row in rows] == pytest.approx([1000, 2300, 1500], abs=30)
    (tmp_path / "some.csv").write_text("sex,age,days\nf,50,\nm,60,1500\n")  # a label is missing
    assert models.read(tmp_path / "some.csv").y is None
    assert models.read(tmp_path / "client-0.csv").y.shape == (200,)
    assert "root mean squared error" in coterie("predict", run, "client-0.csv")[2]
    (tmp_path / "german.csv").write_text("sex;age\nf;50,5\n")
    assert_refused(coterie("predict", run, "german.csv"), "would be", "coterie data check")
    (tmp_path / "own.toml").write_text(f'{TABLE_SCHEMA}[file]\ndecimal = ","\n')
    assert coterie("predict", run, "german.csv", "--schema", "own.toml")[0] == 0
    (tmp_path / "own.toml").write_text(TABLE_SCHEMA.replace("mean = 50", "mean = 51"))
    assert_refused(coterie("predict", run, "german.csv", "--schema", "own.toml"), "is not the schema of these models")
    (tmp_path / "gaps.csv").write_text("sex,age\nf,\n")
    assert_refused(coterie("predict", run, "gaps.csv"), "gaps.csv: no usable records")


def test_a_card_whose_schema_does_not_fit_is_refused():
    with pytest.raises(DataError, match=r"the models expect .* but their schema has 3 features"):
        local_records("t.csv", Facts("vectors", (4,), task_of(0), TableSchema.parse(TABLE_SCHEMA)), None)


# ---- the command ------------------------------------------------------------------------------------------


def test_the_command_says_what_it_did_and_what_it_needs(trained, sites, coterie, tmp_path):
    run = trained()
    status, out, err = coterie("predict", run, sites / "client-0.npz", "--out", "found.csv")
    assert (status, out) == (0, "")
    assert "also has 50 test records, which are not read" in err
    assert "150 predictions by the model of cluster" in err
    assert "agree with the labels" in err
    assert len((tmp_path / "found.csv").read_text().splitlines()) == 151
    assert_refused(coterie("predict", run, sites / "blind-0.npz"), "give --site or --cluster")
    assert_refused(coterie("predict", run, sites / "blind-0.npz", "--site", 0, "--cluster", 1), "give one of them")
    assert_refused(coterie("predict", tmp_path / "none", "x.npz"), "does not exist")
    assert_refused(coterie("predict", run, "x.npz", "--cluster", 0), "x.npz does not exist")
    status, out, _ = coterie("assign", run, sites / "client-1.npz")
    assert status == 0
    assert out.splitlines()[0].startswith("150 records of ")
    assert out.count("<- smallest") == 1
    status, out, _ = coterie("assign", run, sites / "client-1.npz", "--json")
    assert document(out)["cluster"] == exact(run)["client_cluster"][1]


# ---- reading records --------------------------------------------------------------------------------------


def test_records_without_labels_are_read_in_every_format(tmp_path):
    from PIL import Image

    x = np.random.default_rng(0).integers(0, 256, (5, 1, 6, 6)).astype(np.uint8)
    np.savez(tmp_path / "a.npz", x=x)
    names = ",".join(f"p{i}" for i in range(36))
    np.savetxt(tmp_path / "b.csv", x.reshape(5, -1), fmt="%d", delimiter=",", header=names, comments="")
    pytest.importorskip("pyarrow")
    import pyarrow
    from pyarrow import parquet

    columns = {f"p{i}": column for i, column in enumerate(x.reshape(5, -1).T)}
    parquet.write_table(pyarrow.table(columns), tmp_path / "c.parquet")
    (tmp_path / "d").mkdir()
    for i, image in enumerate(x):
        Image.fromarray(image[0]).save(tmp_path / "d" / f"{i}.png")
    known = Facts("images", (1, 6, 6), task_of(10))
    for name in ("a.npz", "b.csv", "c.parquet", "d"):
        found = local_records(tmp_path / name, known, None)
        assert found.y is None
        np.testing.assert_allclose(found.x, 2 * (x.astype(np.float32) / 255) - 1, rtol=0, atol=1e-6)


def test_no_record_is_dropped_or_clamped_silently(tmp_path):
    np.savez(tmp_path / "gap.npz", x=np.array([[1.0, 2.0], [np.nan, 0.0]]), y=np.array([0, 1]))
    np.savez(tmp_path / "high.npz", x=np.full((2, 1, 2, 2), 300), y=np.array([0, 1]))
    np.savez(tmp_path / "class.npz", x=np.ones((2, 2)), y=np.array([0, 7]))
    for name, shape, message in (
        ("gap", (2,), "record 1, counted from 0, has NaN"),
        ("high", (1, 2, 2), "a pixel is 300"),
        ("class", (2,), "a label is 7, but the run has 2 classes"),
        ("gap", (3,), "the run expects 3 numbers"),
    ):
        with pytest.raises(DataError, match=message):
            local_records(
                tmp_path / f"{name}.npz", Facts("images" if len(shape) == 3 else "vectors", shape, task_of(2)), None
            )


# ---- hostile and damaged files ----------------------------------------------------------------------------


def written(folder, card, **tensors):
    folder.mkdir(exist_ok=True)
    arrays = {"output.weight": np.zeros((2, 3), np.float32), "output.bias": np.zeros(2, np.float32)} | tensors
    about = card if isinstance(card, str) else json.dumps({**CARD, **card})
    arrays = {name: array for name, array in arrays.items() if array is not None}
    save_file(arrays, folder / "cluster-0.safetensors", metadata={"about": about})
    return folder


def test_a_hand_written_card_is_accepted(tmp_path):
    models = package.load(written(tmp_path, {}))
    np.testing.assert_array_equal(models.outputs(np.ones((4, 3), np.float32), 0), np.zeros((4, 2)))


@for_rows(
    ("card", "message"),
    [
        ("[]", "not a JSON object"),
        ("{", "Expecting property name"),
        ("[" * 100_000, "is no model of this version"),
        ({"shape": [-3]}, "shape is -3"),
        ({"shape": [1e9, 1e9]}, "shape is"),
        ({"shape": [16777216, 16777216]}, "too large"),
        ({"shape": [1, 2, 3, 4]}, "at most 3 entries"),
        ({"num-classes": "many"}, "num-classes is 'many'"),
        ({"kind": "pickle"}, "expected one of images"),
        ({"clusters": 2}, "does not contain the models of all 2 clusters"),
        ({"cluster": 1}, "does not contain the models of all 1 clusters"),
        ({"model": "huge"}, "code that is not Coterie's: 'huge'"),
        ({"kind": "images", "shape": [1, 2, 2], "features": "os:system"}, "code that is not Coterie's: 'os:system'"),
        ({"num-classes": 4}, r"does not fit its card: output\.bias has shape \(2,\), expected \(4,\)"),
        ({"epsilon": float("nan")}, "epsilon is nan"),
        ({"task": "clairvoyance"}, "task is 'clairvoyance'; expected one of"),
        ({"task": "regression"}, "task 'regression': 2 outputs are those of multi-class"),
        ({"weights": [1.0, 2.0, 3.0]}, "does not fit its card: 2 outputs and 3 weights, but 2 classes"),
        ({"weights": [1.0, -2.0]}, "weights is -2"),
        ({"table-schema": TABLE_SCHEMA.replace("[target]", "[survival]")}, "does not fit its card: table-schema"),
        ({"table-schema": TABLE_SCHEMA}, "does not fit its card: 2 outputs and 0 weights, but real targets"),
    ],
)
def test_a_card_that_is_wrong_is_refused(tmp_path, card, message):
    with pytest.raises(InferenceError, match=message):
        package.load(written(tmp_path, card))


def test_a_card_cannot_make_a_small_file_take_much_memory(tmp_path):
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    card = {"model": "mlp-200", "shape": [1 << 24]}  # 13 GB of parameters
    with pytest.raises(InferenceError, match=r"the layers hidden\.weight, hidden\.bias of ifca are personal"):
        package.load(written(tmp_path, card))
    small = {"hidden.weight": np.zeros((2, 2), np.float32), "hidden.bias": np.zeros(200, np.float32)}
    folder = written(tmp_path, card, **small, **{"output.weight": np.zeros((2, 200), np.float32)})
    with pytest.raises(InferenceError, match=r"hidden\.weight has shape \(2, 2\), expected \(200, 16777216\)"):
        package.load(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000


@for_rows("name", sorted(MODELS))
def test_every_network_is_loaded_as_it_was(tmp_path, name):
    kind = MODELS[name].takes[0]
    shape = {"images": (1, 16, 16), "vectors": (6,), "tokens": (9,)}[kind]
    classes = 0 if MODELS[name].outputs == ("number",) else 30
    parameters = initialise(name, shape, classes, 0)
    about = json.dumps({**CARD, "model": name, "kind": kind, "shape": shape, "num-classes": classes})
    save_file(parameters, tmp_path / "cluster-0.safetensors", metadata={"about": about})
    (module,) = package.load(tmp_path)
    for key, value in module.named_parameters():
        np.testing.assert_array_equal(value.numpy(), parameters[key])


def test_code_is_imported_only_if_it_is_trusted(tmp_path, monkeypatch):
    module = tmp_path / "network_of_a_stranger.py"
    module.write_text(
        "import torch\nopen('touched', 'w').close()\ndef make(shape, classes):\n"
        "    return torch.nn.Sequential(torch.nn.Linear(shape[0], classes))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    tensors = {"0.weight": np.ones((2, 3), np.float32), "0.bias": np.zeros(2, np.float32)}
    tensors |= {"output.weight": None, "output.bias": None}
    folder = written(tmp_path / "run", {"model": "network_of_a_stranger:make"}, **tensors)
    with pytest.raises(InferenceError, match="allow its import with --trust-code"):
        package.load(folder)
    assert not (tmp_path / "touched").exists()
    models = package.load(folder, trust_code=True)
    assert (tmp_path / "touched").exists()
    assert models.outputs(np.ones((1, 3), np.float32), 0).tolist() == [[3, 3]]


def test_damaged_files_are_named(tmp_path):
    file = written(tmp_path, {}) / "cluster-0.safetensors"
    whole = file.read_bytes()
    for content in (b"", whole[:100], b"\xff" * 200, whole[:-4]):
        file.write_bytes(content)
        with pytest.raises(InferenceError, match=r"cluster-0.safetensors"):
            package.load(tmp_path)
    save_file({"output.bias": np.zeros(2, np.float32)}, file)
    with pytest.raises(InferenceError, match="it has no card"):
        package.load(tmp_path)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(InferenceError, match="FIFO"):
        package.load(tmp_path)
    file.unlink()
    with pytest.raises(InferenceError, match="is not a run folder"):
        package.load(tmp_path)
    written(tmp_path, {})
    for text in ("{", '{"sites": 3}', '{"sites": [{"client": "x", "cluster": 0}]}', '{"sites": [0]}'):
        (tmp_path / "result.json").write_text(text)
        with pytest.raises(InferenceError, match=r"result.json (is not valid JSON|cannot be read): .*; restore it"):
            package.load(tmp_path)


# ---- ONNX -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="mlp"),
        pytest.param({"model": "cnn-tiny", "rounds": 4}, id="cnn", marks=pytest.mark.slow),
        pytest.param({"strategy": "fedcam", "rounds": 4}, id="additive", marks=pytest.mark.slow),
    ],
)
def test_onnx_models_equal_the_pytorch_models(trained, sites, tmp_path, changes):
    onnxruntime = pytest.importorskip("onnxruntime")
    models = package.load(trained(**changes))
    records = models.read(sites / "client-2.npz")
    files = models.export_onnx(tmp_path / "out")
    assert [file.name for file in files] == ["cluster-0.onnx", "cluster-1.onnx"]
    for cluster, file in enumerate(files):
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        assert [each.name for each in (*session.get_inputs(), *session.get_outputs())] == ["examples", "outputs"]
        for rows in (1, 7, len(records.x)):
            (found,) = session.run(None, {"examples": records.x[:rows]})
            np.testing.assert_allclose(found, models.outputs(records.x[:rows], cluster), rtol=0, atol=1e-5)
        stored = session.get_modelmeta().custom_metadata_map["coterie"]
        assert ModelCard.parse(stored) == models.cards[cluster]


def test_without_the_extra_the_way_to_it_is_said(trained, coterie, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert_refused(coterie("export", trained(), "--onnx", "out"), "pip install 'coterie[onnx]'")
