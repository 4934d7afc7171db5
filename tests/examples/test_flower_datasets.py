"""examples/flower-datasets: partitions become clients. A stand-in has the interface of Flower Datasets 0.6.

`flwr_datasets.partitioner.Partitioner` has `num_partitions` and `load_partition`, which returns a `datasets.Dataset`;
`dataset[:]` of that is a dictionary of columns.
"""

import importlib.util
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from coterie.datasets import DataError, Partition, federate

FOLDER = Path(__file__).parents[2] / "examples" / "flower-datasets"


class Dataset:
    """Rows in columns, as `datasets.Dataset`."""

    def __init__(self, columns):
        self.columns = columns

    @classmethod
    def from_dict(cls, columns):
        return cls(columns)

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, rows):
        return {name: values[rows] for name, values in self.columns.items()}


class PathologicalPartitioner:
    """Row i of those sorted by label belongs to partition i modulo the number of partitions."""

    def __init__(self, num_partitions, partition_by, num_classes_per_partition, seed):
        self.num_partitions, self._by, self.dataset = num_partitions, partition_by, None

    def load_partition(self, partition_id):
        order = np.argsort(self.dataset.columns[self._by], kind="stable")
        rows = np.array_split(order, self.num_partitions)[partition_id]
        return Dataset({name: [values[row] for row in rows] for name, values in self.dataset.columns.items()})


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    if importlib.util.find_spec("flwr_datasets") is None:
        for name, members in {
            "datasets": {"Dataset": Dataset},
            "flwr_datasets": {},
            "flwr_datasets.partitioner": {"PathologicalPartitioner": PathologicalPartitioner},
        }.items():
            module = types.ModuleType(name)
            vars(module).update(members)
            monkeypatch.setitem(sys.modules, name, module)
    import flower_clients

    yield flower_clients
    for name in ("flower_clients", "digits"):
        sys.modules.pop(name, None)


def columns(n, shape=(4, 4)):
    pixels = np.arange(n * int(np.prod(shape))).reshape(n, *shape) % 256
    return {"image": pixels.tolist(), "label": [i % 3 for i in range(n)]}


class Partitions:
    def __init__(self, sizes, **more):
        self.parts = [Dataset(columns(size, **more)) for size in sizes]
        self.num_partitions = len(sizes)

    def load_partition(self, partition_id):
        return self.parts[partition_id]


def test_every_partition_is_a_client(example):
    source = example.clients("mine", Partitions([10, 5, 2]), image="image", label="label", num_classes=3)
    assert source.owners == 3
    assert np.bincount(source.train_owner).tolist() == [8, 4, 1]
    assert np.bincount(source.test_owner).tolist() == [2, 1, 1]
    assert (source.train_x.dtype, source.train_x.shape[1:]) == (np.uint8, (1, 4, 4))
    np.testing.assert_array_equal(source.train_x[source.train_owner == 1][:, 0], columns(5)["image"][:4])
    np.testing.assert_array_equal(source.test_y[source.test_owner == 0], columns(10)["label"][8:])


def test_colour_images_have_their_channels_first(example):
    source = example.clients("c", Partitions([4, 4], shape=(5, 6, 3)), image="image", label="label", num_classes=3)
    assert source.kind == "images"
    assert source.train_x.shape[1:] == (3, 5, 6)
    np.testing.assert_array_equal(source.train_x[0].transpose(1, 2, 0), columns(4, (5, 6, 3))["image"][0])


@pytest.mark.parametrize(
    ("sizes", "image", "message"),
    [
        ([4, 1], "image", "partition 1 has 1 rows and columns image, label; it needs two rows"),
        ([4, 4], "img", "partition 0 has 4 rows and columns image, label; it needs two rows and the columns img and"),
    ],
)
def test_what_cannot_be_a_client_is_named(example, sizes, image, message):
    with pytest.raises(DataError, match=message):
        example.clients("mine", Partitions(sizes), image=image, label="label", num_classes=3)


@pytest.mark.parametrize("rounds", ["2", pytest.param("20", marks=pytest.mark.slow)])
def test_the_command_of_its_page_runs(example, coterie, monkeypatch, tmp_path, rounds):
    monkeypatch.chdir(tmp_path)
    words = "run --dataset digits:pathological --clients 20 --clusters 2 --rounds 20 --set samples-per-client=0"
    assert f"coterie {words} " in (FOLDER / "README.md").read_text()
    more = ["--set", "groups=1", "--set", "shift=none", "--rounds", rounds, "--out", "run"]
    status, _, err = coterie(*words.split(), *more)
    assert status == 0, err
    assert (tmp_path / "run" / "privacy.json").exists()
    shard = federate("digits:pathological", Partition(clients=20, groups="1", shift="none")).shard(3)
    assert len(np.unique(shard.y)) <= 3
    assert shard.test.x.shape[1:] == (1, 8, 8)
