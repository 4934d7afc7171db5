"""The data of one client: its files, and its shard as a run that has these facts reads them."""

import pytest
from PIL import Image

from coterie.datasets import Declared, own_shard
from coterie.tasks import task_of


def read_shard(path, shape, targets=2, transform=None, *, client=0, strict=True, task=None, schema=None, **declared):
    """The shard of a file or folder; the targets are classes, or real for 0, unless a task says more."""
    required = Declared("", shape, task or task_of(targets), schema, **{"columns": None, **declared})
    return own_shard(str(path), client, required, transform, strict=strict)


def write_pictures(path, x, y, names=None):
    """Images in one folder per class, whose names are the labels or those given; the path."""
    for i, (pixels, label) in enumerate(zip(x, y, strict=True)):
        room = path / (str(label) if names is None else names[label])
        room.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)).save(room / f"{i}.png")
    return path


def write_parquet(path, columns, **settings):
    """Columns by name, in a folder that may be new; the path. Without pyarrow, the test is skipped."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table(columns), path, **settings)
    return path
