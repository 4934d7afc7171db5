"""Sites that write the same columns in other ways: one contract, and a file that describes each site's table."""

import datetime

import numpy as np
import pytest
from kit.own_files import write_parquet
from kit.site_tables import category_column, label_column, number_column

from coterie.cli.drafts import draft
from coterie.datasets import DataError, SchemaError, TableSchema, facts, own_federation, read_table

LABEL = label_column("no", "yes", column="died")
TEXT = f'version = 1\n{LABEL}[unit]\ncolumn = "patient"\n' + number_column("age", 60, 10)
TEXT += category_column("sex", ["F", "M"]) + number_column("glucose", 5, 1, 'missing = "indicator"')
TEXT += number_column("severity", 0, 1, "range = [0, 5]", 'missing = "mean"')
SCHEMA = TableSchema.parse(TEXT)
HEAD = "patient,age,sex,glucose,severity,died"
PLAIN = [HEAD, "P1,70,M,5,2,yes", "P2,50,F,,,no"]
X = [[1, 0, 1, 0, 0, 2], [-1, 1, 0, 0, 1, 0]]
#: The same two records as five hospitals write them, and what describes each file.
SITES = {
    "names and codes": (
        ["PID;Alter;Geschlecht;Glukose;Schwere;tot", "P1;70;männlich;5;2;ja", "P2;50;weiblich;;-9;nein"],
        """[file.columns]
        patient = {name = "PID"}
        age = {name = "Alter"}
        sex = {name = "Geschlecht", values = {"männlich" = "M", weiblich = "F"}}
        glucose = {name = "Glukose"}
        severity = {name = "Schwere", missing-values = [-9]}
        died = {name = "tot", values = {ja = "yes", nein = "no"}}""",
    ),
    "units and decimal commas": (
        ["patient;age;sex;mg/dl;severity;died", "P1;70,0;M;90,09;2,0;yes", "P2;50;F;;;no"],
        """file = {decimal = ",", columns = {glucose = {name = "mg/dl", factor = 0.0555}}}""",
    ),
    "dates": (
        [HEAD.replace("age", "born,admitted"), "P1,31.12.1939,01.01.2010,M,5,2,yes", "P2,01.01.1960,01.01.2010,F,,,no"],
        """[file.columns]
        age = {name = "admitted", since = "born", date-format = "%d.%m.%Y", factor = 0.002737909}""",
    ),
    "an offset": ([HEAD, "P1,70,M,5,1,yes", "P2,50,F,,,no"], "[file.columns.severity]\noffset = 1"),
    "another encoding, and other columns": (
        [HEAD.replace("patient", "patient,ward"), "P1,Süd,70,m,5,2,yes", "P2,Süd,50,f,,,no"],
        """ignore = ["ward"]
        file = {encoding = "latin-1", columns = {sex = {values = {m = "M", f = "F"}}}}""",
    ),
}


def written(folder, lines, site="", stem="client-0", encoding="utf-8"):
    path = folder / f"{stem}.csv"
    path.write_text("\n".join(lines) + "\n", encoding=encoding)
    if site:
        (folder / f"{stem}.site.toml").write_text(site)
    return path


def encoding_of(site):
    return "latin-1" if "latin-1" in site else "utf-8"


@pytest.mark.parametrize("name", SITES)
def test_every_site_has_the_same_records(tmp_path, name):
    lines, site = SITES[name]
    table = read_table(written(tmp_path, lines, site, encoding=encoding_of(site)), SCHEMA)
    assert table.x == pytest.approx(np.array(X, np.float32), abs=1e-2)
    assert (table.y.tolist(), table.units.tolist(), table.findings) == ([1, 0], ["P1", "P2"], ())
    assert table.missing == {"glucose": 1, "severity": 1}


