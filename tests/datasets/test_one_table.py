"""One table whose column of the site divides it among the clients of a simulation."""

import csv
import json

import numpy as np
import pytest
from kit.commands import assert_refused
from kit.site_tables import label_column, number_column

from coterie import load
from coterie.datasets import DataError, Declared, SchemaError, TableSchema, facts, own_federation, read_table, tables
from coterie.datasets.own import own_shard

SITES = ("Ankara", "Bursa", "Izmir")
PLAIN = "version = 1\n" + label_column("no", "yes") + number_column("age", 50, 15, 'missing = "drop"')
SITE = f'[site]\ncolumn = "hospital"\nvalues = {list(SITES)}\n'
SCHEMA = PLAIN + SITE


def rows_of(each=40):
    """Records of three sites, in turns; the age says which site and the label."""
    ages = np.random.default_rng(0).permutation(each)
    return [[SITES[i], 10 * i + age / 10, ("no", "yes")[age % 2]] for age in ages for i in range(3)]


def written(folder, rows=None, schema=SCHEMA, heads=("hospital", "age", "outcome"), name="patients.csv"):
    (folder / "schema.toml").write_text(schema)
    with (folder / name).open("w", newline="") as file:
        csv.writer(file).writerows([heads, *(rows_of() if rows is None else rows)])
    return folder / name


def federation_of(path, schema=SCHEMA, clients=3):
    known = facts("own", "", None, table_schema=str(TableSchema.parse(schema)))
    return own_federation(path, clients, known, None)


def ages_of(shard):
    every = [shard.x] if shard.test.x is shard.x else [shard.x, shard.test.x]
    return sorted(round(50 + 15 * x, 3) for x in np.concatenate(every)[:, 0].tolist())


def run_words(path, *more):
    words = ["run", "--dataset", "own", "--data-dir", path, "--set", f"table-schema={path.parent / 'schema.toml'}"]
    words += ["--strategy", "fedavg", "--clusters", 1, "--rounds", 2, "--set", "privacy-unit=none"]
    return [*words, "--out", path.parent / "run", *more]


def test_a_run_divides_a_table_among_three_hospitals(coterie, tmp_path):
    path = written(tmp_path, [*rows_of(), *(["Konya", 3, "no"],) * 2], SCHEMA + 'unknown = "drop"\n')
    status, _, err = coterie(*run_words(path))
    assert status == 0, err
    assert "clients = 3" in (tmp_path / "run" / "config.toml").read_text()
    assert list(json.loads((tmp_path / "run" / "local.json").read_text())["fingerprints"]) == ["patients.csv"]
    path.write_text(path.read_text().replace("Izmir", "Bursa", 1))
    assert_refused(coterie("run", "--out", tmp_path / "run", "--resume", "--rounds", 3), "patients.csv changed")


def test_by_numbers_of_records_a_step_of_three_hospitals_is_that_of_all_records(coterie, tmp_path):
    """As of one client with all records, since gradients are means over the records of a client."""
    rows = [row for i, row in enumerate(rows_of()) if row[0] == "Izmir" or i < 40]
    path = written(tmp_path, rows)
    (tmp_path / "plain.toml").write_text(f'ignore = ["hospital"]\n{PLAIN}')
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "client-0.csv").write_text(path.read_text())
    models = {}
    for name, words in {
        "records": ["--set", "weights=records"],
        "equal": [],
        "one": ["--data-dir", tmp_path / "all", "--set", f"table-schema={tmp_path / 'plain.toml'}", "--clients", 1],
    }.items():
        settings = ("seed=0", "model=mlp-32", "batch-size=1000", "local-epochs=1", "lr=0.5", "sampling-rate=1")
        words += ["--rounds", 1, "--out", tmp_path / name, *(f"--set={each}" for each in settings)]
        status, _, err = coterie(*run_words(path, *words, "--set", "evaluate=off"))
        assert status == 0, err
        models[name] = np.concatenate([p.detach().ravel().numpy() for p in load(tmp_path / name)[0].parameters()])
    np.testing.assert_allclose(models["records"], models["one"], atol=1e-5)
    assert np.abs(models["equal"] - models["one"]).max() > 1e-3


@pytest.mark.parametrize("suffix", ["csv", "parquet", "folder"])
def test_each_site_is_a_client_with_its_own_records(tmp_path, suffix, monkeypatch):
    path = written(tmp_path)
    if suffix != "csv":
        frame = pytest.importorskip("pandas").read_csv(path)
        path.unlink()
        path = tmp_path / ("patients.parquet" if suffix == "parquet" else "table")
        frame.to_parquet(path, index=False, partition_cols=["hospital"] if suffix == "folder" else None)
    reads = []
    monkeypatch.setattr(tables, "_encoded", lambda *words, read=tables._encoded: reads.append(words) or read(*words))
    federation = federation_of(path)
    for i in range(3):
        shard = federation.shard(i)
        assert ages_of(shard) == sorted(round(10 * i + age / 10, 3) for age in range(40))
        assert 0 < len(shard.test.y) < len(shard.y)
    assert len(reads) == 1  # not once for each client


