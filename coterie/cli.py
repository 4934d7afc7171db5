"""The ``coterie`` command."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

# Before torch is loaded: idle threads that spin cost a factor of ten as soon as another program wants the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")

cli = typer.Typer(
    help="One model per hidden group of clients, under a differential-privacy guarantee that is proved.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
privacy = typer.Typer(help="What a setting costs, and what noise a target needs.", no_args_is_help=True)
cli.add_typer(privacy, name="privacy")

_INTERRUPTED = 130
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]


def _console(as_json: bool) -> Console:
    """Where people read: standard output, or standard error while that carries JSON."""
    return Console(stderr=as_json, highlight=False)


def _print_json(document: Any) -> None:
    print(json.dumps(document, indent=2, allow_nan=False))


def _settings(config: Path | None, assignments: list[str]) -> dict[str, Any]:
    """Keys from a TOML file, then those of ``--set``."""
    from coterie.server import ConfigError

    values: dict[str, Any] = {}
    if config is not None:
        try:
            values = tomllib.loads(config.read_text())
        except OSError as error:
            raise ConfigError(f"{config} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise ConfigError(f"{config} is not TOML: {error}") from None
        values = values.get("config", values)  # a run folder's config.toml, or a plain list of keys
        if not isinstance(values, dict):
            raise ConfigError(f"{config}: config = {values!r} must be a table of keys")
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals:
            raise ConfigError(f"--set {assignment}: write it as key=value")
        values[key.strip()] = value.strip()
    return values


@cli.command()
def run(
    config: Annotated[Path | None, typer.Option(help="TOML file with configuration keys.")] = None,
    assignments: Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Set a key.")] = [],  # noqa: B006
    engine: Annotated[str, typer.Option(help="local or ray.")] = "local",
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    seed: Annotated[int | None, typer.Option(help="Make the run reproducible; it is then not certified.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of the data sets.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; default: a new one under runs/.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    keys: Annotated[bool, typer.Option("--keys", help="List all configuration keys and stop.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Train. Without settings: private clustered models on handwritten digits (the demo)."""
    if keys:
        _list_keys(as_json)
        return
    from coterie.server import ConfigError

    values = _settings(config, assignments)
    options = {"device": device, "seed": seed, "data-dir": data_dir, "out": out, "resume": resume or None}
    values |= {
        key: value if isinstance(value, int) else str(value) for key, value in options.items() if value is not None
    }
    if engine not in ("local", "ray"):
        raise ConfigError(f"--engine {engine}: must be local or ray")
    _run(values, engine, as_json)


def _run(values: Mapping[str, Any], engine: str, as_json: bool) -> None:
    from coterie.report import result_table, write_report
    from coterie.server.app import open_folder

    logging.getLogger("flwr").setLevel(logging.WARNING)  # importing Flower sets it to INFO
    console = _console(as_json)
    folder = open_folder(values, Path("runs"), check=_ready)
    try:
        for warning in folder.config.warnings():
            console.print(f"[yellow]note:[/] {warning}", soft_wrap=True)
        console.print(_headline(folder), soft_wrap=True)
        with _progress(folder, console):
            result = _execute(folder, engine)
        report = write_report([folder.path], folder.path / "report.html")
    except KeyboardInterrupt:
        print(f"interrupted; continue with: coterie run --resume --out {folder.path}", file=sys.stderr)
        raise typer.Exit(_INTERRUPTED) from None
    finally:
        folder.close()
    if as_json:
        _print_json(result)
        return
    console.print(result_table(result, json.loads((folder.path / "privacy.json").read_text())))
    console.print(f"run folder {folder.path}/   page {report}", soft_wrap=True)


def _ready(config: Any) -> None:
    """Find out now that data or device are missing; the clients find the data in memory."""
    from coterie.client.verbs import federation
    from coterie.server import ConfigError

    federation(config.for_clients())
    if config["device"] == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError("device = 'cuda': PyTorch finds no GPU on this machine; use auto or cpu")


