"""Labelled image data sets: embedded, in torchvision's folder layout, or in a NumPy archive."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.datasets.sources import DataError, DatasetInfo, Source


def _read_digits(info: DatasetInfo, root: Path) -> Source:
    """Split with NumPy's legacy generator: its stream is frozen, so the split is the same on every platform."""
    table = _digits()
    order = np.random.RandomState(0).permutation(len(table))
    x = (table[order, :-1].reshape(-1, 1, 8, 8) / 16).astype(np.float32)
    y = table[order, -1].astype(np.int64)
    n = info.train_size
    return Source(info.name, x[:n], y[:n], x[n:], y[n:], info.num_classes, reuse=True)


def _digits() -> npt.NDArray[np.float64]:
    """Return the (1797, 65) pixels and labels of scikit-learn's digits, without importing it, which takes a second."""
    spec = find_spec("sklearn")
    (folder,) = spec.submodule_search_locations if spec and spec.submodule_search_locations else [""]
    path = Path(folder, "datasets/data/digits.csv.gz")
    if path.exists():
        return np.loadtxt(path, delimiter=",")
    from sklearn.datasets import load_digits

    digits = load_digits()
    return np.column_stack([digits.data, digits.target])


def _read_subset(info: DatasetInfo, root: Path) -> Source:
    path = root / info.files[0]
    try:
        with np.load(path, allow_pickle=False) as archive:
            x, y = ({subset: archive[f"{array}_{subset}"] for subset in ("train", "test")} for array in "xy")
    except Exception as error:  # zipfile and NumPy raise arbitrary errors for corrupt archives
        raise DataError(
            f"dataset '{info.name}': {path} is not a numpy archive of x_train, y_train, x_test and y_test "
            f"({type(error).__name__}: {error}); to get it: {info.obtain}"
        ) from error
    labels = {subset: y[subset].astype(np.int64) for subset in y}
    return Source(info.name, x["train"], labels["train"], x["test"], labels["test"], info.num_classes)


