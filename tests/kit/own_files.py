"""The data of one client, read as a run that has these facts reads them."""

from coterie.datasets import Declared, own_shard
from coterie.tasks import task_of


def read_shard(path, shape, targets=2, transform=None, *, client=0, strict=True, task=None, schema=None, **declared):
    """The shard of a file or folder; the targets are classes, or real for 0, unless a task says more."""
    required = Declared("", shape, task or task_of(targets), schema, **{"columns": None, **declared})
    return own_shard(str(path), client, required, transform, strict=strict)
