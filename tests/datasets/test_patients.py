"""Patients with several records: one side of the split, one contribution to training, one guarantee."""

import csv
import json
from contextlib import closing

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.commands import assert_refused
from kit.own_files import read_shard
from kit.site_tables import label_column, number_column
from kit.tables import for_rows
from torch import nn

from coterie.client.dpsgd import DPSGD, train_privately
from coterie.client.gradients import by_unit, check_supported
from coterie.datasets import DataError, SchemaError, Shard, TableSchema, TestSet, Units, facts, read_table
from coterie.datasets.local_files import local_records
from coterie.datasets.tables import repeated_names, rows_held_out
from coterie.models import ModelError
from coterie.privacy import PerRecord
from coterie.server import RunConfig, RunFolder
from coterie.server.simulate import simulate
from coterie.tasks import AUTO, task_of
from coterie.wire.messages import Layout

FEATURES = 20
HEADS = [f"f{j}" for j in range(FEATURES)]
COLUMNS = "".join(map(number_column, HEADS))
VALUES = ",".join(map(str, range(FEATURES)))
LABEL = label_column("no", "yes")
UNIT = f'version = 1\n{LABEL}[unit]\ncolumn = "patient"\nrecords = 6\n{COLUMNS}'
PLAIN = f'version = 1\nignore = ["patient"]\n{LABEL}{COLUMNS}'


def write_site(path, patients=40, records=6, name="P{}"):
    """Records of a patient are nearly equal, and their label is random: nothing is to be learned of other patients."""
    rng = np.random.default_rng(sum(map(ord, path.name)))
    rows = []
    for i in range(patients):
        centre, label = rng.normal(size=FEATURES), rng.integers(2)
        for _ in range(records):
            rows.append([name.format(i), *(centre + 0.02 * rng.normal(size=FEATURES)).round(4), ["no", "yes"][label]])
    rng.shuffle(rows)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["patient", *HEADS, "outcome"], *rows])


@pytest.fixture(scope="module")
def sites(tmp_path_factory):
    folder = tmp_path_factory.mktemp("patients")
    (folder / "unit.toml").write_text(UNIT)
    (folder / "plain.toml").write_text(PLAIN)
    for site in range(4):
        write_site(folder / f"client-{site}.csv")
    return folder


def shard_of(folder, schema="unit.toml", site=0):
    known = facts("own", "", None, table_schema=str(TableSchema.load(folder / schema)))
    return read_shard(folder / f"client-{site}.csv", known.shape, client=site, schema=known.schema)


# ---- the schema and the split -----------------------------------------------------------------------------


def test_the_unit_is_part_of_the_contract_of_all_sites():
    unit, plain = TableSchema.parse(UNIT), TableSchema.parse(PLAIN)
    assert (unit.unit.name, unit.unit.most) == ("patient", 6)
    assert TableSchema.parse(str(unit)) == unit
    assert unit.fingerprint != plain.fingerprint
    assert unit.fingerprint != TableSchema.parse(UNIT.replace("records = 6", "records = 7")).fingerprint
    assert "unit" not in plain.contract  # schemas without units keep their fingerprints


@for_rows(
    ("old", "new", "words"),
    [
        ('column = "patient"', "", "column is missing"),
        ('column = "patient"', 'column = "f0"', "'f0' is named twice"),
        ('column = "patient"', 'column = "outcome"', "'outcome' is named twice"),
        ("records = 6", "records = 0", "from 1 to 1000"),
        ("records = 6", "records = true", "from 1 to 1000"),
        ("records = 6", "records = 1e9", "from 1 to 1000"),
        ("records = 6", "most = 6", "unknown key 'most'"),
    ],
)
def test_a_wrong_unit_is_named(old, new, words):
    with pytest.raises(SchemaError, match=words):
        TableSchema.parse(UNIT.replace(old, new))


def test_all_records_of_a_patient_are_on_one_side(sites):
    shard = shard_of(sites)
    rows = {tuple(row) for row in shard.test.x.round(1)}
    assert len(shard.units) + len(shard.test.y) / 6 == 40
    assert np.bincount(shard.units.of_record).tolist() == [6] * len(shard.units)
    assert rows.isdisjoint(tuple(row) for row in shard.x.round(1))
    split_by_record = shard_of(sites, "plain.toml")
    assert split_by_record.units is None
    assert len(split_by_record.y) % 6  # patients are divided


def test_the_side_of_a_patient_depends_on_its_name_alone(tmp_path, sites):
    write_site(tmp_path / "client-0.csv", patients=15, records=2)
    schema = TableSchema.parse(UNIT)
    sides = {}
    for path in (sites / "client-0.csv", tmp_path / "client-0.csv"):
        table = read_table(path, schema)
        for name, side in zip(table.units.tolist(), rows_held_out(table).tolist(), strict=True):
            assert sides.setdefault(name, side) == side