@pytest.mark.parametrize("name", SITES)
def test_without_its_file_a_site_is_refused_or_reported(tmp_path, name):
    lines, site = SITES[name]
    path = written(tmp_path, lines, encoding=encoding_of(site))
    if name == "an offset":  # nothing in the file shows it
        assert not np.allclose(read_table(path, SCHEMA).x, X)
        return
    words = "columns that the schema does not name: 'ward'" if "other columns" in name else "has no column"
    with pytest.raises(DataError, match=words):
        read_table(path, SCHEMA)


def test_sites_of_a_simulation_differ(tmp_path):
    for number, (lines, site) in enumerate(SITES.values()):
        written(tmp_path, lines * 1, site, f"client-{number}", encoding_of(site))
    known = facts("own", "", None, table_schema=str(SCHEMA))
    data = own_federation(tmp_path, len(SITES), known, None)
    for number in range(len(SITES)):
        shard = data.shard(number)
        rows = np.concatenate([shard.x, shard.test.x]) if shard.test.x is not shard.x else shard.x
        assert sorted(rows.round(1).tolist()) == sorted(X)


def test_a_site_without_a_column_declares_it(tmp_path):
    lines = ["patient,age,sex,glucose,died", "P1,70,M,5,yes", "P2,50,F,,no"]
    with pytest.raises(DataError, match="no column 'severity'"):
        read_table(written(tmp_path, lines), SCHEMA)
    table = read_table(written(tmp_path, lines, "[file.columns.severity]\nabsent = true"), SCHEMA)
    assert table.x[:, 5].tolist() == [0, 0]
    assert table.missing == {"glucose": 1, "severity": 2}
    lines = [line.replace(",5,", ",").replace(",,", ",").replace("glucose,", "") for line in lines]
    absent = "[file.columns]\nseverity = {absent = true}\nglucose = {absent = true}"
    assert read_table(written(tmp_path, lines, absent), SCHEMA).x[:, 4].tolist() == [1, 1]  # the indicator


@pytest.mark.parametrize(
    ("site", "words"),
    [
        ("[file.columns.weight]\nname = 'w'", "weight: the schema has no such column"),
        ("[file.columns.sex]\nvalues = {m = 'male'}", "'male' is no value of the column"),
        ("[file.columns.sex]\nvalues = ['m']", "values must be a table"),
        ("[file.columns.sex]\nfactor = 2", "for columns of numbers"),
        ("[file.columns.sex]\nabsent = true", "requires a rule that fills it"),
        ("[file.columns.died]\nabsent = true", "every record needs this column"),
        ("[file.columns.patient]\nabsent = true", "every record needs this column"),
        ("[file.columns.age]\nabsent = true", "requires a rule that fills it; the schema has missing = 'error'"),
        ("[file.columns.age]\ndate-format = '%d'", "requires since"),
        ("[file.columns.age]\nfactor = nan", "factor = nan"),
        ("[file.columns.age]\nmean = 3", "unknown key 'mean'"),
        ("[[columns]]\nname = 'x'", "unknown key 'columns'"),
        ("[unit]\ncolumn = 'x'", "unknown key 'unit'"),
        ("ignore = ['age']", "'age' is named twice"),
        ("not toml", "cannot be read"),
    ],
)
def test_a_wrong_description_is_named_with_its_file(tmp_path, site, words):
    path = written(tmp_path, PLAIN, site)
    with pytest.raises(SchemaError, match=r"client-0.site.toml") as error:
        read_table(path, SCHEMA)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("column", "cell", "what"),
    [
        ("factor = 2", "<5", "not a plain number, which factor could convert"),
        ("factor = 2", "90 mg/dl", "not a plain number"),
        ("since = 'when'", "2020-13-01", "no dates in ISO 8601"),
        ("since = 'when'", "2020-01-01T00:00:00+01:00", "no dates in ISO 8601"),
        ("since = 'when'\ndate-format = '%d.%m.%Y'", "2020-01-01", "no dates in %d.%m.%Y"),
    ],
)
def test_a_cell_that_cannot_be_converted_is_dropped_and_named(tmp_path, column, cell, what):
    lines = [f"when,{HEAD}", f"2019-01-01,P1,70,M,{cell},2,yes", "2019-01-01,P2,50,F,,,no"]
    ignored = "" if "since" in column else "ignore = ['when']\n"
    table = read_table(written(tmp_path, lines, f"{ignored}[file.columns.glucose]\n{column}"), SCHEMA)
    assert what in str(table.errors[0])
    assert table.index.tolist() == [1]


