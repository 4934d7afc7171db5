"""``coterie data scales``: propose mean and scale of columns by a private release, which has a ledger of its own."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli.console import JsonFlag, print_json

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from coterie.datasets import TableSchema
    from coterie.datasets.schema import Column
    from coterie.privacy import Event

# A column whose median is less certain than this share of the records gets no proposal.
_MOST_ERROR = 0.25
_RELEASED = "quantiles"
# Quartiles of a normal distribution lie this many standard deviations apart.
_QUARTILES = 1.349


def scales(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Table of private records.")],
    schema: Annotated[Path, typer.Option(metavar="SCHEMA", help="TOML file of the schema; its ranges are public.")],
    ledger: Annotated[
        Path, typer.Option(metavar="LEDGER", help="Ledger of such releases alone, not of runs; made if missing.")
    ],
    epsilon: Annotated[float, typer.Option(help="Cost of this release for every record, or unit.")],
    delta: Annotated[float, typer.Option(help="Delta of the ledger's budget.")] = 1e-6,
    budget: Annotated[
        float | None, typer.Option(help="Epsilon of a ledger that is made now, for all releases; default: this one.")
    ] = None,
    column: Annotated[
        list[str] | None, typer.Option(help="A numeric column with a range; repeatable; default: all of them.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Propose the mean and scale of numeric columns from a private release of their quartiles.

    The release is charged to the ledger first. The noise grows with the number of columns. The output may be sent to
    the operator. Reduce the budget of runs on the same records by the epsilon and delta of the ledger.
    """
    import numpy as np

    from coterie.datasets import DataError, TableSchema, read_table
    from coterie.privacy import Event, Streams, calibrate
    from coterie.privacy.quantiles import noisy_quantiles, unit_histograms

    loaded = TableSchema.load(schema)
    chosen = _chosen(loaded, column or [])
    budget = epsilon if budget is None else budget
    if not (0 < epsilon < math.inf and 0 < budget < math.inf and 0 < delta < 1):
        raise DataError(
            f"--epsilon {epsilon:g} --delta {delta:g} --budget {budget:g}: epsilon and budget must be positive, delta "
            "in (0, 1)"
        )
    table = read_table(file, loaded)
    noise = calibrate(epsilon, delta, 1.0, 1)
    _charge(ledger, budget, delta, Event(1.0, noise), [each.name for each in chosen])
    features = [loaded.feature_names.index(each.name) for each in chosen]
    shares = [_shares(table.x[:, feature], each) for each, feature in zip(chosen, features, strict=True)]
    histograms = unit_histograms(np.stack(shares, axis=1), table.units)
    found = noisy_quantiles(histograms, noise, Streams().stream("quantiles"))
    proposals = [
        _proposal(each, values, error)
        for each, values, error in zip(chosen, found.values.tolist(), found.error.tolist(), strict=True)
    ]
    if as_json:
        print_json({"epsilon": epsilon, "delta": delta, "noise-multiplier": noise, "columns": proposals})
        return
    print(f"# Quartiles of noisy histograms: epsilon = {epsilon:g}, delta = {delta:g}, charged to {ledger.name}.")
    for proposal in proposals:
        print(f"\n[[columns]]\nname = {json.dumps(proposal['name'], ensure_ascii=False)}")
        if proposal["scale"] is None:
            print("# too noisy for a proposal: name fewer columns, or spend a larger epsilon")
        else:
            print(f"mean = {proposal['mean']:g}\nscale = {proposal['scale']:g}")


def _charge(path: Path, budget: float, delta: float, event: Event, columns: list[str]) -> None:
    """Charge a release to its ledger, which has no charges of runs: those are pinned together."""
    from coterie.datasets import DataError
    from coterie.privacy import ClientLedger, read_ledger

    if path.exists():
        header, charges = read_ledger(path)
        if any(charge.get("released") != _RELEASED for charge in charges):
            raise DataError(f"{path} has charges of runs; name another file, which is for quantiles alone")
        if header["delta"] != delta:
            raise DataError(f"{path} is a budget with delta = {header['delta']:g}: use --delta {header['delta']:g}")
        budget = header["epsilon"]
    ledger = ClientLedger(delta, budget, path)
    try:
        ledger.spend(0, {event: 1}, released=_RELEASED, columns=columns)
    finally:
        ledger.close()


def _shares(feature: npt.NDArray[np.float32], column: Column) -> npt.NDArray[np.float64]:
    """Return (n,) values as shares of the column's range."""
    low, high = _span(column)
    shares: npt.NDArray[np.float64] = (feature.astype(float) * column.scale + column.mean - low) / (high - low)
    return shares


def _span(column: Column) -> tuple[float, float]:
    assert column.span is not None
    return column.span


def _chosen(schema: TableSchema, names: list[str]) -> list[Column]:
    """Return the columns to release."""
    from coterie.datasets import DataError
    from coterie.datasets.tables import some_names

    usable = {each.name: each for each in schema.columns if each.kind == "number" and each.span}
    if unknown := [name for name in names if name not in usable]:
        there = some_names(list(usable)) or "none"
        raise DataError(f"--column {unknown[0]}: no numeric column with a range in the schema; there are {there}")
    if not usable:
        raise DataError("the schema has no numeric column with a range, without which a release has no bound")
    return [usable[name] for name in names] or list(usable.values())


def _proposal(column: Column, quartiles: list[float], error: float) -> dict[str, Any]:
    """Return mean and scale of one column; None where the noise is too large."""
    low, high = _span(column)
    first, median, third = (low + (high - low) * share for share in quartiles)
    spread = (third - first) / _QUARTILES
    known = error <= _MOST_ERROR and spread > 0
    return {
        "name": column.name,
        "mean": float(f"{median:.3g}") if known else None,
        "scale": float(f"{spread:.3g}") if known else None,
        "error": error if math.isfinite(error) else None,
    }
