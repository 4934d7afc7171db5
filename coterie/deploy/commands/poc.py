"""``coterie poc``."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli.console import console_for, interrupting
from coterie.cli.run import settings_of

if TYPE_CHECKING:
    from coterie.deploy.trial import Trial

_CLIENTS = 3
#: Settings of a trial without own data: the demo of docker/demo.
_DIGITS: Mapping[str, Any] = {
    "strategy": "lcfl",
    "clusters": 2,
    "rounds": 3,
    "input-shape": "1x8x8",
    "num-classes": 10,
    "local-epochs": 2,
    "batch-size": 48,
    "lr": 0.5,
    "privacy-unit": "record",
    "epsilon": 8.0,
    "clip-norm": 1.0,
    "evaluate": "diagnostic",
}
_IMAGES, _HELD_OUT = 1797, 0.8  # images of scikit-learn's digits, and the part of them that is trained on
# Settings that declare what a client's data are, and the options of `coterie client`.
_DECLARED = {
    "data.input-shape": "--input-shape",
    "data.num-classes": "--num-classes",
    "data.table-schema": "--schema",
    "data.columns": "--columns",
    "data.task": "--task",
}
_START, _POLL, _AGAIN = 180.0, 0.3, 10  # seconds
_REFUSED = "Failed to activate SuperNode"  # by a SuperLink that takes the node for connected
_MARKER = "poc.json"


@dataclass(frozen=True)
class _Layout:
    """What a folder holds of a trial: its clients' number and data, and the settings of its runs."""

    folder: Path
    clients: int
    data_dir: str | None

    @property
    def settings(self) -> Path:
        return self.folder / "run.toml"

    @property
    def app(self) -> Path:
        return self.folder / "app"

    def data(self, client: int) -> Path:
        """Data of a client: a folder or a file."""
        from coterie.datasets.client_data import find
        from coterie.site.errors import DeployError

        home = Path(self.data_dir) if self.data_dir else self.folder / "data"
        path = find(home, f"client-{client}")
        if path is None:
            raise DeployError(
                f"--data-dir {home}: has no data of client {client}: client-{client}.csv, .npz or a folder"
            )
        return path

    def unfinished(self) -> Path | None:
        """The latest run folder, if its run was interrupted."""
        runs = sorted((self.folder / "runs").glob("*/config.toml"), key=lambda path: path.stat().st_mtime)
        latest = runs[-1].parent if runs else None
        return None if latest is None or (latest / "result.json").exists() else latest


def poc(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="New folder, or that of an earlier coterie poc.")],
    clients: Annotated[int | None, typer.Option(min=1, max=50, help="Number of clients; default: 3.")] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder with client-0.csv, client-1/ and so on; default: digits for everyone.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with the settings of the run.")] = None,
    assignments: Annotated[
        list[str], typer.Option("--set", metavar="NAME=VALUE", help="Set any setting of the run; repeatable.")
    ] = [],  # noqa: B006
    epsilon: Annotated[
        float | None, typer.Option(help="Privacy budget of each client over all runs of this trial; requires --delta.")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="Delta of the privacy budget.")] = None,
    once: Annotated[bool, typer.Option("--once", help="End after the run instead of waiting for Ctrl-C.")] = False,
) -> None:
    """Try a deployment on this machine: certificates, SuperLink, clients and a run, until Ctrl-C."""
    from coterie.deploy.trial import Trial

    began = time.monotonic()
    os.umask(0o077)  # what Flower's processes write is private too
    console = console_for(False)

    def say(text: str) -> None:
        console.print(f"{time.monotonic() - began:5.1f} s  {text}", markup=False, soft_wrap=True)

    if (epsilon is None) != (delta is None):
        from coterie.site.errors import DeployError

        raise DeployError("--epsilon and --delta form one budget: set both or neither")
    budget = [] if epsilon is None else ["--epsilon", str(epsilon), "--delta", str(delta)]
    layout = _prepared(folder.expanduser().absolute(), clients, data_dir)
    with interrupting(signal.SIGTERM, signal.SIGHUP):
        try:
            with Trial(layout.folder) as trial:
                _serve(trial, layout, budget, _settings(layout, config, assignments), once, say)
        except KeyboardInterrupt:
            say(f"ended; the same command goes on with {layout.folder}")


