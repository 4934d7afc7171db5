"""The Flower ServerApp: a run with the configuration from Flower."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp
from flwr.superlink.grid import InMemoryGrid  # that of Flower's simulations; deployments have another

from coterie import logs
from coterie.privacy import Streams
from coterie.report import write_report
from coterie.server import exporter
from coterie.server.config import SETTINGS, RunConfig, combined
from coterie.server.folder import RunFolder
from coterie.server.grid import persistent
from coterie.server.run import initial_models, rounds_of, run
from coterie.settings import AUTO, ConfigError


def open_folder(
    values: Mapping[str, Any],
    default: Path,
    check: Callable[[RunConfig], object] = lambda config: None,
    *,
    deployed: bool = False,
) -> RunFolder:
    """Create the run folder of a configuration, or open the one to resume.

    Args:
        values: settings, among them ``out`` and ``resume``.
        default: parent of the new folder when ``out`` is not set.
        check: raises if the run cannot work, before a new folder is created.
        deployed: whether the clients are real; see :class:`RunConfig`.
    """
    given = {name: value for name, value in combined(values).items() if value != AUTO}
    if SETTINGS["resume"].parse(given.get("resume", False)):
        if not given.get("out"):
            raise ConfigError("resume needs out, the folder of the run to continue")
        return RunFolder.resume(Path(given["out"]), {k: v for k, v in given.items() if k not in ("out", "resume")})
    config = RunConfig(values, deployed=deployed)
    initial_models(config, Streams(0))  # a network that cannot be built, and noise that cannot be had,
    _ = config.plan  # are found before a folder is made; so is
    exporter.check(config)  # a library that is missing
    check(config)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name = f"{config.run.strategy}-{config.data.dataset.replace(':', '.')}-{stamp}"
    out = Path(config.run.out) if config.run.out else default / name
    while not config.run.out and out.exists():  # two runs in one second
        out = out.with_name(out.name + "-again")
    return RunFolder.create(out, config)


@contextmanager
def paged(folder: RunFolder) -> Iterator[Path]:
    """Write the page of a run when the context ends, also if the budget ended the run early."""
    page = folder.path / "report.html"
    try:
        yield page
    finally:
        if (folder.path / "result.json").exists():
            write_report([folder.path], page)


app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run, and report where the results are."""
    logs.install(run=str(context.run_id))
    runs = Path(os.environ.get("COTERIE_RUNS") or Path.home() / "coterie-runs")
    folder = open_folder(context.run_config, runs, deployed=not isinstance(grid, InMemoryGrid))
    rounds = rounds_of(folder.config)

    def say(line: Mapping[str, Any]) -> None:
        text, known = logs.round_line(line, rounds)
        log(INFO, text, extra=known)
        log(INFO, logs.progress_message(line, rounds))

    folder.observer = say
    folder.watcher = lambda what: log(INFO, what)
    for warning in folder.config.warnings():
        log(WARNING, warning)
    try:
        with paged(folder):
            run(folder, persistent(grid))
    finally:
        folder.close()
    log(INFO, "results are in %s", folder.path)
