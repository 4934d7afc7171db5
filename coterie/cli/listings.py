"""Listings of strategies, data sets and models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.console import JsonFlag, console_for, listing
from coterie.fields.plugins import installed, origin


def strategies(as_json: JsonFlag = False) -> None:
    """List the methods with their papers and supported privacy units."""
    from coterie.strategies.registry import STRATEGIES

    rows = {
        name: {
            "what": method.title,
            "paper": method.paper,
            "privacy-unit": ", ".join(method.units),
            "aggregators": "all" if method.robust else "mean",
            "rebalancing": "yes" if method.clustered and "client" in method.units else "-",
        }
        for name, method in sorted(STRATEGIES.items())
    }
    rows |= {
        name: {"what": origin(entry), "paper": "-", "privacy-unit": "-", "aggregators": "-", "rebalancing": "-"}
        for name, entry in installed("strategy").items()
        if name not in rows
    }
    listing("strategies (or module:Class)", rows, as_json)


def datasets(
    download: Annotated[str | None, typer.Option(metavar="NAME", help="Download a data set to --data-dir.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of the data sets; default: COTERIE_DATA.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """List the data sets and the shifts that create hidden groups."""
    from coterie import datasets as data

    if download is not None:
        folder = data_dir or os.environ.get("COTERIE_DATA")
        if not folder:
            raise data.DataError("--download requires --data-dir DIR or COTERIE_DATA")
        console = console_for(as_json)
        console.print(f"{download} is in {data.download(download, str(folder))}")
        return
    rows = {
        name: {
            "what": info.title,
            "shape": "x".join(map(str, info.shape)),
            "classes": info.num_classes,
            "train": info.train_size,
            "test": info.test_size,
            "how to get it": info.obtain,
        }
        for name, info in sorted(data.DATASETS.items())
    }
    rows |= {
        name: {**dict.fromkeys(rows["digits"]), "what": origin(entry), "how to get it": "installed"}
        for name, entry in installed("dataset").items()
        if name not in rows
    }
    rows[data.OWN_DATA] = {
        "what": "each client's own data: an archive, a table or images",
        "shape": "input-shape",
        "classes": "num-classes",
        "train": None,
        "test": None,
        "how to get it": "DIR/client-0.npz (or .csv, .parquet, .xlsx, a folder), client-1.npz, ...: docs/deployment.md",
    }
    listing(f"data sets (shifts: {', '.join(sorted(data.SHIFTS))})", rows, as_json)


def models(as_json: JsonFlag = False) -> None:
    """List the networks, the GANs, and the fixed features that can precede a network."""
    from coterie import models as networks

    every: dict[str, networks.ModelInfo | networks.GANInfo] = {**networks.MODELS, **networks.GANS}
    rows = {name: {"what": info.title, "source": info.source} for name, info in sorted(every.items())}
    rows |= {
        name: {"what": origin(entry), "source": "-"} for name, entry in installed("model").items() if name not in rows
    }
    extra = [f"{name} = {origin(entry)}" for name, entry in installed("features").items()]
    listing(f"models (features: {', '.join([*sorted(networks.FEATURES), *extra])})", rows, as_json)