def _prepared(folder: Path, clients: int | None, data_dir: Path | None) -> _Layout:
    """Make the folder, or take over that of an earlier trial.

    Raises:
        DeployError: it holds something else, or a trial with other clients.
    """
    from coterie.files import private_folder, read_object, write_atomic
    from coterie.site.errors import DeployError

    marker = folder / _MARKER
    given = None if data_dir is None else str(data_dir.expanduser().absolute())
    if marker.exists():
        stored = read_object(marker)
        layout = _Layout(folder, int(stored["clients"]), stored["data-dir"])
        if clients not in (None, layout.clients) or given not in (None, layout.data_dir):
            raise DeployError(
                f"{folder} is a trial of {layout.clients} clients with {layout.data_dir or 'digits'}: leave out "
                "--clients and --data-dir to continue it, or choose another folder"
            )
        return layout
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DeployError(f"{folder} is not empty, and not of coterie poc: choose a folder that does not exist yet")
    layout = _Layout(folder, clients or (_counted(Path(given)) if given else _CLIENTS), given)
    if given:
        for client in range(layout.clients):
            layout.data(client)
    private_folder(folder)
    write_atomic(marker, json.dumps({"clients": layout.clients, "data-dir": given}).encode())
    return layout


def _counted(folder: Path) -> int:
    """Number of clients with data in a folder: client-0, client-1 and so on; at least 1."""
    from coterie.datasets.client_data import find

    number = 0
    while find(folder, f"client-{number}") is not None:
        number += 1
    return max(number, 1)


