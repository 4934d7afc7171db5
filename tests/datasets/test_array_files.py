"""Archives of arrays as data sets are downloaded: other names, columns of labels, booleans."""

import numpy as np
import pytest

from coterie.datasets import DataError, Declared, report
from coterie.datasets.array_files import read_archive

RNG = np.random.default_rng(0)
IMAGES = Declared.of(None, "1x4x4", 2, None)


def pixels(n, *shape):
    return RNG.integers(0, 256, (n, *(shape or (4, 4)))).astype(np.uint8)


def classes(n, *more):
    return (np.arange(n * max((*more, 1))) % 2).astype(np.uint8).reshape(n, *more)


def medmnist(path, *shape):
    """An archive as MedMNIST publishes them."""
    parts = {"train": 6, "val": 2, "test": 3}
    arrays = {f"{part}_images": pixels(n, *shape) for part, n in parts.items()}
    np.savez(path, **arrays, **{f"{part}_labels": classes(n, 1) for part, n in parts.items()})
    return arrays


def test_an_archive_of_medmnist_is_read_as_it_is(tmp_path):
    path = tmp_path / "pneumoniamnist.npz"
    arrays = medmnist(path)
    train, test = read_archive(path, True)
    np.testing.assert_array_equal(train.x, arrays["train_images"])
    np.testing.assert_array_equal(test.x, arrays["test_images"])
    assert (train.y.tolist(), test.y.tolist()) == ([0, 1, 0, 1, 0, 1], [0, 1, 0])
    lines = report(path, IMAGES).lines()
    assert lines[0] == "6 images of 1x4x4, classes 0..1, 3 more for testing"
    assert lines[1] == "array beside those that are read, 2 arrays left out, such as val_images, val_labels"


def test_colours_of_medmnist_are_its_last_axis(tmp_path):
    path = tmp_path / "bloodmnist.npz"
    arrays = medmnist(path, 4, 4, 3)
    np.testing.assert_array_equal(read_archive(path, True)[0].x[:, 1], arrays["train_images"][..., 1])
    assert report(path, Declared.of(None, "3x4x4", 2, None)).passes


def test_an_archive_of_keras_is_read_as_it_is(tmp_path):
    np.savez(tmp_path / "mnist.npz", x_train=pixels(6), y_train=classes(6), x_test=pixels(3), y_test=classes(3))
    data = report(tmp_path / "mnist.npz", IMAGES)
    assert (data.passes, data.training, data.usable) == (True, 6, 9)


def test_an_archive_of_other_names_says_how_to_write_it(tmp_path):
    np.savez(tmp_path / "a.npz", **{f"array {i}": np.zeros(2) for i in range(9)}, image=pixels(3))
    with pytest.raises(DataError) as error:
        report(tmp_path / "a.npz")
    assert str(error.value) == (
        f"{tmp_path / 'a.npz'} has no array 'x'; its arrays are 'array 0', 'array 1', 'array 2', 'array 3', 'array 4', "
        "'array 5', 'array 6', 'array 7' and 2 more; write it with numpy.savez(path, x=..., y=...)"
    )


def test_a_column_of_labels_is_read(tmp_path):
    np.savez(tmp_path / "a.npz", x=pixels(6), y=classes(6, 1), x_test=pixels(3), y_test=classes(3, 1))
    assert report(tmp_path / "a.npz", IMAGES).passes
    np.savez(tmp_path / "a.npz", x=pixels(6), y=classes(6, 2))
    with pytest.raises(DataError, match="for several labels of a record set task = multi-label"):
        report(tmp_path / "a.npz", IMAGES)


def test_boolean_labels_are_classes(tmp_path):
    np.savez(tmp_path / "a.npz", x=pixels(6), y=classes(6).astype(bool))
    assert report(tmp_path / "a.npz", IMAGES).classes == {"0": 3, "1": 3}