def _execute(folder: Any, engine: str) -> dict[str, Any]:
    from coterie.engine import LocalGrid, run_on_ray
    from coterie.engine.local import workers_for
    from coterie.models import MODELS
    from coterie.server import run as run_once

    config = folder.config
    if engine == "local":
        batched = config["model"] in MODELS and MODELS[config["model"]].batched
        grid = LocalGrid(config["clients"], workers_for(batched, config["device"]))
        try:
            return run_once(folder, grid)
        finally:
            grid.close()
    results: list[dict[str, Any]] = []
    run_on_ray(lambda grid: results.append(run_once(folder, grid)), config["clients"])
    return results[0]


def _headline(folder: Any) -> str:
    config, plan = folder.config, folder.config.plan
    privacy_text = (
        f"(ε {plan.epsilon:g}, δ {plan.delta:g}) for every client, noise {plan.noise_multiplier:.3f}"
        if plan.private
        else "no privacy"
    )
    where = f", resumed after round {folder.resumed.round}" if folder.resumed else ""
    return (
        f"[bold]{config['strategy']}[/] on [bold]{config['dataset']}[/]: {plan.clients} clients, "
        f"{plan.num_clusters} models, {plan.rounds} rounds, {privacy_text}{where}"
    )


@contextmanager
def _progress(folder: Any, console: Console) -> Iterator[None]:
    """A bar on a terminal, a plain line for every evaluated round elsewhere."""
    rounds = folder.config["rounds"]
    if not console.is_terminal:

        def plain(line: Mapping[str, Any]) -> None:
            if "accuracy" in line or line["round"] == rounds:
                accuracy = f"  accuracy {100 * line['accuracy']:5.1f} %" if "accuracy" in line else ""
                console.print(f"round {line['round']:4d}/{rounds}  epsilon {line['epsilon']:7.3f}{accuracy}")

        folder.observer = plain
        yield
        return
    columns = (
        TextColumn("round"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("accuracy {task.fields[accuracy]}  ε {task.fields[epsilon]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        done = folder.resumed.round if folder.resumed else 0
        task = bar.add_task("", total=rounds, completed=done, accuracy="  –   ", epsilon="–")

        def show(line: Mapping[str, Any]) -> None:
            fields = {"epsilon": "∞" if math.isinf(line["epsilon"]) else f"{line['epsilon']:.2f}"}
            if "accuracy" in line:
                fields["accuracy"] = f"{100 * line['accuracy']:.1f} %"
            bar.update(task, completed=line["round"], **fields)

        folder.observer = show
        yield


def _list_keys(as_json: bool) -> None:
    from coterie.server import SCHEMA

    rows = {name: {"default": key.default, "allowed": key.allowed, "help": key.help} for name, key in SCHEMA.items()}
    _listing("configuration keys", rows, as_json)


def _listing(title: str, rows: Mapping[str, Mapping[str, Any]], as_json: bool) -> None:
    if as_json:
        _print_json(rows)
        return
    table = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    table.add_column("name", no_wrap=True, style="cyan")
    for column in next(iter(rows.values())):
        table.add_column(column)
    for name, row in rows.items():
        table.add_row(name, *(str(value) for value in row.values()))
    Console(highlight=False).print(table)


@cli.command()
def strategies(as_json: JsonFlag = False) -> None:
    """The methods, with their papers and the units of privacy that they support."""
    from coterie.strategies import STRATEGIES

    rows = {
        name: {
            "what": method.title,
            "paper": method.paper,
            "privacy-unit": ", ".join(method.units),
            "rebalancing": "yes" if method.clustered else "-",
        }
        for name, method in sorted(STRATEGIES.items())
    }
    _listing("strategies", rows, as_json)


@cli.command()
def datasets(
    download: Annotated[str | None, typer.Option(metavar="NAME", help="Fetch a data set into --data-dir.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of the data sets; default: COTERIE_DATA.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """The data sets and the shifts that make hidden groups."""
    from coterie import datasets as room

    if download is not None:
        folder = data_dir or os.environ.get("COTERIE_DATA")
        if not folder:
            raise room.DataError("--download needs --data-dir DIR (or COTERIE_DATA) to put the files")
        console = _console(as_json)
        console.print(f"{download} is in {room.download(download, str(folder))}")
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
        for name, info in sorted(room.DATASETS.items())
    }
    _listing(f"data sets (shifts: {', '.join(sorted(room.SHIFTS))})", rows, as_json)


@cli.command()
def models(as_json: JsonFlag = False) -> None:
    """The networks and the fixed features that can stand in front of them."""
    from coterie import models as networks

    rows = {name: {"what": info.title, "source": info.source} for name, info in sorted(networks.MODELS.items())}
    _listing(f"models (features: {', '.join(sorted(networks.FEATURES))})", rows, as_json)


@cli.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
) -> None:
    """One HTML page about one run or several: curves, clusters, privacy, comparison."""
    from coterie.report import write_report

    Console(highlight=False).print(str(write_report(runs, out)), soft_wrap=True)


Rate = Annotated[float, typer.Option(help="Probability with which a client takes part in a round.")]
Rounds = Annotated[int, typer.Option(min=1, help="Number of rounds.")]
Delta = Annotated[float, typer.Option(help="Delta of the guarantee.")]
Share = Annotated[float, typer.Option(help="Part of a round's privacy spent on cluster sizes.")]
_UNIT = {"unit": "client", "adjacency": "add/remove one client"}


@privacy.command("epsilon")
def privacy_epsilon(
    noise_multiplier: Annotated[float, typer.Option(help="Noise standard deviation / sensitivity of a round.")],
    delta: Delta,
    sampling_rate: Rate,
    rounds: Rounds,
    as_json: JsonFlag = False,
) -> None:
    """What a setting costs."""
    from coterie.privacy import ACCOUNTANTS, Event, PrivacyError
    from coterie.privacy import epsilon as cost

    if not noise_multiplier > 0:
        raise PrivacyError(f"--noise-multiplier must be positive, not {noise_multiplier}")
    events = [Event(sampling_rate, noise_multiplier)] * rounds
    costs = {f"epsilon_{name}": cost(events, delta, name) for name in sorted(ACCOUNTANTS)}
    answer = {"epsilon": costs["epsilon_pld"], **costs, "delta": delta, **_UNIT}
    _answer(answer, as_json)


@privacy.command("noise")
def privacy_noise(
    epsilon: Annotated[float, typer.Option(help="Target epsilon.")],
    delta: Delta,
    sampling_rate: Rate,
    rounds: Rounds,
    identifier_share: Share = 0.04,
    as_json: JsonFlag = False,
) -> None:
    """The noise that a target needs."""
    from coterie.privacy import Event, Plan, calibrate
    from coterie.privacy import epsilon as cost

    noise = calibrate(epsilon, delta, sampling_rate, rounds)
    plan = Plan(
        unit="client",
        mechanism="joint",
        clients=1,
        num_clusters=1,
        sampling_rate=sampling_rate,
        rounds=rounds,
        clip_norm=1.0,
        epsilon=epsilon,
        delta=delta,
        noise_multiplier=noise,
        identifier_share=identifier_share,
    )
    answer = {
        "noise_multiplier": noise,
        "noise_multiplier_updates": plan.noise_multiplier_updates,
        "noise_multiplier_counts": plan.noise_multiplier_counts,
        "epsilon": cost([Event(sampling_rate, noise)] * rounds, delta),
        "delta": delta,
        **_UNIT,
    }
    _answer(answer, as_json)


def _answer(values: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        _print_json({key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in values.items()})
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    for key, value in values.items():
        table.add_row(key, f"{value:.6g}" if isinstance(value, float) else str(value))
    Console(highlight=False).print(table)


def main() -> None:
    """Run the command; every failure is one clear message and a non-zero exit status."""
    sys.path.insert(0, os.getcwd())  # so that module:function finds a user's own module
    try:
        cli(prog_name="coterie")
    except Exception as error:
        if not _expected(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


def _expected(error: Exception) -> bool:
    """Whether the message alone tells a person what to do."""
    from coterie.datasets import DataError
    from coterie.models import ModelError
    from coterie.privacy import LedgerError, PrivacyError
    from coterie.report import ReportError
    from coterie.server import ConfigError, FolderError, RunError
    from coterie.strategies import StrategyError

    known = (
        ConfigError,
        DataError,
        FolderError,
        LedgerError,
        ModelError,
        PrivacyError,
        ReportError,
        RunError,
        StrategyError,
    )
    return isinstance(error, known)


if __name__ == "__main__":
    main()
