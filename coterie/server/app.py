"""The Flower ServerApp: a run with the configuration that Flower hands over."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from logging import INFO
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp

from coterie.report import write_report
from coterie.server.config import ConfigError, RunConfig
from coterie.server.folder import RunFolder
from coterie.server.run import run


def open_folder(
    values: Mapping[str, Any], default: Path, check: Callable[[RunConfig], object] = lambda config: None
) -> RunFolder:
    """The run folder that a configuration asks for: a new one, or the one to resume.

    Args:
        values: configuration keys; ``out`` and ``resume`` say where and whether.
        default: parent of the new folder when ``out`` is not set.
        check: raises if the run cannot work, before a new folder is made.
    """
    config = RunConfig(values)
    if config["resume"] and not config["out"]:
        raise ConfigError("resume needs out, the folder of the run to continue")
    if config["resume"]:
        settings = {k: v for k, v in values.items() if k not in ("out", "resume")}
        return RunFolder.resume(Path(config["out"]), settings)
    check(config)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name = f"{config['strategy']}-{config['dataset'].replace(':', '.')}-{stamp}"
    return RunFolder.create(Path(config["out"] or default / name), config)


app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run, and report where the results are."""
    folder = open_folder(context.run_config, Path.home() / "coterie-runs")
    folder.observer = _log_line
    try:
        run(folder, grid)
        write_report([folder.path], folder.path / "report.html")
    finally:
        folder.close()
    log(INFO, "results are in %s", folder.path)


def _log_line(line: Mapping[str, Any]) -> None:
    accuracy = f", accuracy {100 * line['accuracy']:.1f} %" if "accuracy" in line else ""
    log(INFO, "round %s: epsilon %.3f%s (%.2f s)", line["round"], line["epsilon"], accuracy, line["seconds"])
