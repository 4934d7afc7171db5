"""``coterie run``."""

from __future__ import annotations

import logging
import math
import os
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from coterie.cli.console import JsonFlag, console_for, interruptible, listing, plain_progress, print_json
from coterie.logs import estimated, remaining

if TYPE_CHECKING:
    from coterie.results import RoundRecord
    from coterie.server import RunFolder

# Seconds without output after which a long round reports progress, where there is no terminal.
_SILENCE = 5.0


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file of settings."""
    from coterie.fields.settings import ConfigError

    try:
        return tomllib.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def settings_of(config: Path | None, assignments: list[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a TOML file, overridden by ``--set``, overridden by dedicated options."""
    from coterie.fields.settings import ConfigError
    from coterie.server.config import RunConfig
    from coterie.server.resolution import combine

    values: dict[str, Any] = {}
    if config is not None:
        values = read_toml(config)
        if "config" in values:  # a run folder's config.toml
            if not isinstance(values["config"], dict):
                raise ConfigError(f"{config}: config = {values['config']!r} must be a table of settings")
            values = RunConfig.stored(values["config"]).values
    given: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals:
            raise ConfigError(f"--set {assignment}: must be key=value")
        given[key.strip()] = value.strip()
    return combine(values, given, options)


def _names(setting: str) -> Callable[[str], list[str]]:
    """Return completions of a setting's value for the shell."""

    def complete(begin: str) -> list[str]:
        from coterie.server import SETTINGS

        return [name for name in SETTINGS[setting].choices if name.startswith(begin)]

    return complete


def complete_assignment(begin: str) -> list[str]:
    """Return completions of NAME=VALUE for the shell."""
    from coterie.server import SETTINGS

    name, equals, _ = begin.partition("=")
    if equals:
        settings = [setting for setting in SETTINGS.values() if name in (setting.name, setting.key)]
        values = [f"{name}={value}" for setting in settings for value in setting.choices]
    else:
        values = [f"{key}=" for declared in SETTINGS.values() for key in (declared.key, declared.name)]
    return sorted({value for value in values if value.startswith(begin)})


_Text = str | None
_Strategy = Annotated[
    _Text, typer.Option(autocompletion=_names("strategy"), help="Strategy; `coterie strategies` lists them.")
]
_Dataset = Annotated[
    _Text, typer.Option(autocompletion=_names("data.dataset"), help="Data set; `coterie datasets` lists them.")
]
_Model = Annotated[
    _Text, typer.Option(autocompletion=_names("training.model"), help="Model; `coterie models` lists them.")
]

_Start = Annotated[_Text, typer.Option("--from", metavar="RUN", help="Start with the models of another run.")]
Clients = Annotated[_Text, typer.Option(metavar="M", help="Number of clients.")]
Clusters = Annotated[_Text, typer.Option(metavar="K", help="Number of clusters.")]
Rounds = Annotated[_Text, typer.Option(metavar="T", help="Number of rounds.")]
Epsilon = Annotated[_Text, typer.Option(metavar="EPSILON", help="Privacy budget.")]
Config = Annotated[Path | None, typer.Option(help="TOML file with settings.")]
Assignments = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        autocompletion=complete_assignment,
        help="Set any setting by its full name or the last part; repeatable.",
    ),
]


