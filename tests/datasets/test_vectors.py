import hashlib

import numpy as np
import pytest

from coterie.bench.rare_tumours import rare_tumours
from coterie.datasets import DATASETS, LINES, DataError, Partition, federate, load


def table(seed=0):
    """Rows as the file has them, every coordinate and digit among them."""
    rng = np.random.default_rng(seed)
    return np.column_stack([rng.integers(101, size=(10_992, 16)), np.arange(10_992) % 10])


def write(root, rows, separator=", "):
    path = root / "pendigits" / "penbased.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(separator.join(map(str, row)) + "\n" for row in rows), "latin-1")


def both(source):
    """All rows as the file has them, training rows first."""
    x, y = np.concatenate([source.train_x, source.test_x]), np.concatenate([source.train_y, source.test_y])
    return np.column_stack([np.rint((x + 1) * 50).astype(int), y])


def test_pendigits_are_read_and_scaled(tmp_path):
    rows = table()
    write(tmp_path, rows)
    source = load("pendigits", str(tmp_path))
    assert (source.train_x.shape, source.test_x.shape, source.num_classes) == ((7494, 16), (3498, 16), 10)
    assert (source.kind, source.train_x.dtype, source.train_y.dtype) == ("vectors", np.float32, np.int64)
    assert (source.train_x.min(), source.train_x.max()) == (-1, 1)
    read = both(source)
    np.testing.assert_array_equal(read[np.lexsort(read.T)], rows[np.lexsort(rows.T)])
    np.testing.assert_allclose(np.bincount(source.test_y), 349.8, atol=5 * np.sqrt(349.8))


def test_the_split_is_the_same_from_any_copy_of_the_rows(tmp_path):
    """UCI has two files, with other spaces, in another order."""
    write(tmp_path / "one", table())
    write(tmp_path / "other", table()[::-1], ",")
    sources = [load("pendigits", str(tmp_path / name)) for name in ("one", "other")]
    np.testing.assert_array_equal(*map(both, sources))


def test_real_pendigits(data_dir):
    source, info = load("pendigits", data_dir), DATASETS["pendigits"]
    assert (source.train_x.shape, source.test_x.shape) == ((info.train_size, 16), (info.test_size, 16))
    assert source.kind == info.kind
    counts = [1143, 1143, 1144, 1055, 1144, 1055, 1056, 1142, 1055, 1055]
    assert np.bincount(both(source)[:, -1]).tolist() == counts
    # Results are compared between versions, so the split must never change.
    assert hashlib.sha256(source.test_y.tobytes()).hexdigest()[:16] == "160bf586a8e88e1d"
    assert hashlib.sha256(source.train_x.tobytes()).hexdigest()[:16] == "712439b2309317c6"


def test_a_missing_file_is_named_with_where_to_find_it(tmp_path):
    with pytest.raises(DataError, match=r"has no pendigits/penbased.csv .*UCI's pendigits.tra and pendigits.tes"):
        load("pendigits", str(tmp_path))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda rows: rows[:-1], r"its shape is \(10991, 17\), not \(10992, 17\)"),
        (lambda rows: rows[:, 1:], r"its shape is \(10992, 16\), not"),
        (lambda rows: [], "invalid literal"),
        (lambda rows: [["\xff\xfe"]], "can't decode"),
        (lambda rows: [*rows[:-1], rows[-1, :5]], "inhomogeneous"),
        (lambda rows: [["x1", *rows[0, 1:]], *rows[1:]], "invalid literal.*x1"),
        (lambda rows: [[0.5, *rows[0, 1:]], *rows[1:]], "invalid literal.*0.5"),
        (lambda rows: [[10**30, *rows[0, 1:]], *rows[1:]], "too large"),
        (lambda rows: [[101, *rows[0, 1:]], *rows[1:]], r"its coordinates span 0\.\.101; allowed: 0\.\.100"),
        (lambda rows: [[-1, *rows[0, 1:]], *rows[1:]], r"its coordinates span -1\.\.100"),
        (lambda rows: [[*rows[0, :-1], 10], *rows[1:]], r"its digits span 0\.\.10; allowed: 0\.\.9"),
        (lambda rows: [[*rows[0, :-1], -1], *rows[1:]], r"its digits span -1\.\.9"),
    ],
)
def test_broken_files_are_refused(tmp_path, change, complaint):
    write(tmp_path, change(table()))
    with pytest.raises(DataError, match=f"penbased.csv is not a csv file of 16 coordinates .*{complaint}.*; needed: "):
        load("pendigits", str(tmp_path))


