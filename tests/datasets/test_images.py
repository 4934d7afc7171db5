import hashlib
import pickle
import struct
import sys

import numpy as np
import pytest

from coterie.datasets import DATASETS, DataError, download, images, load

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
    digits = load_digits()
    theirs = np.column_stack([digits.data, digits.target])
    np.testing.assert_array_equal(ours[np.lexsort(ours.T)], theirs[np.lexsort(theirs.T)])
    # Results are compared between versions, so the split must never change.
    assert hashlib.sha256(source.test_y.tobytes()).hexdigest()[:16] == "55fb24d73fa3d854"
    assert np.bincount(source.test_y).min() >= 25


def test_digits_come_from_scikit_learn_wherever_it_keeps_them(monkeypatch):
    table = images._digits()
    monkeypatch.setattr(images, "find_spec", lambda name: None)
    np.testing.assert_array_equal(images._digits(), table)


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


@pytest.mark.parametrize("name", [*sorted(FOLDERS), "cifar10-subset"])
def test_real_files(data_dir, name):
    source, info = load(name, data_dir), DATASETS[name]
    assert source.train_x.shape == (info.train_size, *info.shape)
    assert source.test_x.shape == (info.test_size, *info.shape)
    assert set(source.train_y) == set(range(info.num_classes))