def run(
    strategy: _Strategy = None,
    dataset: _Dataset = None,
    model: _Model = None,
    clients: Clients = None,
    clusters: Clusters = None,
    rounds: Rounds = None,
    epsilon: Epsilon = None,
    config: Config = None,
    assignments: Assignments = [],  # noqa: B006
    engine: Annotated[str, typer.Option(help="Simulation engine: local or ray.")] = "local",
    client_cpus: Annotated[int, typer.Option(min=1, help="With --engine ray: CPU cores of a client.")] = 1,
    device: Annotated[str | None, typer.Option(help="Device: auto, cpu or cuda.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of a reproducible run; such runs are not certified.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of the data sets.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; default: a new one under runs/.")] = None,
    budget_file: Annotated[
        Path | None, typer.Option(help="File of a privacy budget shared by runs on the same clients.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    start_from: _Start = None,
    recorders: Annotated[
        str | None, typer.Option(help="Also record every round with tensorboard, mlflow, or both separated by a comma.")
    ] = None,
    keys: Annotated[bool, typer.Option("--keys", help="List all settings and exit.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Run federated training in a simulation. Default: private clustered models on handwritten digits (the demo)."""
    if keys:
        _list_keys(as_json)
        return
    began = time.monotonic()
    if recorders:
        os.environ["COTERIE_RECORDERS"] = recorders
    options = {
        "strategy": strategy,
        "dataset": dataset,
        "model": model,
        "clients": clients,
        "clusters": clusters,
        "rounds": rounds,
        "epsilon": epsilon,
        "device": device,
        "seed": seed,
        "data-dir": data_dir,
        "out": out,
        "resume": resume or None,
        "budget-file": budget_file,
        "start-from": start_from,
    }
    given = {
        key: value if isinstance(value, int) else str(value) for key, value in options.items() if value is not None
    }
    console = console_for(as_json)
    with console.status("preparing the run"):  # imports take seconds
        folder = _open(settings_of(config, assignments, given), engine)
    _run(folder, engine, client_cpus, as_json, console, began)


def _open(values: Mapping[str, Any], engine: str) -> RunFolder:
    from coterie.fields.settings import ConfigError

    if engine not in ("local", "ray"):
        raise ConfigError(f"--engine {engine}: must be local or ray")
    from coterie.logs import colour_terminals_only
    from coterie.server.app import open_folder
    from coterie.server.simulate import prepare

    colour_terminals_only()
    logging.getLogger("flwr").setLevel(logging.WARNING)  # importing Flower sets it to INFO
    logging.getLogger().addHandler(logging.NullHandler())  # or importing Opacus makes the root logger repeat each line
    return open_folder(values, Path("runs"), check=lambda config: prepare(config, engine))


def _run(folder: RunFolder, engine: str, client_cpus: int, as_json: bool, console: Console, began: float) -> None:
    from coterie.logs import collapsed_warnings
    from coterie.server.simulate import simulate

    folder.began = began
    try:
        with interruptible(f"continue with: coterie run --resume --out {folder.path}"):
            for warning in folder.config.warnings():
                console.print(f"[yellow]note:[/] {warning}", soft_wrap=True)
            console.print(_headline(folder), soft_wrap=True)
            with _reported(folder.path) as shown, _progress(folder, console), collapsed_warnings():
                outcome = simulate(folder, engine, client_cpus=client_cpus)
    finally:
        folder.close()
    if as_json:
        print_json(outcome.document)
        return
    for text in shown:
        console.print(text, soft_wrap=True)


@contextmanager
def _reported(run: Path) -> Iterator[list[RenderableType]]:
    """Have the entry points of `coterie.reports` report a run when the context exits, also if its budget ended it.

    Yields a list that then holds what they show in the terminal.
    """
    shown: list[RenderableType] = []
    try:
        yield shown
    finally:
        if (run / "result.json").exists():
            reports = entry_points(group="coterie.reports")
            try:
                shown += [text for report in reports for text in report.load()(run)]
            except ImportError as error:
                shown.append(f"run folder {run}/   no report: {error}")
            if not shown:
                shown.append(f"run folder {run}/   no report: no installed package registers one (coterie.reports)")


def _headline(folder: Any) -> str:
    config, plan = folder.config, folder.plan
    mechanism = "" if plan.mechanism == "joint" else f" by {plan.mechanism}"
    protected = f"all records of a {config.units!r}" if config.units and plan.unit == "record" else f"every {plan.unit}"
    privacy_text = (
        f"(ε {plan.epsilon:g}, δ {plan.delta:g}) for {protected}{mechanism}, noise {plan.noise_multiplier:.3f}"
        if plan.private
        else "no privacy"
    )
    where = f", resumed after round {folder.resumed.round}" if folder.resumed else ""
    clusters = config.run.clusters or "unknown number of"
    trained = ("cluster" if config.method.produces == "labels" else "model") + "s" * (clusters != 1)
    return (
        f"[bold]{config.run.strategy}[/] on [bold]{config.data.dataset}[/]: {plan.clients} clients, "
        f"{clusters} {trained}, "
        f"{plan.rounds} {'round' if plan.rounds == 1 else 'rounds'}, {privacy_text}{where}"
    )


@contextmanager
def _progress(folder: Any, console: Console) -> Iterator[None]:
    """Show a progress bar on a terminal, or a line per evaluated round elsewhere."""
    rounds, done = folder.config.run.rounds, folder.resumed.round if folder.resumed else 0
    name = f"{'exact ' * folder.plan.private}{folder.config.task.score_name}"
    name = "noisy mean accuracy" if folder.config.evaluation.evaluate == "private" else name
    if not console.is_terminal:
        began, first = time.monotonic(), done

        def plain(record: RoundRecord) -> None:
            number, mean = record.round, record.mean_accuracy
            if mean is not None or number == rounds:
                accuracy = "" if mean is None else f"  {name} {100 * mean:5.1f} %"
                pace = (time.monotonic() - began) / (number - first)
                left = f"  {remaining(pace * (rounds - number))}" if number < rounds else ""
                console.print(f"round {number:4d}/{rounds}  epsilon {record.epsilon:7.3f}{accuracy}{left}")

        folder.on_metrics, folder.on_progress = plain, plain_progress(console, _SILENCE)
        yield
        return
    columns = (
        TextColumn("round"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn(name + " {task.fields[accuracy]}  ε {task.fields[epsilon]}"),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=rounds, completed=done, accuracy="  –   ", epsilon="–")

        def show(record: RoundRecord) -> None:
            fields: dict[str, Any] = {"epsilon": "∞" if math.isinf(record.epsilon) else f"{record.epsilon:.2f}"}
            if record.mean_accuracy is not None:
                fields["accuracy"] = f"{100 * record.mean_accuracy:.1f} %"
            bar.update(task, completed=record.round, description="", **fields)

        folder.on_metrics = show
        folder.on_progress = estimated(lambda what: bar.update(task, description=what))
        yield


def _list_keys(as_json: bool) -> None:
    from coterie.server import SETTINGS

    rows = {
        name: {"default": setting.shown_default, "allowed": setting.allowed, "help": setting.help}
        for name, setting in SETTINGS.items()
    }
    listing("settings", rows, as_json)
