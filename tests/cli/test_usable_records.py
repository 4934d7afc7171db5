"""`data check`, `describe`, `client --check`, runs and predictions agree on what can be used of a site."""

import csv
from types import SimpleNamespace

import numpy as np
import pytest
from kit.commands import document
from kit.own_files import read_shard, write_parquet
from kit.site_tables import AGE, OUTCOME, SEX
from kit.workbooks import Raw, write_xlsx
from PIL import Image

from coterie.datasets import DataError, Declared, describe, facts, own_federation, own_shard, report
from coterie.datasets.local_files import local_records
from coterie.deploy.commands.client import _report
from coterie.site.node import NodeConfig

SHAPE = "1x6x5"
SCHEMA = "version = 1\n" + OUTCOME + AGE + SEX + 'unknown = "drop"\n'


def drawings(rng, n):
    return rng.integers(0, 256, (n, 1, 6, 5), np.uint8), rng.integers(0, 2, n)


def pictures(path, rng, n=12):
    for i, (pixels, label) in enumerate(zip(*drawings(rng, n), strict=True)):
        folder = path / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[0]).save(folder / f"{i}.{['png', 'bmp', 'tif'][i % 3]}")
    return path


def text(path, content=b"text"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def rows(rng, n):
    sexes, outcomes = "fm", ("alive", "dead")
    return [[int(rng.integers(20, 90)), sexes[rng.integers(2)], outcomes[rng.integers(2)]] for _ in range(n)]


def write_table(path, cells, head=("age", "sex", "outcome")):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([head, *cells])
    return path


# ---- sites: each maker returns the path; then the usable records, and whether all others are left out by rule --------


def clean_images(home, rng):
    return pictures(home / "client-0", rng)


def split_images(home, rng):
    pictures(home / "client-0" / "test", rng, 5)
    return pictures(home / "client-0" / "train", rng).parent


def images_and_other_files(home, rng):
    path = pictures(home / "client-0", rng)
    for name in ("1/a.dcm", "1/b.dcm", "0/deeper/c.png", "labels.csv", "more.zip", "0/README"):
        text(path / name)
    return path


def images_without_a_suffix(home, rng):
    path = pictures(home / "client-0", rng)
    Image.fromarray(drawings(rng, 1)[0][0, 0]).save(path / "0" / "IM1", "PNG")
    Image.fromarray(drawings(rng, 1)[0][0, 0]).save(path / "1" / "a.jfif", "JPEG")
    return path


def broken_images(home, rng):
    path = pictures(home / "client-0", rng)
    text(path / "0" / "broken.png")
    return path


def an_unknown_class(home, rng):
    path = pictures(home / "client-0", rng)
    (path / "val").mkdir()
    Image.fromarray(drawings(rng, 1)[0][0, 0]).save(path / "val" / "a.png")
    return path


def other_files_alone(home, rng):
    text(home / "client-0" / "1" / "a.dcm")
    return home / "client-0"


def archive(home, rng):
    x, y = drawings(rng, 12)
    np.savez(home / "client-0.npz", x=x, y=y, x_test=x[:4], y_test=y[:4])
    return home / "client-0.npz"


def archive_with_gaps(home, rng):
    x, y = drawings(rng, 12)
    np.savez(home / "client-0.npz", x=np.where(np.arange(12)[:, None, None, None] < 3, np.nan, x / 255), y=y)
    return home / "client-0.npz"


def archive_with_labels_of_others(home, rng):
    x, y = drawings(rng, 12)
    np.savez(home / "client-0.npz", x=x, y=np.where(np.arange(12) < 2, 7, y))
    return home / "client-0.npz"


def archive_out_of_range(home, rng):
    x, y = drawings(rng, 12)
    np.savez(home / "client-0.npz", x=x.astype(int) * 2 + 200, y=y)
    return home / "client-0.npz"


def plain_table(home, rng):
    x, y = drawings(rng, 12)
    cells = [[label, *pixels.ravel()] for pixels, label in zip(x, y, strict=True)]
    return write_table(home / "client-0.csv", cells, ["label", *(f"p{i}" for i in range(30))])


def table(home, rng):
    return write_table(home / "client-0.csv", rows(rng, 20))


def table_with_rules(home, rng):
    return write_table(
        home / "client-0.csv", [*rows(rng, 20), [130, "f", "dead"], [50, "x", "alive"], [60, "y", "dead"]]
    )


def table_with_errors(home, rng):
    return write_table(home / "client-0.csv", [*rows(rng, 20), ["old", "f", "dead"], ["", "f", "alive"], [1, "f"]])


def tables_of_two_parts(home, rng):
    write_table(home / "client-0" / "test.csv", rows(rng, 5))
    text(home / "client-0" / "ward-b.csv")
    return write_table(home / "client-0" / "train.csv", rows(rng, 20)).parent


def table_of_other_labels(home, rng):
    return write_table(home / "client-0.csv", [[age, sex, outcome.title()] for age, sex, outcome in rows(rng, 114)])


def excel_table_with_errors(home, rng):
    pytest.importorskip("python_calamine")
    gaps = [Raw('<c t="e"><v>#N/A</v></c>'), "f", "dead"], [Raw("<c><f>1+1</f></c>"), "f", "alive"]
    table = ["age", "sex", "outcome"], *rows(rng, 20), *gaps
    return write_xlsx(home / "client-0.xlsx", {"Sheet": table, "ward b": [["age"]]})


def partitioned_table(home, rng):
    for sex in "fmx":
        ages, _, outcomes = zip(*rows(rng, 10), strict=True)
        write_parquet(home / "client-0" / f"sex={sex}" / "part-0.parquet", {"age": ages, "outcome": outcomes})
    text(home / "client-0" / "_old.csv")
    return home / "client-0"


def small_table(home, rng):
    return write_table(home / "client-0.csv", rows(rng, 1))


SITES = {
    clean_images: (12, True),
    split_images: (17, True),
    images_and_other_files: (12, True),
    images_without_a_suffix: (14, True),
    broken_images: (12, False),
    an_unknown_class: (12, False),
    other_files_alone: (0, False),
    archive: (16, True),
    archive_with_gaps: (9, False),
    archive_with_labels_of_others: (10, False),
    archive_out_of_range: (12, False),
    plain_table: (12, True),
    table: (20, True),
    table_with_rules: (21, True),
    table_with_errors: (20, False),
    tables_of_two_parts: (25, True),
    table_of_other_labels: (0, False),
    excel_table_with_errors: (20, False),
    partitioned_table: (20, True),
    small_table: (1, True),
}


def number(shard):
    return len(shard.y) + (0 if shard.test.y is shard.y else len(shard.test.y))


@pytest.fixture(params=SITES, ids=lambda make: make.__name__)
def site(request, tmp_path):
    """Path, facts, declaration of the owner, options of `data check`, and what is expected."""
    own_shard.cache_clear()
    own_federation.cache_clear()
    make = request.param
    path, (usable, passes) = make(tmp_path, np.random.default_rng(0)), SITES[make]
    by_schema = "table" in make.__name__ and make is not plain_table
    (tmp_path / "schema.toml").write_text(SCHEMA)
    schema = str(tmp_path / "schema.toml") if by_schema else None
    shape = (None, None) if by_schema else (SHAPE, 2)
    node = NodeConfig(client_id=0, schema=schema, input_shape=shape[0], num_classes=shape[1])
    return SimpleNamespace(
        home=tmp_path,
        path=path,
        usable=usable,
        passes=passes,
        node=node,
        facts=facts("own", SHAPE, 2, None, SCHEMA if by_schema else None),
        declared=Declared.of(schema, *shape, None),
        options=["--schema", schema] if by_schema else ["--input-shape", SHAPE, "--num-classes", "2"],
    )


def test_reports_checks_runs_and_predictions_agree(coterie, site):
    stated = reports_agree(coterie, site)
    client_starts_where_data_check_passes(site)
    runs_use_what_the_reports_count(site)
    predictions_use_what_the_reports_count(site, stated)


def reports_agree(coterie, site):
    status, out, err = coterie("data", "check", site.path, *site.options, "--json")
    content, found = document(out), report(site.path, site.declared)
    checked = sum(each["usable"] for each in content["files"].values()) if "files" in content else content["usable"]
    assert (status, err) == (0 if site.passes else 1, "")
    assert (checked, found.usable, found.passes) == (site.usable, site.usable, site.passes)
    assert content["left-out"]["files"] == found.left_out.files
    assert content["left-out"]["records"] == found.left_out.records
    parts = describe(site.path, site.declared).split(", ")
    assert int(parts[0].split()[0]) + (int(parts[2].split()[0]) if "more for testing" in parts[2] else 0) == site.usable
    return found


def client_starts_where_data_check_passes(site):
    if not site.passes:
        with pytest.raises(DataError, match="--skip-invalid" if site.usable else "no usable records"):
            _report(site.path, site.node, False)
    if site.usable:
        assert _report(site.path, site.node, not site.passes).usable == site.usable
    else:
        with pytest.raises(DataError, match="no usable records"):
            _report(site.path, site.node, True)


def runs_use_what_the_reports_count(site):
    known = site.facts
    shard = read_shard(site.path, known.shape, known.task.num_outputs, schema=known.schema, strict=False)
    assert number(shard) == site.usable
    simulation = own_federation(str(site.home), 1, known, None)
    if site.passes or not site.usable:  # a site that loses everything is left out
        assert number(simulation.shard(0)) == site.usable
    else:
        with pytest.raises(DataError):
            simulation.shard(0)


def predictions_use_what_the_reports_count(site, stated):
    """Of a folder with test data, the training data are predicted; labels are not needed."""
    if site.path.is_dir() and (site.path / "train.csv").exists():
        total = sum(len(local_records(site.path / name, site.facts, None).x) for name in ("train.csv", "test.csv"))
        assert total == site.usable
    elif site.passes:
        records = local_records(site.path, site.facts, None)
        assert len(records.x) + records.unused == site.usable
        assert records.left_out.files == stated.left_out.files
    elif site.usable:
        with pytest.raises(DataError):
            local_records(site.path, site.facts, None)
