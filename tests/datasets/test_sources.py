import subprocess
import sys

import numpy as np
import pytest
from kit.own_networks import own_network
from kit.tables import for_rows

from coterie.datasets import DATASETS, DataError, Source, download, load


def small_source(**changes):
    images = {"train_x": np.zeros((3, 1, 2, 2), np.float32), "test_x": np.zeros((1, 1, 2, 2), np.float32)}
    labels = {"train_y": np.array([0, 1, 0]), "test_y": np.array([1]), "num_classes": 2}
    return Source(**{"name": "small", **images, **labels, **changes})


def test_unknown_names_get_the_nearest():
    words = r"'FashionMNIST'; did you mean 'fashion-mnist'\? .* digits, emnist, fashion-mnist, femnist, lines-easy"
    with pytest.raises(DataError, match=words):
        load("FashionMNIST")
    with pytest.raises(DataError, match="did you mean 'digits'"):
        download("digit", "/nowhere")


def test_own_function(monkeypatch):
    source = small_source()
    assert load(own_network(monkeypatch, lambda: source)) is source


@for_rows(
    ("name", "complaint"),
    [
        ("no_such_module:make", "cannot import make from no_such_module"),
        ("math:no_such_function", "cannot import no_such_function from math"),
        (":make", r"cannot import make from \(nothing\)"),
        ("math:pi", "pi is a float, not a function"),
        ("math:sqrt", r"sqrt\(x, /\) must accept \(\)"),
        ("asyncio:get_running_loop", r"get_running_loop\(\) failed: RuntimeError"),
        ("time:time", r"returned a float; it must return a coterie.datasets.Source"),
    ],
)
def test_bad_own_functions_are_explained(name, complaint):
    with pytest.raises(DataError, match=complaint):
        load(name)


@for_rows(
    ("changes", "complaint"),
    [
        ({"train_x": np.zeros((3, 2, 2), np.float32)}, r"train_x and train_y have shapes \(3, 2, 2\)"),
        ({"test_y": np.array([1, 1])}, r"test_x and test_y have shapes"),
        ({"train_x": np.zeros((3, 1, 2, 2))}, "are float64 and int64"),
        ({"train_x": np.full((3, 1, 2, 2), np.nan, np.float32)}, "not finite"),
        ({"train_y": np.array([0, 1, 2])}, r"labels span 0..2; allowed: 0..1"),
        ({"test_x": np.zeros((1, 1, 3, 3), np.float32)}, r"train images are \(1, 2, 2\), test images \(1, 3, 3\)"),
        ({"train_y": [0, 1, 0]}, "must be numpy arrays, not ndarray and list"),
        ({"num_classes": 0}, "float32 and int64, and num_classes is 0"),
        ({"num_classes": -1}, "num_classes is -1; it must be at least 1, or 0 for regression"),
        ({"train_y": np.zeros(3, np.float32)}, "are float32 and float32, and num_classes is 2"),
        ({"test_x": np.zeros((1, 4), np.float32)}, r"train images are \(1, 2, 2\), test vectors \(4,\)"),
    ],
)
def test_impossible_sources_are_refused(changes, complaint):
    with pytest.raises(DataError, match=complaint):
        small_source(**changes)


def tokens(**changes):
    train = {"train_x": np.array([[0, 1], [1, 2], [2, 2], [2, 0]]), "train_y": np.array([2, 2, 0, 1])}
    test = {"test_x": np.array([[1, 1], [0, 0]]), "test_y": np.array([0, 0]), "num_classes": 3}
    owners = {"train_owner": np.array([0, 0, 1, 1]), "test_owner": np.array([1, 0])}
    return small_source(**{**train, **test, **owners, **changes})


def test_kinds_of_examples_and_owners():
    assert (small_source().kind, small_source().owners) == ("images", 0)
    assert (tokens().kind, tokens().owners) == ("tokens", 2)
    shapes = {"train_x": (3, 5), "train_y": 3, "test_x": (1, 5), "test_y": 1}
    lines = small_source(**{name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, num_classes=0)
    assert (lines.kind, lines.num_classes) == ("vectors", 0)
    with pytest.raises(DataError, match="test_x and test_y: a value is not finite"):
        small_source(**{**vars(lines), "test_y": np.array([np.inf], np.float32)})


@for_rows(
    ("changes", "complaint"),
    [
        (
            {"train_x": np.array([[0, 1], [1, 2], [2, 3], [2, 0]])},
            "span 0..3; allowed: 0..num_classes-1, and num_classes is 3",
        ),
        ({"test_x": np.array([[1, -1], [0, 0]])}, r"test_x and test_y: tokens span -1..1"),
        ({"test_x": np.zeros((2, 2), np.float32)}, r"train tokens are \(2,\), test vectors \(2,\)"),
        ({"train_x": np.zeros((4, 2), np.int32)}, "are int32 and int64"),
        ({"num_classes": 0}, "int64 labels .0 classes: float32 targets"),
        ({"test_owner": None}, "test_owner must be an int64 array of shape .2,., as the other .* not NoneType"),
        ({"train_owner": None}, "train_owner must be an int64 array of shape .4,."),
        ({"train_owner": np.array([0, 0, 1])}, r"shape \(4,\), .* not int64 \(3,\)"),
        ({"train_owner": np.array([0, 0, 1, 1.0])}, "not float64"),
        ({"train_owner": np.array([0, 0, 2, 2])}, r"train_owner spans 0..2; each owner 0..2 needs rows"),
        ({"train_owner": np.array([-1, 0, 1, 1])}, r"train_owner spans -1..1"),
        ({"test_owner": np.array([0, 0])}, "test_owner spans 0..0; each owner 0..1 needs rows of training and of test"),
        ({"test_owner": np.array([1, 2])}, r"test_owner spans 1..2; each owner 0..1"),
    ],
)
def test_impossible_tokens_and_owners_are_refused(changes, complaint):
    with pytest.raises(DataError, match=complaint):
        tokens(**changes)


def test_tokens_without_classes_are_refused():
    """There is no alphabet then."""
    y = {"train_y": np.zeros(4, np.float32), "test_y": np.zeros(2, np.float32)}
    with pytest.raises(DataError, match=r"tokens span 0\.\.2; allowed: .* and num_classes is 0"):
        tokens(num_classes=0, **y)


@for_rows("name", sorted(DATASETS))
def test_shipped_sets_say_what_they_are(name):
    info = DATASETS[name]
    assert info.name == name
    assert info.title
    assert info.obtain
    assert info.licence
    assert min(info.shape) >= 1
    assert name == "femnist" or min(info.train_size, info.test_size) >= 1
    assert (info.fetch is not None) == ("--download" in info.obtain)
    assert info.fetch is None or info.files
    assert info.files or load(name).kind == info.kind


def test_importing_the_room_imports_neither_torch_nor_our_other_rooms():
    code = (
        "import sys, coterie.datasets; coterie.datasets.load('digits'); "
        "print(*[m for m in sys.modules if m in ('torch', 'torchvision') or m.startswith('coterie.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    rooms = {name.split(".")[1] for name in done.stdout.split() if "." in name}
    assert rooms == {"datasets", "fields", "files", "tasks"}
    assert not {"torch", "torchvision"} & set(done.stdout.split())