def test_missing_files_name_the_folder_the_file_and_the_ways_out(tmp_path, monkeypatch):
    monkeypatch.delenv("COTERIE_DATA", raising=False)
    ways = ("--data-dir DIR", "COTERIE_DATA", "coterie datasets --download mnist --data-dir DIR")
    cases = {
        None: "requires a folder",
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
    with pytest.raises(DataError, match=r"dataset 'cifar10-subset' is the numpy archive cifar10_subset\.npz"):
        download("cifar10-subset", str(tmp_path))


@pytest.mark.parametrize(
    ("name", "reader", "folder", "options"),
    [
        ("emnist", "EMNIST", "EMNIST/raw", {"split": "bymerge"}),
        ("femnist", "EMNIST", "EMNIST/raw", {"split": "byclass"}),
        ("cifar10", "CIFAR10", "cifar-10-batches-py", {}),
        ("cifar100", "CIFAR100", "cifar-100-python", {}),
        ("stl10", "STL10", "stl10_binary", {}),
    ],
)
def test_download_of_other_layouts(tmp_path, monkeypatch, name, reader, folder, options):
    from torchvision import datasets

    calls = []
    monkeypatch.setattr(datasets, reader, lambda root, **arguments: calls.append((root, arguments)))
    assert download(name, str(tmp_path)) == tmp_path / folder
    assert calls == [(tmp_path, {"download": True, **options})]


def write_emnist(root, split="bymerge", train=range(47), test=(46, 3)):
    """Each image is its label in the upper right corner of an upright image; files hold images transposed."""
    raw = root / "EMNIST" / "raw"
    raw.mkdir(parents=True)
    for part, labels in (("train", np.array(train)), ("test", np.array(test))):
        upright = np.zeros((len(labels), 28, 28), np.uint8)
        upright[:, 0, 27] = labels
        write_idx(raw / f"emnist-{split}-{part}-images-idx3-ubyte", upright.transpose(0, 2, 1))
        write_idx(raw / f"emnist-{split}-{part}-labels-idx1-ubyte", labels.astype(np.uint8))


def test_emnist_is_put_upright(tmp_path):
    write_emnist(tmp_path)
    source = load("emnist", str(tmp_path))
    assert (source.train_x.shape, source.test_x.shape, source.num_classes) == ((47, 1, 28, 28), (2, 1, 28, 28), 47)
    np.testing.assert_array_equal(source.train_x[:, 0, 0, 27], source.train_y)
    np.testing.assert_array_equal(source.test_y, [46, 3])
    np.testing.assert_array_equal(source.test_x[:, 0, 0, 27], [46, 3])
    assert source.test_x.sum() == 49


def test_femnist_is_the_letters_a_to_j(tmp_path):
    """Of the 62 classes 0 to 9, A to Z, a to z: "a" is the 37th, label 36, and "j" label 45."""
    write_emnist(tmp_path, "byclass", train=range(62), test=(45, 35, 36, 46, 40, 36, 0))
    source = load("femnist", str(tmp_path))
    assert (source.train_x.shape, source.num_classes) == ((10, 1, 28, 28), 10)
    assert source.train_y.tolist() == list(range(10))
    assert source.train_x[:, 0, 0, 27].tolist() == list(range(36, 46))
    assert source.test_y.tolist() == [9, 0, 4, 0]
    assert source.test_x[:, 0, 0, 27].tolist() == [45, 36, 40, 36]


def write_cifar(root, monkeypatch, reader):
    """Batches in Krizhevsky's format, and torchvision's checksums replaced by theirs: images by file name."""
    from torchvision import datasets

    cls = getattr(datasets, reader)
    folder = root / cls.base_folder
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    key = {"CIFAR10": "labels", "CIFAR100": "fine_labels"}[reader]
    arrays = {}

    def write(name, content):
        (folder / name).write_bytes(pickle.dumps(content))
        return [name, hashlib.md5((folder / name).read_bytes()).hexdigest()]

    for attribute in ("train_list", "test_list"):
        lists = []
        for name, _ in getattr(cls, attribute):
            x, y = rng.integers(256, size=(4, 3, 32, 32), dtype=np.uint8), rng.integers(10, size=4).tolist()
            arrays[name] = x, y
            lists.append(write(name, {"data": x.reshape(4, -1), key: y, "coarse_labels": [19] * 4}))
        monkeypatch.setattr(cls, attribute, lists)
    name, md5 = write(cls.meta["filename"], {cls.meta["key"]: [str(i) for i in range(100)]})
    monkeypatch.setattr(cls, "meta", {**cls.meta, "filename": name, "md5": md5})
    return folder, arrays


@pytest.mark.parametrize(
    ("name", "reader", "train", "test", "classes"),
    [
        ("cifar10", "CIFAR10", [f"data_batch_{i}" for i in range(1, 6)], "test_batch", 10),
        ("cifar100", "CIFAR100", ["train"], "test", 100),
    ],
)
def test_cifar_is_read_as_written(tmp_path, monkeypatch, name, reader, train, test, classes):
    _, arrays = write_cifar(tmp_path, monkeypatch, reader)
    source = load(name, str(tmp_path))
    np.testing.assert_array_equal(source.train_x, np.concatenate([arrays[file][0] for file in train]))
    assert source.train_y.tolist() == [label for file in train for label in arrays[file][1]]
    np.testing.assert_array_equal(source.test_x, arrays[test][0])
    assert source.test_y.tolist() == arrays[test][1]
    assert (source.num_classes, source.train_x.shape[1:]) == (classes, DATASETS[name].shape)


def write_stl(root, monkeypatch):
    """Files in Coates' format, column by column, labels from 1, and torchvision's checksums replaced by theirs."""
    from torchvision.datasets import STL10

    folder = root / "stl10_binary"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    arrays = {}
    for part, n in (("train", 4), ("test", 3), ("unlabeled", 1)):
        x, y = rng.integers(256, size=(n, 3, 96, 96), dtype=np.uint8), rng.permutation(10)[:n]
        x[0, 0, :3, :6] = [[0, 0, 0, 255, 255, 255], [1, 1, 1, 255, 255, 255], [1, 1, 0, 255, 255, 251]]  # 5/9, 254.6
        x[0, 0, :3, 6:9] = [[0, 0, 0], [1, 1, 1], [1, 0, 0]]  # 4/9
        (folder / f"{part}_X.bin").write_bytes(x.transpose(0, 1, 3, 2).tobytes())
        (folder / f"{part}_y.bin").write_bytes((y + 1).astype(np.uint8).tobytes())
        arrays[part] = x, y
    for attribute in ("train_list", "test_list"):
        names = [name for name, _ in getattr(STL10, attribute)]
        sums = [hashlib.md5((folder / name).read_bytes()).hexdigest() for name in names]
        monkeypatch.setattr(STL10, attribute, [list(pair) for pair in zip(names, sums, strict=True)])
    return folder, arrays


def test_stl10_is_the_mean_of_nine_pixels(tmp_path, monkeypatch):
    _, arrays = write_stl(tmp_path, monkeypatch)
    source = load("stl10", str(tmp_path))
    assert (source.train_x.dtype, source.num_classes) == (np.uint8, 10)
    for part, x, y in (("train", source.train_x, source.train_y), ("test", source.test_x, source.test_y)):
        images, labels = arrays[part]
        assert x.shape == (len(labels), *DATASETS["stl10"].shape)
        assert y.tolist() == labels.tolist()
        assert x[0, 0, 0, :3].tolist() == [1, 255, 0]
        means = sum(images[:, :, i::3, j::3].astype(float) for i in range(3) for j in range(3)) / 9
        np.testing.assert_array_equal(x, np.rint(means))


def test_broken_stl10_files_are_refused(tmp_path, monkeypatch):
    folder, _ = write_stl(tmp_path, monkeypatch)
    (folder / "test_X.bin").write_bytes(b"short")
    with pytest.raises(DataError, match=r"not a valid STL-10 file .*corrupted.*remove that folder and use `coterie"):
        load("stl10", str(tmp_path))


def test_nothing_but_the_published_cifar_is_unpickled(tmp_path, monkeypatch):
    """A pickle runs what it says: torchvision's checksums come first."""
    folder, _ = write_cifar(tmp_path, monkeypatch, "CIFAR10")

    class Evil:
        def __reduce__(self):
            return (folder.joinpath("ran").touch, ())

    (folder / "data_batch_3").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(DataError, match=r"not a valid CIFAR file .*corrupted.*remove that folder and use `coterie"):
        load("cifar10", str(tmp_path))
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("damage", ["text", "fewer", "pickle"])
def test_broken_archives_are_refused(tmp_path, damage):
    path = tmp_path / "cifar10" / "cifar10_subset.npz"
    path.parent.mkdir()
    with pytest.raises(DataError, match=r"has no cifar10/cifar10_subset.npz"):
        load("cifar10-subset", str(tmp_path))
    if damage == "text":
        path.write_bytes(b"not an archive")
    elif damage == "fewer":
        np.savez(path, x_train=np.zeros((2, 3, 32, 32), np.uint8))
    else:
        np.savez(path, x_train=np.array([object()]), y_train=np.zeros(1, np.uint8))
    with pytest.raises(DataError, match="is not a numpy archive of x_train, y_train, x_test and y_test"):
        load("cifar10-subset", str(tmp_path))
