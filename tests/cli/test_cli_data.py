"""`coterie data`: all errors of a table at once, for its owner alone, and drafts without numbers."""

import tomllib

import numpy as np
import pytest
from kit.commands import assert_refused, document
from kit.own_files import write_parquet
from kit.site_tables import AGE, OUTCOME
from PIL import Image

SCHEMA = "version = 1\n" + OUTCOME + AGE + 'missing = "mean"\n'
GOOD = ["50;alive", "40;dead", ";dead", "120;dead"]
BAD = ["x;alive", "y;alive", "5;lost", "5"]


@pytest.fixture
def table(tmp_path):
    def write(*lines, name="t.csv"):
        (tmp_path / "s.toml").write_text(SCHEMA)
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(["age;outcome", *lines, ""]))
        return path

    return write


def test_a_table_without_errors(coterie, table):
    status, out, err = coterie("data", "check", table(*GOOD), "--schema", "s.toml")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].endswith("t.csv: 4 records, 4 of them usable; 1 features")
    assert lines[1:4] == [
        "  classes: alive 1, dead 3",
        "  missing: age 1",
        "  note: column 'age': above 100, 1 record clamped: row 5 (120)",
    ]
    assert lines[-1].endswith("this report is for the owner of the records alone")


def test_all_errors_are_reported_at_once(coterie, table):
    status, out, err = coterie("data", "check", table(*GOOD, *BAD), "--schema", "s.toml")
    assert (status, err) == (1, "")
    assert [line.strip() for line in out.splitlines() if "error:" in line] == [
        "error: another number of cells than the 2 column names, 1 record dropped: row 9 (1 cells)",
        "error: column 'age': not a number, 2 records dropped: row 6 (x), 7 (y)",
        "error: column 'outcome': not one of its values, 1 record dropped: row 8 (lost)",
    ]


def test_the_report_as_json(coterie, table):
    path = table(*GOOD, *BAD)
    status, out, err = coterie("data", "check", path, "--schema", "s.toml", "--json")
    assert (status, err) == (1, "")
    report = document(out)
    assert set(report) == {"schema", "warnings", "errors", "files", "left-out"}
    assert (report["left-out"]["records"], len(report["left-out"]["losses"])) == (4, 4)
    found = report["files"][str(path)]
    assert (found["records"], found["usable"]) == (8, 4)
    assert (found["classes"], found["missing"]) == ({"alive": 1, "dead": 3}, {"age": 1})
    assert [each["count"] for each in found["errors"]] == [1, 2, 1]
    said = {"column": "age", "what": "not a number", "effect": "dropped", "hint": "", "count": 2}
    assert found["errors"][1] == said | {"by-class": {"alive": 2}, "rows": [6, 7], "values": ["x", "y"]}
    assert [each["what"] for each in found["notes"]] == ["above 100"]


def test_a_folder_of_training_and_test_data(coterie, table, tmp_path):
    table(*GOOD, name="site/train.csv")
    table(*BAD, name="site/test.csv")
    status, out, _ = coterie("data", "check", "site", "--schema", "s.toml", "--json")
    assert status == 1
    assert [len(each["errors"]) for each in document(out)["files"].values()] == [0, 3]
    for part in ("train", "test"):
        write_parquet(tmp_path / "parquet" / f"{part}.parquet", {"age": [50.0], "outcome": ["dead"]})
    status, out, _ = coterie("data", "check", "parquet", "--schema", "s.toml", "--json")
    assert (status, [each["records"] for each in document(out)["files"].values()]) == (0, [1, 1])
    (tmp_path / "empty").mkdir()
    assert_refused(coterie("data", "check", "empty", "--schema", "s.toml"), "neither train.csv nor train.parquet")


def test_errors_of_the_file_and_of_the_schema(coterie, table, tmp_path):
    path = table(*GOOD)
    path.write_text("age;died\n5;1\n")
    assert_refused(coterie("data", "check", path, "--schema", "s.toml"), "has no column 'outcome'; rename or add it")
    assert_refused(coterie("data", "check", "absent.csv", "--schema", "s.toml"), "absent.csv does not exist")
    (tmp_path / "s.toml").write_text(SCHEMA.replace("mean = 50", "").replace("scale = 10", "scale = 0"))
    status, out, err = coterie("data", "check", path, "--schema", "s.toml")
    assert (status, out) == (1, "")
    assert [line.partition(": must")[0] for line in err.splitlines()] == [
        "error: s.toml: column 'age': mean is missing; must be a finite number, from public knowledge",
        "error: s.toml: column 'age': scale = 0; must be a positive finite number, from public knowledge",
    ]


def test_plainly_unscaled_columns_are_warned_of(coterie, table, tmp_path):
    path = table(*GOOD)
    (tmp_path / "s.toml").write_text(SCHEMA.replace("scale = 10", "scale = 0.5"))
    status, out, _ = coterie("data", "check", path, "--schema", "s.toml")
    assert status == 0
    assert "warning: table-schema: values of column 'age' reach 100 after scaling" in out
    assert "warning: feature 'age' reaches 100;" in out