@pytest.mark.parametrize("name", ["", "NA", "  "])
def test_a_record_without_a_patient_is_left_out_and_named(tmp_path, name):
    (tmp_path / "client-0.csv").write_text(
        f"patient,{','.join(HEADS)},outcome\nP1,{VALUES},yes\n{name},{VALUES},no\nP2,{VALUES},no\n"
    )
    table = read_table(tmp_path / "client-0.csv", TableSchema.parse(UNIT))
    assert table.units.tolist() == ["P1", "P2"]
    assert table.index.tolist() == [0, 2]
    assert "no unit, 1 record dropped" in str(table.errors[0])
    assert table.lost == {"no": 1}


def test_predictions_need_no_patients(tmp_path):
    known = facts("own", "", None, table_schema=UNIT)
    path = tmp_path / "new.csv"
    path.write_text(f"{','.join(HEADS)}\n{VALUES}\n")
    assert local_records(path, known, None).x.shape == (1, FEATURES)
    path.write_text(f"patient,{','.join(HEADS)},outcome\n,{VALUES},no\n")
    assert local_records(path, known, None).x.shape == (1, FEATURES)
    with pytest.raises(DataError, match="no unit"):
        local_records(path, known, None, held_out=True)


@pytest.mark.parametrize(
    ("column", "warns"),
    [(name, True) for name in ("patient", "Patient ID", "subject_no", "MRN", "case-number")]
    + [(name, False) for name in ("ward", "comment", "idea", "paid")],
)
def test_patients_that_nobody_declared_are_announced(tmp_path, column, warns):
    write_site(tmp_path / "client-0.csv", patients=3, records=4)
    text = (tmp_path / "client-0.csv").read_text().replace("patient", column, 1)
    (tmp_path / "client-0.csv").write_text(text)
    warning = repeated_names(tmp_path / "client-0.csv", TableSchema.parse(PLAIN.replace("patient", column)))
    assert (f"{column!r} names up to 4 records alike" in warning) == warns == bool(warning)


def test_the_owner_sees_numbers_of_patients(sites, coterie):
    output = coterie("data", "check", sites / "client-0.csv", "--schema", sites / "unit.toml")[1]
    assert "units: 40 values of 'patient'" in output
    assert "with up to 6 records" in output
    report = json.loads(coterie("data", "check", sites / "client-0.csv", "--schema", sites / "unit.toml", "--json")[1])
    units = next(iter(report["files"].values()))["units"]
    assert units["number"] - units["held-out"] == len(shard_of(sites).units)
    assert (
        "declare it as [unit]" in coterie("data", "check", sites / "client-0.csv", "--schema", sites / "plain.toml")[1]
    )


# ---- training ---------------------------------------------------------------------------------------------


def network(outputs=3):
    torch.manual_seed(0)
    layers = [nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, outputs)]
    return nn.Sequential(*layers, *([nn.Flatten(0)] if outputs == 1 else []))


def shard_with(x, y, of_record, most):
    return Shard(0, 0, x, y, TestSet(x, y), Units(np.asarray(of_record), most))


def moved(net, shard, clip_norm=0.5, units=8):
    """The update of one full-batch step without noise, in units of a clipped gradient's step."""
    layout = Layout.of(dict(net.named_parameters()))
    start = layout.flatten({name: p.detach().numpy() for name, p in net.named_parameters()})[None]
    rng = np.random.default_rng(0)
    dpsgd = DPSGD(units, units, 1, 1.0, clip_norm, 0.0)
    update = train_privately(net, layout, start, [shard], [rng], [rng], [dpsgd], batched=True)[0]
    return update.astype(np.float64) / dpsgd.step_size