def test_clinical_tables_are_those_of_scikit_learn():
    cancer, diabetes = load("breast-cancer"), load("diabetes")
    assert (cancer.train_x.shape, cancer.test_x.shape, cancer.num_classes) == ((455, 30), (114, 30), 2)
    both = np.concatenate([cancer.train_x, cancer.test_x])
    assert (both.min(), both.max()) == (-2, 2)  # the ends of the published ranges
    assert np.concatenate([cancer.train_y, cancer.test_y]).sum() == 212  # malignant
    assert (diabetes.train_x.shape, diabetes.test_x.shape, diabetes.num_classes) == ((354, 10), (88, 10), 0)
    targets = np.concatenate([diabetes.train_y, diabetes.test_y]) * 80 + 150
    assert (targets.min(), targets.max()) == (25, 346)
    assert np.concatenate([diabetes.train_x, diabetes.test_x]).std(axis=0) == pytest.approx(1, abs=1e-4)


def test_models_of_single_sites_have_metrics_too(tmp_path):
    from coterie.server import RunConfig, RunFolder
    from coterie.server.simulate import simulate

    values = {"strategy": "local", "dataset": "breast-cancer", "clients": 3, "samples-per-client": 60, "rounds": 4}
    values |= {"model": "linear", "shift": "none", "groups": "1", "privacy-unit": "none", "seed": 0, "lr": 1.0}
    folder = RunFolder.create(tmp_path / "run", RunConfig(values | {"sampling-rate": 1.0}))
    try:
        scores = simulate(folder, cores=1).diagnostics
    finally:
        folder.close()
    assert scores.evaluated_records == 3 * 114
    assert scores.pooled_accuracy == pytest.approx(scores.accuracy)
    assert 0.9 < scores.roc_auc <= 1


def test_rare_tumours_are_those_of_the_table():
    rare, whole = rare_tumours(), load("breast-cancer")
    assert (np.bincount(rare.train_y).tolist(), np.bincount(rare.test_y).tolist()) == ([287, 25], [70, 44])
    np.testing.assert_array_equal(rare.test_x, whole.test_x)
    kept = [row.tobytes() for row in rare.train_x]
    assert len({*kept}) == 312
    assert {*kept} <= {row.tobytes() for row in whole.train_x}


# ---- points about lines ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "deviation"), [("lines-easy", 0.1), ("lines-hard", 1.0)])
def test_points_are_uniform_with_noise(name, deviation):
    """Means and deviations of 40,000 values are within 5 standard errors; the generator's stream is frozen."""
    source, info = load(name), DATASETS[name]
    assert (source.train_x.shape, source.test_x.shape) == ((info.train_size, 1), (info.test_size, 1))
    assert (source.train_x.dtype, source.train_y.dtype, source.num_classes) == (np.float32, np.float32, 0)
    x, y = source.train_x[:, 0].astype(float), source.train_y.astype(float)
    n = len(x)
    assert -1 <= x.min() < -0.999 < 0.999 < x.max() <= 1
    assert abs(x.mean()) < 5 / np.sqrt(3 * n)
    assert abs(y.mean()) < 5 * deviation / np.sqrt(n)
    assert abs(y.std() / deviation - 1) < 5 / np.sqrt(2 * n)
    assert abs(np.corrcoef(x, y)[0, 1]) < 5 / np.sqrt(n)
    assert not np.array_equal(x[: len(source.test_x)], source.test_x[:, 0])


def test_points_never_change():
    """Results are compared between versions."""
    assert hashlib.sha256(load("lines-easy").train_x.tobytes()).hexdigest()[:16] == "80bf6ff578e5bdd4"


@pytest.mark.parametrize("groups", ["4", "4:2:1:1"])
def test_each_group_has_its_line(groups):
    federation = federate("lines-easy", Partition(clients=16, groups=groups, shift="lines"))
    for i in range(16):
        shard = federation.shard(i)
        for part in (shard, shard.test):
            assert (part.x.dtype, part.y.dtype) == (np.float32, np.float32)
            slope, intercept = np.polyfit(part.x[:, 0], part.y, 1)
            np.testing.assert_allclose([slope, intercept], LINES[shard.group], atol=0.02)  # 5 standard errors: 0.018
    if groups == "4:2:1:1":
        assert np.bincount(federation.group_of).tolist() == [8, 4, 2, 2]