@pytest.mark.parametrize(
    ("cell", "rules", "words"),
    [
        ("", "", "column 'hospital': missing, 1 record dropped"),
        ("NA", "", "name the site of every record"),
        ("Konya", "", "column 'hospital': not one of its values, 1 record dropped"),
        ("", 'missing = "drop"\n', None),
        ("Konya", 'unknown = "drop"\n', None),
    ],
)
def test_a_record_of_no_site_is_named_or_dropped_by_a_rule(tmp_path, cell, rules, words):
    path = written(tmp_path, [*rows_of(), [cell, 30, "yes"]])
    if words:
        with pytest.raises(DataError, match=words):
            federation_of(path, SCHEMA + rules).shard(1)
    table = read_table(path, TableSchema.parse(SCHEMA + rules), sites=True)
    assert (len(table.y), table.records, table.lost, len(table.errors)) == (120, 121, {"yes": 1}, int(bool(words)))
    if not words:
        assert len(ages_of(federation_of(path, SCHEMA + rules).shard(1))) == 40


def test_the_order_of_clients_is_that_of_the_schema_and_codes_are_texts(tmp_path, caplog):
    schema = PLAIN + '[site]\ncolumn = "hospital"\nvalues = [3, 1, 2]\n'
    path = written(tmp_path, [[code, 10 * code, "no"] for code in (1, 3, 3)])
    federation = federation_of(path, schema)
    assert [ages_of(federation.shard(i)) for i in range(3)] == [[30, 30], [10], []]
    assert "client 2 is left out, as it has no training records" in caplog.text
    assert "hospital = '2': no records" in caplog.text


def test_what_the_schema_drops_is_said_once(tmp_path, caplog):
    path = written(tmp_path, [*rows_of(), ["Bursa", "", "no"]])
    caplog.set_level("INFO", "flwr")
    federation = federation_of(path)
    assert [len(ages_of(federation.shard(i))) for i in range(3)] == [40, 40, 40]
    assert caplog.text.count("by the rules of the schema") == 1


def test_the_site_is_kept_with_the_schema_and_not_part_of_the_contract():
    schema = TableSchema.parse(SCHEMA + 'unknown = "drop"\n')
    assert TableSchema.parse(str(schema)) == schema
    assert schema.fingerprint == TableSchema.parse(PLAIN).fingerprint


@pytest.mark.parametrize(
    ("site", "words"),
    [
        ('column = "hospital"\nvalues = ["Ankara"]', r"\[site\]: values = .* at least 2 distinct"),
        (f'column = "hospital"\nvalues = {list(range(10_001))}', "values has 10,001 entries; the limit is 10,000"),
        ('column = "age"\nvalues = [1, 2]', "column 'age' is named twice"),
        ("values = [1, 2]", "column is missing"),
        ('column = "hospital"\nvalues = [1, 2]\nnames = ["a", "b"]', "unknown key 'names'"),
    ],
)
def test_a_wrong_site_is_named(site, words):
    with pytest.raises(SchemaError, match=words):
        TableSchema.parse(f"{PLAIN}[site]\n{site}\n")


def test_wrong_places_are_refused_in_one_line(coterie, tmp_path):
    path = written(tmp_path, heads=("Hospital", "age", "outcome"))
    assert_refused(coterie(*run_words(path)), "has no column 'hospital' (is it 'Hospital'?)")
    assert_refused(coterie(*run_words(path, "--clients", 4)), "data.clients = '4': the table-schema makes it 3")
    assert_refused(coterie(*run_words(tmp_path / "none.csv")), "none.csv does not exist")
    (tmp_path / "client-0.csv").write_text(path.read_text())
    words = run_words(path)
    words[words.index(path)] = tmp_path
    assert_refused(coterie(*words), "is a folder, but the schema has [site]")
    (tmp_path / "schema.toml").write_text('ignore = ["Hospital"]\n' + PLAIN)
    assert_refused(coterie(*run_words(path, "--clients", 3)), "is a file; set data-dir to the folder of client-0.csv")


def test_a_deployed_client_reads_its_own_file_with_or_without_the_column(tmp_path):
    schema = TableSchema.parse(SCHEMA)
    declared = Declared("vectors", (1,), schema.task, schema)
    for heads, rows in ((("age", "outcome"), [[30, "no"]]), (("hospital", "age", "outcome"), [["Konya", 30, "no"]])):
        path = written(tmp_path, rows, heads=heads)
        assert len(own_shard(str(path), 0, declared, None, strict=False).y) == 1
        own_shard.cache_clear()


def test_a_check_counts_the_records_of_each_site(coterie, tmp_path):
    path = written(tmp_path, rows_of()[:-1])
    words = ["data", "check", path, "--schema", tmp_path / "schema.toml"]
    assert "sites: Ankara 40, Bursa 40, Izmir 39" in coterie(*words)[1]
    found = json.loads(coterie(*words, "--json")[1])["files"][str(path)]
    assert found["sites"] == {"Ankara": 40, "Bursa": 40, "Izmir": 39}
    written(tmp_path, [[30, "no"]], heads=("age", "outcome"))
    assert "the records of one client" in coterie(*words)[1]
    written(tmp_path, heads=("Hospital", "age", "outcome"))
    assert '[file.columns.hospital]\nname = "Hospital"' in coterie("data", "site", *words[2:])[1]