@pytest.mark.parametrize("outputs", [3, 1])
def test_a_patient_contributes_its_mean_gradient_clipped_once(outputs):
    rng, net = np.random.default_rng(0), network(outputs)
    x = rng.normal(size=(20, 4)).astype(np.float32)
    y = rng.integers(0, 3, 20) if outputs == 3 else rng.normal(size=20).astype(np.float32)
    shard = shard_with(x, y, np.arange(20) // 3, most=2)
    expected = 0
    for unit in range(7):
        rows = np.flatnonzero(shard.units.of_record == unit)[:2]  # the first two records
        net.zero_grad()
        AUTO(net(torch.tensor(x[rows])), torch.tensor(y[rows])).mean().backward()
        gradient = torch.cat([p.grad.flatten() for p in net.parameters()]).double()
        expected = expected - gradient / max(float(gradient.norm()), 0.5)
    assert moved(net, shard, units=7) == pytest.approx(expected.numpy(), abs=1e-5)


@settings(max_examples=25)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.integers(1, 4), st.integers(0, 2**31))
def test_a_patient_changes_the_sum_by_at_most_one_clipped_gradient(patients, most, seed):
    rng, net = np.random.default_rng(seed), network()
    x, y = rng.normal(scale=10, size=(len(patients), 4)).astype(np.float32), rng.integers(0, 3, len(patients))
    there = moved(net, shard_with(x, y, np.unique(patients, return_inverse=True)[1], most), clip_norm=0.1)
    kept = np.array(patients) != patients[0]
    others = shard_with(x[kept], y[kept], np.unique(np.array(patients)[kept], return_inverse=True)[1], most)
    assert np.linalg.norm(there - moved(net, others, clip_norm=0.1)) <= 1 + 1e-4


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e38])
def test_a_record_that_breaks_its_own_gradient_breaks_no_other(value):
    """Patients with fewer records are padded; no padding may come from the last record."""
    rng, net = np.random.default_rng(0), network()
    x, y = rng.normal(size=(5, 4)).astype(np.float32), np.array([0, 1, 2, 0, 1])
    clean = moved(net, shard_with(x[:4], y[:4], [0, 1, 1, 2], most=3))
    x[4] = value
    broken = moved(net, shard_with(x, y, [0, 1, 1, 2, 3], most=3))
    assert np.isfinite(broken).all()
    assert np.linalg.norm(broken - clean) <= 1 + 1e-5


def test_missing_records_are_zeros_and_have_no_label():
    x, y = np.ones((3, 2), np.float32), np.array([1, 0, 1])
    grouped = by_unit(shard_with(x, y, [0, 1, 1], most=2))
    assert grouped.x[0].tolist() == [[1, 1], [0, 0]]
    assert grouped.y.tolist() == [[1, -1], [0, 1]]


def test_losses_of_a_patient_are_one_number():
    def total(*losses):
        return PerRecord(np.array(losses)[:, None]).per_unit(np.array([0, 1, 0])).noisy_sum(8.0, np.zeros)

    assert total(1.0, 4.0, 3.0) == [(2.0 + 4.0) / 8]
    assert total(np.inf, 4.0, 3.0) == [(8.0 + 4.0) / 8]
    assert Units(np.zeros(0, np.int64), 3).rows.shape == (0, 3)


def test_networks_without_gradients_of_patients_are_refused():
    with pytest.raises(ModelError, match="without dropout"):
        check_supported(nn.Sequential(nn.Linear(4, 2), nn.Dropout()).train(), (4,), task_of(2), "vectors", units=True)
    check_supported(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), (4,), task_of(2), "vectors", units=True)


# ---- runs -------------------------------------------------------------------------------------------------


def run_of(folder, out, schema="unit.toml", **changes):
    values = {"strategy": "fedavg", "dataset": "own", "data-dir": str(folder), "clients": 4, "seed": 0}
    values |= {"model": "mlp-32", "sampling-rate": 1.0, "table-schema": str(folder / schema), **changes}
    with closing(RunFolder.create(out, RunConfig(values))) as run:
        return simulate(run, cores=1)


@pytest.mark.slow
def test_labels_that_cannot_be_learned_are_not(sites, tmp_path):
    training = {"rounds": 30, "lr": 0.3, "local-epochs": 5, "privacy-unit": "none"}
    by_record = run_of(sites, tmp_path / "record", "plain.toml", **training).diagnostics
    by_patient = run_of(sites, tmp_path / "patient", **training).diagnostics
    assert by_record.pooled_accuracy > 0.9  # of records whose patient was trained on
    assert 0.25 < by_patient.pooled_accuracy < 0.75  # that of chance, with about 32 patients


def test_the_certificate_protects_a_patient(sites, tmp_path, coterie):
    private = {"privacy-unit": "record", "epsilon": 8.0, "delta": 1e-3, "samples-per-client": 32, "batch-size": 16}
    run_of(sites, tmp_path / "run", **{"rounds": 2, "local-epochs": 1, "lr": 1.0, "seed": "auto"}, **private)
    stated = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert "all records of one client that have one value in column 'patient'" in stated["adjacency"]
    assert stated["public_inputs"]["unit-column"] == "patient"
    assert coterie("privacy", "check", tmp_path / "run")[0] in (0, None)
    from coterie.report.page import write_report

    page = write_report([tmp_path / "run"], tmp_path / "p.html").read_text()
    assert "all training records with one value of" in page
    assert "with all records took part" in page


@pytest.mark.parametrize("strategy", ["kfed", "ppfc-gan"])
def test_methods_that_cluster_records_are_refused(sites, coterie, strategy):
    words = ["run", "--strategy", strategy, "--dataset", "own", "--data-dir", sites, "--clients", "4"]
    words += ["--clusters", "2", "--set", f"table-schema={sites / 'unit.toml'}", "--set", "privacy-unit=record"]
    words += ["--epsilon", "8", "--set", "samples-per-client=20"]
    assert_refused(coterie(*words), "'patient'", "clusters single records")
