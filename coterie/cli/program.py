"""The command line: commands of the core, and those that rooms register by entry points."""
# ruff: noqa: E402 (the handler of Ctrl-C comes before imports)

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import threading
from importlib.metadata import entry_points, requires
from typing import Annotated

import typer

# Ctrl-C during the imports below ends the program without a traceback.
_on_interrupt = signal.getsignal(signal.SIGINT)
if (
    _interruptible := threading.current_thread() is threading.main_thread()
    and _on_interrupt is signal.default_int_handler
):
    signal.signal(signal.SIGINT, signal.SIG_DFL)

# Set before PyTorch and Flower are imported, also for the processes that commands start; what a user sets stays.
_VARIABLES = {
    "OMP_WAIT_POLICY": "PASSIVE",  # spinning idle threads slow a run down tenfold when another program needs the cores
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",  # else Flower installs what an app names, without hashes
}
os.environ.update({name: os.environ.get(name) or value for name, value in _VARIABLES.items()})
if any(name.lower() in ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy") for name in os.environ):
    # No proxy leads to this machine. gRPC reads the name in lower case alone.
    _direct = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    os.environ["no_proxy"] = ",".join(filter(None, (_direct, "localhost,127.0.0.1,::1")))

from coterie import __version__
from coterie.cli import budget, data, listings, privacy
from coterie.cli.audit_log import audit_log
from coterie.cli.evaluate import evaluate
from coterie.cli.predict import assign, export, predict
from coterie.cli.run import run
from coterie.fields.removed import removal

if _interruptible:
    signal.signal(signal.SIGINT, _on_interrupt)

cli = typer.Typer(
    help="Clustered federated learning with proven differential privacy: one model per hidden group of clients.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"coterie {__version__}")
        raise typer.Exit


@cli.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


for command in (
    run,
    listings.strategies,
    listings.datasets,
    listings.models,
    predict,
    evaluate,
    assign,
    export,
    audit_log,
):
    cli.command()(command)
cli.add_typer(budget.app, name="budget")
cli.add_typer(data.app, name="data")
cli.add_typer(privacy.app, name="privacy")
for room in entry_points(group="coterie.commands"):
    try:
        cli.add_typer(room.load())
    except ImportError as error:
        print(f"the commands of {room.name} are missing: {error}", file=sys.stderr)

#: Errors that are reported by their message alone, without a traceback, by the package that raises them.
_EXPECTED = {
    "coterie.bench.table": ("BenchError",),
    "coterie.files": ("FileError",),
    "coterie.report.handover.pack": ("HandoverError",),
    "coterie.inference": ("InferenceError",),
    "coterie.privacy": ("PrivacyError", "LedgerError"),
    "coterie.datasets": ("DataError",),
    "coterie.engine.ray": ("EngineError",),
    "coterie.site.errors": ("DeployError",),
    "coterie.models": ("ModelError",),
    "coterie.fields.plugins": ("PluginError",),
    "coterie.report.runs": ("ReportError",),
    "coterie.server": ("ConfigError", "FolderError", "RunError"),
    "coterie.strategies": ("StrategyError",),
}
#: Errors of a full disk, which often name no file.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main() -> None:
    """Run the command; every expected failure is one error message and a non-zero exit status."""
    home = os.path.expanduser("~")  # a shell replaces ~ only at the beginning of a word
    sys.argv[1:] = [re.sub(r"^(--[\w-]+=)~(?=/|$)", rf"\g<1>{home}", word) for word in sys.argv[1:]]
    sys.path.insert(0, os.getcwd())  # so that module:function finds a user's own module
    command = " ".join(["coterie", *sys.argv[1:2]])
    options = [option.partition("=")[0] for option in sys.argv[3:] if option.startswith("--")]
    for name in (command, *(f"{command} {word}" for word in (*sys.argv[2:3], *options))):
        if removed := removal(name):
            print(f"error: {removed}", file=sys.stderr)
            sys.exit(1)
    try:
        cli(prog_name="coterie")
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _FULL:
            print(f"error: {error}: make room; coterie run --resume --out RUN continues a run", file=sys.stderr)
        elif isinstance(error, OSError) and error.filename is not None:
            print(f"error: cannot access {error.filename}: {error.strerror}", file=sys.stderr)
        elif _expected(error):
            print(f"error: {error}", file=sys.stderr)
        elif isinstance(error, ModuleNotFoundError) and (extra := _extra_with(error.name or "")):
            print(f"error: {error.name} is not installed: pip install 'coterie[{extra}]'", file=sys.stderr)
        else:
            raise
        sys.exit(1)


def _expected(error: Exception) -> bool:
    """Whether the error is in `_EXPECTED`. Only imported packages are checked, since no other can have raised it."""
    loaded = ((sys.modules[package], names) for package, names in _EXPECTED.items() if package in sys.modules)
    return any(isinstance(error, getattr(package, name)) for package, names in loaded for name in names)


def _extra_with(module: str) -> str | None:
    """Return the extra of Coterie that installs a module; None if none does."""
    top = module.partition(".")[0]
    package = {"grpc": "grpcio", "PIL": "pillow", "yaml": "pyyaml"}.get(top, top.replace("_", "-"))
    extras = (re.match(rf"{package}\b.*\bextra == .(?!all|dev)(\w+)", line) for line in requires("coterie") or ())
    return next((extra[1] for extra in extras if extra is not None), None)
