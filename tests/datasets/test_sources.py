import hashlib
import struct
import subprocess
import sys
import types

import numpy as np
import pytest

from coterie.datasets import DATASETS, DataError, Source, download, load

FOLDERS = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST"}


def write_idx(path, array):
    """LeCun's format: two zero bytes, the type (8 = uint8), the rank, big-endian sizes, the values."""
    path.write_bytes(struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes())


def write_set(root, folder, seed):
    rng = np.random.default_rng(seed)
    raw = root / folder / "raw"
    raw.mkdir(parents=True)
    arrays = {}
    for part, n in (("train", 12), ("t10k", 5)):
        arrays[part] = (rng.integers(256, size=(n, 28, 28), dtype=np.uint8), rng.integers(10, size=n, dtype=np.uint8))
        write_idx(raw / f"{part}-images-idx3-ubyte", arrays[part][0])
        write_idx(raw / f"{part}-labels-idx1-ubyte", arrays[part][1])
    return arrays


def own_dataset(monkeypatch, function):
    module = types.ModuleType("own_data")
    module.make = function
    monkeypatch.setitem(sys.modules, "own_data", module)
    return "own_data:make"


def small_source(**changes):
    arguments = {
        "name": "small",
        "train_x": np.zeros((3, 1, 2, 2), np.float32),
        "train_y": np.array([0, 1, 0]),
        "test_x": np.zeros((1, 1, 2, 2), np.float32),
        "test_y": np.array([1]),
        "num_classes": 2,
    }
    return Source(**(arguments | changes))


def test_digits_are_a_fixed_split_of_scikit_learns():
    from sklearn.datasets import load_digits

    source = load("digits")
    info = DATASETS["digits"]
    assert source.train_x.shape == (info.train_size, *info.shape)
    assert source.test_x.shape == (info.test_size, *info.shape)
    assert source.train_x.dtype == np.float32
    assert (source.train_x.min(), source.train_x.max()) == (0, 1)
    assert source.reuse
    both = np.concatenate([source.train_x, source.test_x]).reshape(1797, 64)
    labels = np.concatenate([source.train_y, source.test_y])
    ours = np.column_stack([both * 16, labels])
    theirs = np.column_stack([load_digits().data, load_digits().target])
    np.testing.assert_array_equal(ours[np.lexsort(ours.T)], theirs[np.lexsort(theirs.T)])
    # Results are compared between versions, so the split must never change.
    assert hashlib.sha256(source.test_y.tobytes()).hexdigest()[:16] == "55fb24d73fa3d854"
    assert np.bincount(source.test_y).min() >= 25


@pytest.mark.parametrize("name", sorted(FOLDERS))
def test_idx_files_are_read_as_written(tmp_path, name):
    arrays = write_set(tmp_path, FOLDERS[name], seed=1)
    source = load(name, str(tmp_path))
    np.testing.assert_array_equal(source.train_x[:, 0], arrays["train"][0])
    np.testing.assert_array_equal(source.train_y, arrays["train"][1])
    np.testing.assert_array_equal(source.test_x[:, 0], arrays["t10k"][0])
    np.testing.assert_array_equal(source.test_y, arrays["t10k"][1])
    assert (source.num_classes, source.reuse) == (10, False)
    assert load(name, str(tmp_path)) is source


def test_data_dir_falls_back_to_the_environment(tmp_path, monkeypatch):
    first, second = tmp_path / "first", tmp_path / "second"
    write_set(first, "MNIST", seed=1)
    write_set(second, "MNIST", seed=2)
    monkeypatch.setenv("COTERIE_DATA", str(first))
    source = load("mnist")
    assert source is load("mnist", str(first))
    assert not np.array_equal(source.train_x, load("mnist", str(second)).train_x)
    monkeypatch.setenv("COTERIE_DATA", str(second))
    assert load("mnist") is load("mnist", str(second))


@pytest.mark.parametrize("name", sorted(FOLDERS))
def test_real_files(data_dir, name):
    source, info = load(name, data_dir), DATASETS[name]
    assert source.train_x.shape == (info.train_size, *info.shape)
    assert source.test_x.shape == (info.test_size, *info.shape)
    assert set(source.train_y) == set(range(info.num_classes))


