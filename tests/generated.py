"""Writes what is generated from the package: pyproject.toml's block, pages of settings, commands, methods, the version.

``python -m tests.generated`` is ``make settings``; tests/server/test_config.py, tests/test_release.py and
tests/cli/test_help.py compare.
"""

import re
from pathlib import Path

import click
import tomli_w
import typer

from coterie import __version__
from coterie.cli.program import cli
from coterie.fields.settings import AUTO, Settings, nested
from coterie.server import SETTINGS
from coterie.server.resolution import COMMON
from coterie.strategies.registry import STRATEGIES

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT, PAGE = ROOT / "pyproject.toml", ROOT / "docs" / "settings.md"
METHODS, COMMANDS = ROOT / "docs" / "methods.md", ROOT / "docs" / "commands.md"
#: Lines that state the version, by file; Flower requires that of pyproject.toml.
_VERSION = {PYPROJECT: r'^version = ".*"$', ROOT / "CITATION.cff": r"^version: .*$"}
#: Examples of commands that no other page shows.
EXAMPLES = {
    "audit": "coterie audit",
    "privacy guard": "coterie privacy guard LEDGER",
    "purge": "coterie purge superlink.db",
    "run": "coterie run --strategy fedavg --epsilon 2 --seed 0",
    "strategies": "coterie strategies",
}
_FIRST, _AFTER = "[tool.flwr.app.config]\n", "[tool.hatch."


def block():
    """The tables of pyproject.toml: Flower accepts only settings that are listed there."""
    return tomli_w.dumps({"tool": {"flwr": {"app": {"config": nested(dict.fromkeys(SETTINGS, AUTO))}}}})


def page():
    """docs/settings.md."""
    lines = [
        "# Settings",
        "",
        "`make settings` writes this page. A setting is given on the command line (`--set`, the last part of",
        "its name suffices), in a TOML file (`--config`), or in Flower's run configuration",
        "(`--run-config`, by full name). Explicit values take precedence over the defaults of the method,",
        "these over the defaults of the data set, and these over the defaults below. `auto` means that a",
        "setting is not set.",
    ]
    tables = {}  # title and settings, which methods may share
    for settings in (*COMMON, *(method.settings_class for method in STRATEGIES.values())):
        bases = [settings] if settings in COMMON else reversed(settings.__mro__[: settings.__mro__.index(Settings)])
        for base in bases:
            title, declared = tables.setdefault(base.table, ((base.__doc__ or "").splitlines()[0], {}))
            own = [each for each in base.declared().values() if each.name.rpartition(".")[0] == base.table]
            declared |= {each.name: each for each in own}
    for table, (title, declared) in tables.items():
        if not declared:
            continue
        lines += ["", f"## {f'`[{table}]`' if table else 'Without a table'}", ""]
        lines += [title, "", "| Setting | Default | Allowed | Meaning |"]
        lines += ["| --- | --- | --- | --- |"]
        for each in declared.values():
            default = f"`{each.shown_default}`" if each.shown_default != "" else "empty"
            lines.append(f"| `{each.key}` | {default} | {each.allowed} | {each.help} |")
    return "\n".join(lines) + "\n"


def commands():
    """docs/commands.md, from the help of the commands."""
    listed = list(_walk(typer.main.get_command(cli)))
    assert EXAMPLES.keys() <= {name for name, _ in listed}
    head = "`make settings` writes this page from the commands' own help (`coterie COMMAND --help`)."
    lines = ["# Commands", "", head, "", "| Command | What it does |", "| --- | --- |"]
    for name, command in listed:
        shown = f"`{name}`" if hasattr(command, "commands") else f"[`{name}`](#coterie-{name.replace(' ', '-')})"
        lines.append(f"| {shown} | {_paragraphs(command)[0]} |")
    for name, command in listed:
        if hasattr(command, "commands"):
            continue
        lines += ["", f"## `coterie {name}`", "", "\n\n".join(_paragraphs(command))]
        if name in EXAMPLES:
            lines += ["", f"    {EXAMPLES[name]}"]
        context = click.Context(command, info_name=f"coterie {name}")
        records = [record for each in command.params if (record := each.get_help_record(context))]
        if records:
            lines += ["", "| Argument or option | Meaning |", "| --- | --- |"]
        for words, meaning in records:
            lines.append(f"| `{words.replace('|', ' or ')}` | {' '.join(meaning.split()).replace(chr(92), '')} |")
    return "\n".join(lines) + "\n"


def _walk(group, before=""):
    """Yield names and commands in alphabetical order, without hidden ones; a group precedes its commands."""
    for name, command in sorted(group.commands.items()):
        if not command.hidden:
            yield before + name, command
            yield from _walk(command, f"{before}{name} ") if hasattr(command, "commands") else ()


def _paragraphs(command):
    return [" ".join(text.split()) for text in (command.help or "").split("\n\n")]


def with_version():
    """The files that state the version, with that of the package."""
    return {
        path: re.sub(line, lambda old: re.sub(r"\d[^\"]*", __version__, old[0]), path.read_text(), count=1, flags=re.M)
        for path, line in _VERSION.items()
    }


def methods():
    """docs/methods.md with the table of what each method supports; a table has no lines between head and rows."""
    before, after = METHODS.read_text().split("| :---: |\n", 1)
    rows = "".join(
        f"| `{name}` | {' | '.join('yes' if unit in method.units else '' for unit in ('client', 'record', 'none'))} | "
        f"{'yes' if method.finds_clusters or method.grows else ''} | {'yes' if method.robust else ''} |\n"
        for name, method in sorted(STRATEGIES.items())
    )
    return f"{before}| :---: |\n{rows}\n{after.partition(chr(10) * 2)[2]}"


def main():
    """Rewrite all."""
    METHODS.write_text(methods())
    COMMANDS.write_text(commands())
    for path, text in with_version().items():
        path.write_text(text)
    text = PYPROJECT.read_text()
    before, after = text.partition(_FIRST)[0], text.partition(_AFTER)[2]
    PYPROJECT.write_text(f"{before}{block()}\n{_AFTER}{after}")
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