@pytest.mark.parametrize("kind", [datetime.date, datetime.datetime])
def test_dates_of_typed_files(tmp_path, kind):
    columns = {"patient": ["P1"], "born": [kind(1940, 1, 1)], "admitted": [kind(2010, 1, 1)], "sex": ["M"]}
    columns |= {"glucose": [5.0], "severity": [2.0], "died": ["yes"]}
    path = write_parquet(tmp_path / "client-0.parquet", columns)
    (tmp_path / "client-0.site.toml").write_text(SITES["dates"][1].replace('date-format = "%d.%m.%Y", ', ""))
    assert read_table(path, SCHEMA).x[0, 0] == pytest.approx(1, abs=0.01)


def test_a_description_is_part_of_no_contract(tmp_path):
    path = written(tmp_path, *SITES["names and codes"])
    at_site = SCHEMA.at_site(path)
    assert at_site != SCHEMA
    assert at_site.fingerprint == SCHEMA.fingerprint
    assert TableSchema.parse(str(at_site)) == at_site
    assert hash(at_site)


def test_a_folder_may_have_two_descriptions(tmp_path):
    from coterie.datasets.client_data import beside

    for stem in ("train", "test"):
        written(tmp_path, *SITES["names and codes"], stem=stem)
    assert not beside(tmp_path)


def test_identifiers_and_texts_are_drafted_as_ignored(tmp_path):
    path = written(tmp_path, ["Patient ID,age,remarks,last name,outcome", "1,2,x,y,no"])
    text = draft(path, "outcome")
    assert 'column = "Patient ID"' in text
    assert text.count("[[columns]]") == 1
    assert all(f'"{name}"' in text for name in ("remarks", "last name"))


@pytest.mark.parametrize(
    ("severity", "words"), [("9", "column 'severity': 67% of the records clamped"), ("", "filled")]
)
def test_a_code_that_nobody_declared_fails_the_check(tmp_path, coterie, severity, words):
    (tmp_path / "schema.toml").write_text(TEXT)
    rows = [f"P{i},60,M,5,{severity if i % 3 else 2},no" for i in range(30)]
    path = written(tmp_path, [PLAIN[0], *rows])
    arguments = ("data", "check", path, "--schema", tmp_path / "schema.toml")
    status, output, _ = coterie(*arguments)
    assert status == 1
    assert words in output
    share = "clamped" if severity else "filled"
    assert coterie(*arguments, f"--{share}", "0.7")[0] in (0, None)
    if severity:
        path.with_name("client-0.site.toml").write_text("[file.columns.severity]\nmissing-values = [9]")
        assert coterie(*arguments, "--filled", "0.7")[0] in (0, None)


def test_labels_of_a_record_may_have_other_names(tmp_path):
    text = TEXT.replace(LABEL, '[labels]\ncolumns = ["died", "fell"]\n')
    lines = ["patient,age,sex,glucose,severity,died,Sturz", "P1,70,M,5,2,1,0", "P2,50,F,,,0,1"]
    path = written(tmp_path, lines, '[file.columns.fell]\nname = "Sturz"')
    assert len(read_table(path, TableSchema.parse(text)).y) == 2


def test_the_column_of_patients_is_never_to_be_ignored(tmp_path):
    lines = [PLAIN[0].replace("patient", "Patient"), *PLAIN[1:]]
    with pytest.raises(DataError, match=r"has no column 'patient' \(is it 'Patient'\?\); rename or add it, or give"):
        read_table(written(tmp_path, lines), SCHEMA)
