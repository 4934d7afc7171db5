"""``coterie sweep``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.bench.commands.bench import run_table
from coterie.cli.console import JsonFlag
from coterie.cli.run import complete_assignment, read_toml


def sweep(
    config: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="TOML file of settings; a list is several values.")
    ] = None,
    assignments: Annotated[
        list[str],
        typer.Option(
            "--set",
            metavar="NAME=VALUE,...",
            autocompletion=complete_assignment,
            help="Set a setting to one value or several, separated by commas; repeatable.",
        ),
    ] = [],  # noqa: B006
    seeds: Annotated[str, typer.Option(help="Seeds of every combination, such as 0-4 or 0,2,5.")] = "0-2",
    jobs: Annotated[int | None, typer.Option(min=1, help="Parallel runs; default: 1 per core, 1 on a GPU.")] = None,
    device: Annotated[str, typer.Option(help="Device: auto, cpu or cuda.")] = "auto",
    data_dir: Annotated[Path | None, typer.Option(help="Folder of the data sets; default: COTERIE_DATA.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for runs and results.")] = Path("sweep"),
    as_json: JsonFlag = False,
) -> None:
    """Run all combinations of settings on several seeds, and compare them. Finished runs are reused."""
    from coterie.bench import sweep as sweeps
    from coterie.fields.settings import ConfigError, flat

    values: dict[str, Any] = flat(read_toml(config)) if config else {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals:
            raise ConfigError(f"--set {assignment}: must be name=value or name=value,value,...")
        values[name.strip()] = [value.strip() for value in text.split(",")]
    table = sweeps.sweep(values, sweeps.seeds_of(seeds))
    words = [
        *([str(config)] if config else []),
        *(word for assignment in assignments for word in ("--set", assignment)),
    ]
    run_table(
        table,
        out,
        out,
        shlex.join(["coterie", "sweep", *words, "--seeds", seeds]),
        jobs=jobs,
        device=device,
        data_dir=data_dir,
        as_json=as_json,
        finished=lambda done: sweeps.write_runs(table, done, out / "runs.csv"),
    )
