"""The Flower ServerApp: a run with the configuration from Flower."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp

from coterie import logs
from coterie.client.state import KeptStates
from coterie.fields import finite
from coterie.fields.settings import AUTO, ConfigError
from coterie.flower import run_log
from coterie.logs import printable, report_progress
from coterie.privacy import Secure, Streams
from coterie.privacy.audit_log import AuditLog
from coterie.privacy.ledger_lines import LedgerError
from coterie.results import RoundRecord
from coterie.rounds.client_registry import record_nothing
from coterie.server import exporter, recorders
from coterie.server.config import RunConfig
from coterie.server.data_origin import DataOrigin, require_data
from coterie.server.folder import RunFolder
from coterie.server.planning import participation_warnings
from coterie.server.resolution import SETTINGS, combine
from coterie.server.run import check_personal, initial_models, rounds_of, run
from coterie.server.run_requests import roster_of, submission_of
from coterie.server.start_models import StartModels
from coterie.site.roster import SEEN_FILE

#: Name of the audit log, in the folder of the run folders.
AUDIT_LOG = "audit.jsonl"


def open_folder(
    values: Mapping[str, Any],
    default: Path,
    check: Callable[[RunConfig], DataOrigin | None] = lambda config: None,
    *,
    deployed: bool = False,
) -> RunFolder:
    """Create the run folder of a configuration, or open the one to resume.

    Args:
        values: settings, among them ``out`` and ``resume``.
        default: parent of the new folder when ``out`` is not set.
        check: raises if the run cannot work, before a new folder is created or an old one changed; returns the data
            of a simulation.
        deployed: whether the clients are real; see :class:`RunConfig`.
    """
    given = {name: value for name, value in combine(values).items() if value != AUTO}
    if SETTINGS["resume"].parse(given.get("resume", False)):
        if not given.get("out"):
            raise ConfigError("resume requires out, the folder of the run to continue")
        changes = {name: value for name, value in given.items() if name not in ("out", "resume")}
        return RunFolder.resume(Path(given["out"]), changes, check)
    config = RunConfig(values, deployed=deployed)
    # Fail before a folder is created: on the network, on the noise multiplier, on a missing library.
    origin = check(config)
    _, layout = initial_models(config, Streams(0))
    check_personal(config, layout)
    start = StartModels.of(config)
    if start is not None:
        start.check_layout(layout, max(config.models, 1))
    if deployed:
        if roster_of(default / SEEN_FILE) is None and isinstance(config.plan, Secure):
            raise ConfigError(
                "mechanism = 'secure' requires a roster, by which clients know each other's keys: set COTERIE_ROSTER "
                "in the environment of the ServerApp"
            )
        submission_of(config)
    exporter.address()
    recorders.configured()
    _ = config.plan
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name = f"{config.run.strategy}-{config.data.dataset}-{stamp}".replace(":", ".")
    out = Path(config.run.out) if config.run.out else default / name
    while not config.run.out and out.exists():  # two runs in one second
        out = out.with_name(out.name + "-again")
    return RunFolder.create(out, config, origin, start)


app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run, and log where the results are."""
    from flwr.superlink.grid import InMemoryGrid  # of simulations; deployments have another grid

    logs.install(run=str(context.run_id))
    runs = Path(os.environ.get("COTERIE_RUNS") or Path.home() / "coterie-runs")
    deployed = not isinstance(grid, InMemoryGrid)
    audit = partial(AuditLog(runs / AUDIT_LOG).append, run=str(context.run_id)) if deployed else record_nothing
    with _audited(audit, context.run_config):
        _run(grid, context, runs, deployed, audit)


@contextmanager
def _audited(audit: Callable[..., None], settings: Mapping[str, Any]) -> Iterator[None]:
    """Record that a run was submitted, with the SHA-256 of its settings, and how it ended.

    Raises:
        ConfigError: the audit log cannot be written.
    """
    text = json.dumps({name: settings[name] for name in sorted(settings)}, default=str)
    try:
        audit("submission", settings=hashlib.sha256(text.encode()).hexdigest())
    except LedgerError as error:
        raise ConfigError(f"{error}; set COTERIE_RUNS of the ServerApp to a folder that it can write") from None
    try:
        yield
    except BaseException as error:
        audit("end", error=printable(f"{type(error).__name__}: {error}"))
        raise
    audit("end")


def _run(grid: Grid, context: Context, runs: Path, deployed: bool, audit: Callable[..., None]) -> None:
    from coterie.flower import check
    from coterie.flower.grid import with_check, with_retries

    check("flower.grid", "flower.backoff")
    folder = open_folder(context.run_config, runs, deployed=deployed)
    KeptStates(folder.path / "clients").as_client_files()  # of a killed run of the local engine
    folder.on_audit, folder.seen_rosters = audit, runs / SEEN_FILE if deployed else None
    submission = submission_of(folder.config, grid.run.fab_hash if deployed else None)
    started = {"strategy": folder.config.run.strategy, "epsilon": finite(folder.plan.epsilon), **vars(submission)}
    audit("start", out=str(folder.path), **started)
    rounds = rounds_of(folder.config)

    def log_metrics(record: RoundRecord) -> None:
        text, extra = run_log.round_line(record, rounds)
        log(INFO, text, extra=extra)
        log(INFO, run_log.progress_message(record, rounds, submission.submitter))

    folder.on_metrics = log_metrics
    folder.on_progress = report_progress
    visible = participation_warnings(folder.plan) if deployed else []
    for warning in [*folder.config.warnings(), *visible]:
        log(WARNING, warning)
    try:
        # The operator of a deployment sees when each client fails.
        with nullcontext() if deployed else logs.collapsed_warnings():
            with_retries(grid)
            run(folder, grid if deployed else with_check(grid, partial(require_data, folder.config)))
    finally:
        folder.close()
    log(INFO, "results are in %s", folder.path)
