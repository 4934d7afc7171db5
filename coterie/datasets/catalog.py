"""Data sets by name: embedded, from files in a folder, or from a user-defined function."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

from coterie.datasets.images import IMAGES
from coterie.datasets.sources import DataError, DatasetInfo, Source
from coterie.datasets.text import TEXTS
from coterie.datasets.vectors import VECTORS
from coterie.fields.plugins import PluginError, load_function, provided, unknown

#: All built-in data sets.
DATASETS: dict[str, DatasetInfo] = {info.name: info for info in (*IMAGES, *TEXTS, *VECTORS)}


def load(name: str, data_dir: str | Path | None = None) -> Source:
    """Load the data set `name`; it is read once per process and never downloaded.

    Args:
        name: a key of `DATASETS`; or a user-defined `module:function`, or an entry point of the group
            `coterie.datasets`, that returns a `Source`.
        data_dir: folder of the data sets, in torchvision's layout (`MNIST/raw/...`) for torchvision data sets;
            defaults to the environment variable COTERIE_DATA.

    Raises:
        DataError: the name is unknown, files are missing or corrupt, torchvision is unusable, or a user-defined
            function does not return a `Source`.

    Examples:
        >>> source = load("digits")
        >>> source.train_x.shape, source.num_classes
        ((1400, 1, 8, 8), 10)
    """
    if name in DATASETS and DATASETS[name].files:
        return _load(name, str(data_dir or os.environ.get("COTERIE_DATA") or "") or None)
    return _load(name, None)


def download(name: str, data_dir: str | Path) -> Path:
    """Download a data set to `data_dir`, which is created if missing, and return the folder of its files.

    Existing files are kept.

    Raises:
        DataError: the name is unknown, the data set has no download, torchvision is unusable, or the download failed.

    Examples:
        >>> download("digits", "data")
        Traceback (most recent call last):
        coterie.datasets.sources.DataError: dataset 'digits' is embedded: nothing to download
    """
    if name not in DATASETS:
        raise DataError(unknown("dataset", name, DATASETS))
    info = DATASETS[name]
    if info.fetch is None:
        raise DataError(f"dataset '{name}' is {info.obtain}")
    root = Path(data_dir).expanduser()
    try:
        return info.fetch(name, root)
    except (OSError, RuntimeError) as error:
        raise DataError(
            f"could not download '{name}' to {root}: {error}; check the network and the folder, and try again"
        ) from error


@lru_cache(maxsize=2)
def _load(name: str, data_dir: str | None) -> Source:
    if name not in DATASETS:
        return _load_own(name)
    info = DATASETS[name]
    ways = f"--data-dir DIR, COTERIE_DATA=DIR, or `{info.obtain}`"
    if data_dir is None and info.files:
        raise DataError(f"dataset '{info.name}' requires a folder with {info.files[0]}: {ways}")
    root = Path(data_dir or "").expanduser()
    for file in info.files:
        if not (root / file).is_file():
            missing = f"has no {file}" if root.is_dir() else "does not exist"
            raise DataError(f"dataset '{info.name}': the folder {root} {missing} (expected: {root / file}); use {ways}")
    return info.read(info, root)


def _load_own(name: str) -> Source:
    if not provided("dataset", name):
        raise DataError(f"{unknown('dataset', name, DATASETS)}, or a custom module:function")
    try:
        make = load_function("dataset", name, [])
    except PluginError as error:
        raise DataError(str(error)) from error
    function = name.rpartition(":")[2]
    try:
        source = make()
    except Exception as error:
        raise DataError(f"dataset '{name}': {function}() failed: {type(error).__name__}: {error}") from error
    if not isinstance(source, Source):
        raise DataError(
            f"dataset '{name}': {function}() returned a {type(source).__name__}; it must return a "
            "coterie.datasets.Source"
        )
    return source