def test_missing_files_name_the_folder_the_file_and_the_ways_out(tmp_path, monkeypatch):
    monkeypatch.delenv("COTERIE_DATA", raising=False)
    ways = ("--data-dir DIR", "COTERIE_DATA", "coterie datasets --download mnist --data-dir DIR")
    cases = {
        None: "needs a folder",
        str(tmp_path / "absent"): f"{tmp_path / 'absent'} does not exist",
        str(tmp_path): f"{tmp_path} has no MNIST/raw/train-images-idx3-ubyte",
    }
    for folder, complaint in cases.items():
        with pytest.raises(DataError) as caught:
            load("mnist", folder)
        for part in (complaint, "MNIST/raw/train-images-idx3-ubyte", *ways):
            assert part in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", [b"", b"not an idx file", b"\0\0\x08\x03\0\0\0\x0c\0\0\0\x1c\0\0\0\x1c" + b"x" * 50])
def test_broken_files_are_refused(tmp_path, damage):
    write_set(tmp_path, "MNIST", seed=1)
    (tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte").write_bytes(damage)
    with pytest.raises(DataError, match="not a valid idx file"):
        load("mnist", str(tmp_path))


def test_unknown_names_get_the_nearest():
    with pytest.raises(
        DataError, match=r"'FashionMNIST'; the nearest is 'fashion-mnist'; .* digits, fashion-mnist, mnist"
    ):
        load("FashionMNIST")
    with pytest.raises(DataError, match="the nearest is 'digits'"):
        download("digit", "/nowhere")


def test_unusable_torchvision_is_explained(tmp_path, monkeypatch):
    write_set(tmp_path, "MNIST", seed=1)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(DataError, match=r"torchvision, which cannot be imported .*'digits'"):
        load("mnist", str(tmp_path))


def test_download_uses_torchvision_in_the_folder_asked_for(tmp_path, monkeypatch):
    from torchvision import datasets

    calls = []
    monkeypatch.setattr(datasets, "MNIST", lambda root, download: calls.append((root, download)))
    assert download("mnist", str(tmp_path)) == tmp_path / "MNIST" / "raw"
    assert calls == [(tmp_path, True)]

    def fails(root, download):
        raise RuntimeError("no route to host")

    monkeypatch.setattr(datasets, "MNIST", fails)
    with pytest.raises(DataError, match=r"could not download 'mnist' .*no route to host"):
        download("mnist", str(tmp_path))
    with pytest.raises(DataError, match="nothing to download"):
        download("digits", str(tmp_path))


def test_own_function(monkeypatch):
    source = small_source()
    assert load(own_dataset(monkeypatch, lambda: source)) is source


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("no_such_module:make", "cannot import make from no_such_module"),
        ("math:no_such_function", "cannot import no_such_function from math"),
        (":make", r"cannot import make from \(nothing\)"),
        ("math:pi", "pi is a float, not a function"),
        ("math:sqrt", r"sqrt\(\) failed: TypeError"),
        ("time:time", r"returned a float; it must return a coterie.datasets.Source"),
    ],
)
def test_bad_own_functions_are_explained(name, complaint):
    with pytest.raises(DataError, match=complaint):
        load(name)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"train_x": np.zeros((3, 2, 2), np.float32)}, r"train_x and train_y have shapes \(3, 2, 2\)"),
        ({"test_y": np.array([1, 1])}, r"test_x and test_y have shapes"),
        ({"train_x": np.zeros((3, 1, 2, 2))}, "are float64 and int64"),
        ({"train_x": np.full((3, 1, 2, 2), np.nan, np.float32)}, "not finite"),
        ({"train_y": np.array([0, 1, 2])}, r"labels span 0..2; allowed: 0..1"),
        ({"test_x": np.zeros((1, 1, 3, 3), np.float32)}, r"train images are \(1, 2, 2\), test images \(1, 3, 3\)"),
        ({"train_y": [0, 1, 0]}, "must be numpy arrays, not ndarray and list"),
        ({"num_classes": 0}, "num_classes is 0"),
    ],
)
def test_impossible_sources_are_refused(changes, complaint):
    with pytest.raises(DataError, match=complaint):
        small_source(**changes)


def test_importing_the_room_imports_neither_torch_nor_our_other_rooms():
    code = (
        "import sys, coterie.datasets; coterie.datasets.load('digits'); "
        "print(*[m for m in sys.modules if m in ('torch', 'torchvision') or m.startswith('coterie.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {name.split(".")[1] for name in done.stdout.split() if "." in name} == {"datasets"}
    assert not {"torch", "torchvision"} & set(done.stdout.split())
