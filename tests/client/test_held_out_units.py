"""Histograms of scores of patients with several records: a patient counts once, or not at all."""

import csv
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.commands import assert_refused
from kit.own_files import read_shard
from kit.site_tables import settings_on, simulated

from coterie.client import record_level
from coterie.datasets import TableSchema, Units, facts, own_shard
from coterie.fields import UNIT_SHARES
from coterie.privacy import read_ledger
from coterie.privacy.check import check
from coterie.privacy.score_histograms import CELLS, UnitCounts, deviation_of_client, deviation_of_counts

COLUMNS = "".join(f'[[columns]]\nname = "f{j}"\ntype = "number"\nmean = 0\nscale = 1\n' for j in range(3))
SCHEMA = f'version = 1\n[label]\ncolumn = "outcome"\nclasses = ["no", "yes"]\n[unit]\ncolumn = "patient"\n{COLUMNS}'
HEADS = ["patient", "f0", "f1", "f2", "outcome"]
RUN = {"privacy-unit": "record", "samples-per-client": 40, "batch-size": 20, "rounds": 2, "model": "linear"}
RUN |= {"evaluate": "private", "score-share": 0.5, "epsilon": 8, "delta": 1e-3}


def write(path, patients, seed=0, records=5):
    rng = np.random.default_rng(seed)
    rows = []
    for name in patients:
        label = rng.integers(2)
        for _ in range(rng.integers(1, records + 1)):
            rows.append([name, *(rng.normal(size=3) + label).round(3), ["no", "yes"][label]])
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([HEADS, *rows])


@pytest.fixture
def sites(tmp_path):
    folder = tmp_path / "sites"
    folder.mkdir()
    (folder / "schema.toml").write_text(SCHEMA)
    for site in range(4):
        write(folder / f"client-{site}.csv", [f"P{site}-{i}" for i in range(80)], site)
    return folder


def shard_of(path, folder):
    own_shard.cache_clear()
    known = facts("own", "", None, table_schema=str(TableSchema.load(folder / "schema.toml")))
    return read_shard(path, known.shape, schema=known.schema, strict=False)


def test_a_run_releases_counts_of_patients_and_charges_them(sites, tmp_path):
    values = settings_on(sites, **RUN)
    del values["seed"]  # a run with a seed is not certified
    folder = simulated(tmp_path / "run", values)
    header, charges = read_ledger(folder / "ledger.jsonl")
    stated = json.loads((folder / "privacy.json").read_text())
    assert check(header, charges, stated) == []
    assert (stated["certified"], stated["public_inputs"]["unit-column"]) == (True, "patient")
    assert [charge.get("held_out_epsilon") for charge in charges if charge["for"] == "histogram"] == [4.0]
    counts = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["score_histogram"]
    assert any(count != round(count) for count in counts)
    np.testing.assert_allclose(np.array(counts) * UNIT_SHARES, np.rint(np.array(counts) * UNIT_SHARES), atol=1e-6)
    assert sum(counts) == pytest.approx(64, abs=25)  # a fifth of 320 patients, who have 3 records each


def test_the_noise_covers_all_shares_of_a_unit(sites, tmp_path, monkeypatch):
    made = []

    class Noted(UnitCounts):
        def __init__(self, counts, share):
            made.append((counts.sum(), share))
            super().__init__(counts, share)

        def noisy(self, epsilon, rng):
            assert epsilon == 4.0
            return super().noisy(epsilon, rng)

    monkeypatch.setattr(record_level, "UnitCounts", Noted)
    simulated(tmp_path / "run", settings_on(sites, **RUN))
    assert len(made) == 4
    for total, share in made:
        assert share == UNIT_SHARES
        assert total > 3 * UNIT_SHARES  # of patients, each of whom adds about that


def test_a_patient_of_training_and_test_data_counts_nowhere(sites):
    shared, other = [f"S{i}" for i in range(5)], [f"T{i}" for i in range(4)]
    home = sites / "client-9"
    write(home / "train.csv", [*(f"A{i}" for i in range(9)), *shared])
    write(home / "test.csv", [*other, *shared], 1)
    shard = shard_of(home, sites)
    with (home / "test.csv").open() as file:
        names = [row["patient"] for row in csv.DictReader(file)]
    assert ((shard.test_shares > 0) == [name in other for name in names]).all()
    for name in other:
        total = sum(share for share, of in zip(shard.test_shares, names, strict=True) if of == name)
        assert UNIT_SHARES - names.count(name) < total <= UNIT_SHARES


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.sets(st.integers(0, 9)), st.integers(0, 9))
def test_removing_a_unit_changes_the_shares_of_no_other(records, trained, victim):
    names = np.array([f"P{i}" for i in records])
    units = Units.named(names, 8).held_out_shares(Units.named([f"P{i}" for i in sorted(trained)], 8))
    for name in np.unique(names):
        assert units[names == name].sum() <= UNIT_SHARES
    others = names != f"P{victim}"
    if not others.any():
        return
    without = Units.named(names[others], 8).held_out_shares(Units.named([f"P{i}" for i in trained - {victim}], 8))
    np.testing.assert_array_equal(units[others], without)


def test_the_stated_noise_is_that_of_units():
    rng = np.random.default_rng(0)
    for epsilon in (0.4, 4.0):
        of_units = np.stack([UnitCounts(np.zeros(CELLS), UNIT_SHARES).noisy(epsilon, rng) for _ in range(400)])
        stated = deviation_of_client(of_units[0], epsilon)
        assert np.std(of_units) == pytest.approx(stated, rel=0.03)
        assert stated == deviation_of_counts([epsilon], UNIT_SHARES)
        of_records = UnitCounts(np.zeros(CELLS)).noisy(epsilon, rng)
        assert deviation_of_client(of_records, epsilon) == deviation_of_counts([epsilon]) < stated


def test_methods_that_cluster_records_stay_refused(sites, coterie):
    words = ("--strategy", "ffcm", "--dataset", "own", "--data-dir", sites, "--clients", 4)
    words += ("--set", f"table-schema={sites / 'schema.toml'}", "--set", "privacy-unit=record")
    words += ("--set", "samples-per-client=40", "--set", "epsilon=8")
    assert_refused(coterie("run", *words), "patient")