def _settings(layout: _Layout, config: Path | None, assignments: list[str]) -> Path | None:
    """Write the settings of the run, and return the folder of the run that is continued, if one was interrupted.

    Raises:
        ConfigError: a setting is wrong, or contradicts the trial.
    """
    import tomli_w

    from coterie.fields.settings import AUTO, ConfigError, flat, nested
    from coterie.files import write_atomic
    from coterie.server.config import RunConfig
    from coterie.server.resolution import SETTINGS, combine

    if layout.settings.exists() and config is None and not assignments:
        return layout.unfinished()
    given = settings_of(config, assignments, {})
    defaults: Mapping[str, Any] = {}
    if config is None:
        if layout.settings.exists():
            defaults = settings_of(layout.settings, [], {})
        elif layout.data_dir is None:
            defaults = {**_DIGITS, "samples-per-client": int(_HELD_OUT * (_IMAGES // layout.clients))}
    own = {"dataset": "own", "clients": layout.clients}
    for name, value in combine(own).items():
        if str(given.get(name, value)) != str(value):
            raise ConfigError(f"{name} = {given[name]!r}: must be {value!r} in a trial of {layout.clients} clients")
    values = combine({"min-clients": layout.clients}, defaults, given, own)
    RunConfig(values, deployed=True)
    for name, value in values.items():
        if value not in (AUTO, SETTINGS[name].none):
            values[name] = SETTINGS[name].parse(value)
            if SETTINGS[name].path and values[name] and "\n" not in values[name]:  # processes start in another folder
                values[name] = os.path.abspath(values[name])
    write_atomic(layout.settings, tomli_w.dumps(nested(flat(values))).encode())
    return None


def _serve(trial: Trial, layout: _Layout, budget: list[str], continued: Path | None, once: bool, say: Any) -> None:
    from coterie.deploy.commands.server import CONNECTION, READY
    from coterie.deploy.edge import environment
    from coterie.deploy.trial import free_ports, program
    from coterie.report.page import write_report

    control, fleet, *runtime = free_ports(2 + layout.clients)
    _complete(layout)
    pki = layout.folder / "pki"
    variables = environment(layout.folder / "flwr") | {"PYTHONUNBUFFERED": "1"}
    for name in ("COTERIE_RUNS", "COTERIE_ROSTER"):  # the folder has its own
        variables.pop(name, None)
    command = [sys.executable, "-m", "coterie.cli", "server", str(layout.folder), "--control-port", str(control)]
    trial.start("server", [*command, "--", "--fleet-api-address", f"127.0.0.1:{fleet}"], variables)
    trial.wait(lambda: READY in trial.output("server"), _START, "the server does not register its nodes")
    say(f"SuperLink at localhost:{fleet} (clients) and localhost:{control} (flwr); TLS and nodes' keys")
    declared = _declared(layout, has_budget=bool(budget))
    for client, port in enumerate(runtime):
        command = [sys.executable, "-m", "coterie.cli", "client", "--superlink", f"localhost:{fleet}"]
        command += ["--key", str(pki / "nodes" / f"node-{client}.key"), "--ca", str(pki / "ca.crt")]
        state = layout.folder / "clients" / str(client)
        command += ["--data", str(layout.data(client)), "--state-dir", str(state)]
        command += ["--roster", str(pki / "roster.json"), "--port", str(port), *declared]
        if budget:  # not that of the data, which a trial neither spends nor shares
            command += [*budget, "--budget-file", str(state / "budget.jsonl")]
        trial.start(f"client-{client}", command, {k: v for k, v in variables.items() if k != "FLWR_HOME"})
    submit = [program("flwr"), "run", str(layout.app), CONNECTION, "--stream", "--run-config"]
    if continued is None:
        say(f"{layout.clients} clients start, and a run with the settings of {layout.settings}")
        if budget:
            say("a trial charges its own budgets, not those of the data: let no model of it leave this machine")
        submit.append(str(layout.settings))
    else:
        say(f"{layout.clients} clients start; {continued} goes on")
        submit.append(f"out={json.dumps(str(continued))} resume=true")
    trial.start("run", submit, variables)
    _watch_run(trial, say)
    folders = (path.parent for path in (layout.folder / "runs").glob("*/result.json"))
    run = max(folders, key=lambda path: path.stat().st_mtime)
    say(f"results: {run}; page: {write_report([run], run)}")
    if once:
        return
    say(f"state: FLWR_HOME={variables['FLWR_HOME']} coterie status {CONNECTION}")
    say(f"another run: the same with: flwr run app {CONNECTION} --stream --run-config run.toml, in this folder")
    say("Ctrl-C ends everything")
    while True:
        _check(trial, say)
        time.sleep(_POLL)


def _complete(layout: _Layout) -> None:
    """Create what is missing: certificates, data of the demo, the app, and folders."""
    import tomli_w

    from coterie import __version__
    from coterie.deploy.certificates import create
    from coterie.fields.settings import AUTO, nested
    from coterie.files import private_folder, write_atomic
    from coterie.server import SETTINGS

    if not (layout.folder / "pki").exists():
        create(layout.folder / "pki", layout.clients, ["localhost"])
    for name in ("runs", "app", "clients"):
        private_folder(layout.folder / name)
    folder = layout.folder / "data"
    if layout.data_dir is None and not folder.exists():
        import numpy as np

        from coterie.datasets import load

        source = load("digits")
        pixels = np.concatenate([source.train_x, source.test_x])
        labels = np.concatenate([source.train_y, source.test_y])
        for client in range(layout.clients):
            images = (pixels[client :: layout.clients] * 255).round().astype(np.uint8)
            private_folder(folder / f"client-{client}")
            turned = images[:, :, ::-1, ::-1] if client % 2 else images  # every second client's are upside down
            np.savez(folder / f"client-{client}" / "train.npz", x=turned, y=labels[client :: layout.clients])
    # The components are those of the installed package, so that the app needs no code of its own.
    app = {
        "publisher": "coterie",
        "components": {"serverapp": "coterie.server.app:app", "clientapp": "coterie.client.app:app"},
        "config": nested(dict.fromkeys(SETTINGS, AUTO)),
    }
    project = {"name": "coterie", "version": __version__, "license": "Apache-2.0", "dependencies": []}
    content = tomli_w.dumps({"project": project, "tool": {"flwr": {"app": app}}})
    write_atomic(layout.app / "pyproject.toml", content.encode(), sync=False)


def _declared(layout: _Layout, *, has_budget: bool) -> list[str]:
    """Options of every client that its owner chooses in a real deployment: what the data are, what is released."""
    from coterie.fields import MASKED_SUMS, RECORD_LEVEL, TRUSTED_SERVER
    from coterie.fields.settings import AUTO
    from coterie.privacy import Secure
    from coterie.server.resolution import combine

    values = combine(settings_of(layout.settings, [], {}))
    of_schema = {"data.task"} if values.get("data.table-schema") else set()
    named = {name: str(values[name]) for name in _DECLARED if name in values and name not in of_schema}
    options = [word for name, value in named.items() if value != AUTO for word in (_DECLARED[name], value)]
    guarantee = RECORD_LEVEL if has_budget else TRUSTED_SERVER
    if values.get("privacy.mechanism") == Secure.mechanism:
        guarantee = MASKED_SUMS
    options += ["--guarantee", guarantee]
    return options + ["--diagnostics"] * (values.get("evaluation.evaluate") == "diagnostic")


def _watch_run(trial: Trial, say: Any) -> None:
    """Show rounds until the run has ended.

    Raises:
        DeployError: it failed, or the SuperLink or a client did.
    """
    from coterie.deploy.progress import read_progress

    shown = 0
    while True:
        over = "run" in trial.ended()
        progress = read_progress(trial.output("run"))
        if progress is not None and progress["round"] > shown:
            shown = progress["round"]
            say(f"round {shown} of {progress['rounds']}, ε {progress['epsilon']:.3f}")
        if over:
            break
        _check(trial, say)
        time.sleep(_POLL)
    failed = trial.failure("run")
    trial.forget("run")
    if "results are in" not in trial.output("run"):
        raise failed


def _check(trial: Trial, say: Any) -> None:
    """Raise the failure of a process that ended by itself; name a client that was killed, or is not accepted yet."""
    for name, status in trial.ended().items():
        failure = trial.failure(name)
        if name == "run":
            continue
        if name == "server" or (status >= 0 and _REFUSED not in str(failure)):
            raise failure
        if status < 0:
            say(f"{name} was ended by signal {-status}; the others go on")
            trial.forget(name)
        else:
            say(f"{name} is refused for up to 60 s, because its connection was not closed; it tries again")
            trial.start_again(name, _AGAIN)