@dataclass(frozen=True)
class _Torchvision:
    """A data set read and downloaded by torchvision.

    Attributes:
        reader: name of the torchvision class.
        folder: folder of the files.
        form: description of the files for messages.
        images: converts the image array of the class to (n, C, H, W).
        options: options of the class.
        labels: labels to keep, renumbered 0, 1, ... in this order; None keeps all unchanged.
        parts: options of the training part and of the test part.
        targets: name of the label array of the class.
    """

    reader: str
    folder: str
    form: str
    images: Callable[[Any], Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    labels: range | None = None
    parts: tuple[Mapping[str, Any], Mapping[str, Any]] = ({"train": True}, {"train": False})
    targets: str = "targets"

    def read(self, info: DatasetInfo, root: Path) -> Source:
        """Read the `Source` from the files below `root`."""
        make = self._class(info.name)
        try:
            train, test = (make(root, download=False, **arguments, **self.options) for arguments in self.parts)
        except Exception as error:  # torchvision does not validate files and raises arbitrary errors
            raise DataError(
                f"dataset '{info.name}': a file in {root / self.folder} is not a valid {self.form} file "
                f"({type(error).__name__}: {error}); remove that folder and use `{info.obtain}`"
            ) from error
        return Source(info.name, *self._examples(train), *self._examples(test), info.num_classes)

    def _examples(self, dataset: Any) -> tuple[Any, Any]:
        x, y = np.asarray(dataset.data), np.asarray(getattr(dataset, self.targets), np.int64)
        if self.labels is not None:
            kept = np.isin(y, self.labels)
            x, y = x[kept], y[kept] - self.labels.start
        return self.images(x), y

    def fetch(self, name: str, root: Path) -> Path:
        """Download missing files to `root` and return their folder."""
        self._class(name)(root, download=True, **self.options)
        return root / self.folder

    def _class(self, name: str) -> Callable[..., Any]:
        try:
            from torchvision import datasets
        except (ImportError, OSError, RuntimeError) as error:  # raised by a build for another torch version
            raise DataError(
                f"dataset '{name}' requires torchvision, which cannot be imported ({error}); "
                "install it with `pip install 'coterie[vision]'`, from the index that your torch is from, "
                "or use dataset 'digits', which does not require it"
            ) from error
        return getattr(datasets, self.reader)  # type: ignore[no-any-return]


def _grey(x: Any) -> Any:
    """(n, H, W) to (n, 1, H, W)."""
    return x[:, None]


def _upright(x: Any) -> Any:
    """Transpose EMNIST's images, which are stored transposed: (n, W, H) to (n, 1, H, W)."""
    return x[:, None].swapaxes(2, 3)


def _channels_first(x: Any) -> Any:
    """(n, H, W, C) to (n, C, H, W)."""
    return np.ascontiguousarray(x.transpose(0, 3, 1, 2))


def _thirds(x: Any) -> Any:
    """(n, C, H, W) to (n, C, H/3, W/3): the mean of 3 x 3 pixels, rounded to the nearest byte; there are no ties."""
    n, channels, height, width = x.shape
    sums = x.reshape(n, channels, height // 3, 3, width // 3, 3).sum(axis=(3, 5), dtype=np.uint16)
    return ((sums + 4) // 9).astype(np.uint8)


def _by_torchvision(
    name: str,
    title: str,
    shape: tuple[int, int, int],
    num_classes: int,
    sizes: tuple[int, int] | tuple[None, None],
    licence: str,
    files: tuple[str, ...],
    reader: _Torchvision,
) -> DatasetInfo:
    return DatasetInfo(
        name,
        title,
        shape,
        num_classes,
        sizes[0],
        sizes[1],
        licence,
        f"coterie datasets --download {name} --data-dir DIR",
        reader.read,
        tuple(f"{reader.folder}/{file}" for file in files),
        reader.fetch,
    )


def _idx_files(train: str, test: str) -> tuple[str, ...]:
    return tuple(f"{subset}-{what}-ubyte" for subset in (train, test) for what in ("images-idx3", "labels-idx1"))


#: Built-in image data sets.
IMAGES: tuple[DatasetInfo, ...] = (
    DatasetInfo(
        "digits",
        "Handwritten digits (UCI Optical Recognition, the copy inside scikit-learn)",
        (1, 8, 8),
        10,
        1400,
        397,
        "CC BY 4.0",
        "embedded: nothing to download",
        _read_digits,
    ),
    _by_torchvision(
        "mnist",
        "MNIST handwritten digits (LeCun, Cortes, Burges)",
        (1, 28, 28),
        10,
        (60_000, 10_000),
        "CC BY-SA 3.0",
        _idx_files("train", "t10k"),
        _Torchvision("MNIST", "MNIST/raw", "idx", _grey),
    ),
    _by_torchvision(
        "fashion-mnist",
        "Fashion-MNIST clothes (Zalando, arXiv:1708.07747)",
        (1, 28, 28),
        10,
        (60_000, 10_000),
        "MIT",
        _idx_files("train", "t10k"),
        _Torchvision("FashionMNIST", "FashionMNIST/raw", "idx", _grey),
    ),
    _by_torchvision(
        "emnist",
        "EMNIST letters and digits, split bymerge (Cohen et al., arXiv:1702.05373)",
        (1, 28, 28),
        47,
        (697_932, 116_323),
        "public domain (NIST Special Database 19)",
        _idx_files("emnist-bymerge-train", "emnist-bymerge-test"),
        _Torchvision("EMNIST", "EMNIST/raw", "idx", _upright, {"split": "bymerge"}),
    ),
    _by_torchvision(
        "femnist",
        "The lower-case letters a to j of EMNIST, split byclass: LCFL's FEMNIST, without LEAF's writers",
        (1, 28, 28),
        10,
        (None, None),
        "public domain (NIST Special Database 19)",
        _idx_files("emnist-byclass-train", "emnist-byclass-test"),
        _Torchvision("EMNIST", "EMNIST/raw", "idx", _upright, {"split": "byclass"}, labels=range(36, 46)),
    ),
    _by_torchvision(
        "cifar10",
        "CIFAR-10 (Krizhevsky 2009)",
        (3, 32, 32),
        10,
        (50_000, 10_000),
        "none stated",
        (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta"),
        _Torchvision("CIFAR10", "cifar-10-batches-py", "CIFAR", _channels_first),
    ),
    _by_torchvision(
        "cifar100",
        "CIFAR-100, fine labels (Krizhevsky 2009)",
        (3, 32, 32),
        100,
        (50_000, 10_000),
        "none stated",
        ("train", "test", "meta"),
        _Torchvision("CIFAR100", "cifar-100-python", "CIFAR", _channels_first),
    ),
    _by_torchvision(
        "stl10",
        "STL-10's labelled images, 32x32 by the mean of 3x3 pixels (Coates, Ng, Lee 2011)",
        (3, 32, 32),
        10,
        (5000, 8000),
        "none stated",
        ("train_X.bin", "train_y.bin", "test_X.bin", "test_y.bin", "unlabeled_X.bin"),
        _Torchvision(
            "STL10", "stl10_binary", "STL-10", _thirds, parts=({"split": "train"}, {"split": "test"}), targets="labels"
        ),
    ),
    DatasetInfo(
        "cifar10-subset",
        "The first 1,017 images of each of CIFAR-10's files; results are not comparable with CIFAR-10's",
        (3, 32, 32),
        10,
        5085,
        1017,
        "none stated",
        "the numpy archive cifar10_subset.npz (uint8 x_train, y_train, x_test, y_test), put in DIR/cifar10",
        _read_subset,
        ("cifar10/cifar10_subset.npz",),
    ),
)