def test_a_draft_becomes_a_schema(coterie, table, tmp_path):
    path = table("71;dead")
    status, out, err = coterie("data", "schema", path, "--label", "outcome")
    assert (status, err) == (0, "")
    assert "71" not in out
    (tmp_path / "draft.toml").write_text(out)
    status, _, err = coterie("data", "check", path, "--schema", "draft.toml")
    assert (status, len(err.splitlines())) == (1, 3)  # classes, mean and scale are for a person to add
    filled = out.replace('# classes = ["...", "..."]', 'classes = ["alive", "dead"]')
    (tmp_path / "draft.toml").write_text(filled.replace("# mean =", "mean = 50").replace("# scale =", "scale = 10"))
    assert coterie("data", "check", path, "--schema", "draft.toml")[0] == 0
    assert_refused(coterie("data", "schema", path, "--label", "x"), "has no column 'x'")
    assert_refused(coterie("data", "schema", "absent.csv"), "absent.csv")


def test_classes_with_other_losses_and_files_beside_are_named(coterie, table, tmp_path):
    table(*["50;alive"] * 8, *["x;dead"] * 9, "50;dead", name="site/train.csv")
    (tmp_path / "site" / "ward-b.csv").write_text("age;outcome\n")
    status, out, _ = coterie("data", "check", "site", "--schema", "s.toml")
    assert status == 1
    assert "left out: .csv file beside the data that are read, 1 file left out, such as ward-b.csv" in out
    assert (
        "warning: losses differ between classes: 9 of 10 of class dead are left out, and 0 of 8 of class alive" in out
    )


def test_no_usable_record_is_an_error(coterie, table, tmp_path):
    path = table(*["50;Alive"] * 4)
    (tmp_path / "s.toml").write_text(SCHEMA.replace('"dead"]', '"dead"]\nunknown = "drop"'))
    status, out, _ = coterie("data", "check", path, "--schema", "s.toml")
    assert status == 1
    assert "4 records, 0 of them usable" in out


def test_images_need_no_schema(coterie, tmp_path):
    for i in range(4):
        (tmp_path / "own" / str(i % 2)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((6, 5), i, np.uint8)).save(tmp_path / "own" / str(i % 2) / f"{i}.png")
    (tmp_path / "own" / "1" / "scan.dcm").write_bytes(b"DICM")
    status, out, err = coterie("data", "check", "own")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "own: 4 usable records"
    assert lines[1].startswith("4 images of 1x6x5, classes 0..1, ")
    assert lines[2] == "unsupported file type .dcm, 1 file left out (1 of class 1), such as 1/scan.dcm"
    assert lines[-1] == "this report is for the owner of the records alone"
    (tmp_path / "own" / "0" / "broken.png").write_bytes(b"")
    status, out, err = coterie("data", "check", "own", "--input-shape", "1x6x5", "--num-classes", "1", "--json")
    assert (status, err) == (1, "")
    content = document(out)
    assert (content["usable"], content["classes"]) == (2, {"0": 2})
    assert (content["left-out"]["records"], content["left-out"]["files"]) == (3, 1)
    assert_refused(coterie("data", "check", "own", "--input-shape", "1x6x5"), "give both, or neither")


@pytest.mark.parametrize("words", [(), ("t.csv", "--schema", "s.toml", "--epsilon", "2", "--json"), ("--help",)])
def test_scales_are_no_longer_computed_from_records(coterie, table, tmp_path, words):
    table(*GOOD)
    files = sorted(tmp_path.iterdir())
    refusal = "coterie data scales was removed", "from publications", "docs/tables.md"
    assert_refused(coterie("data", "scales", *words), *refusal)
    assert sorted(tmp_path.iterdir()) == files
    assert "│ scales" not in coterie("data", "--help")[1]


# ---- drafts of what a site says about its table ----------------------------------------------------------------------


def test_a_draft_of_a_site_makes_its_table_readable(coterie, table, tmp_path):
    path = table()
    path.write_bytes("Klinik Süd\n\nAGE;Straße;Outcome\n50,5;Mühlweg;dead\n".encode("cp1252"))
    status, out, err = coterie("data", "site", path, "--schema", "s.toml")
    assert (status, err) == (0, "")
    columns = {"outcome": {"name": "Outcome"}, "age": {"name": "AGE"}}
    file = {"encoding": "cp1252", "skip-lines": 2, "decimal": ",", "columns": columns}
    assert tomllib.loads(out) == {"ignore": ["Straße"], "file": file}
    assert "50,5" not in out
    assert out.startswith("# t.site.toml: check all of it")
    (tmp_path / "t.site.toml").write_text(out)
    assert coterie("data", "check", path, "--schema", "s.toml")[0] == 0


@pytest.mark.parametrize(
    ("content", "name", "expected"),
    [
        ("age,outcome\n50,dead\n", "t.csv", {}),
        ("Export\nage,outcome\n50,dead\n", "t.tsv", {"file": {"skip-lines": 1, "delimiter": ","}}),
        ("age\toutcome\n50\tdead\n".encode("utf-16-le"), "t.csv", {"file": {"encoding": "utf-16-le"}}),
        ("age,outcome\n50,dead\n".encode("utf-16-be"), "t.csv", {"file": {"encoding": "utf-16-be"}}),
        ("age,x,y\n50,dead,1\n", "t.csv", {"ignore": ["x", "y"], "file": {"columns": {"outcome": {}}}}),
        ("age,outcome\n50,de\0d\n", "t.csv", {}),
    ],
)
def test_a_draft_of_a_site_says_what_differs(coterie, table, tmp_path, content, name, expected):
    path = table(name=name)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    out = coterie("data", "site", path, "--schema", "s.toml")[1]
    assert tomllib.loads(out) == expected
    path.with_name("t.site.toml").write_text(out)
    assert "t.site.toml" not in "".join(map(str, coterie("data", "check", path, "--schema", "s.toml")[1:]))
