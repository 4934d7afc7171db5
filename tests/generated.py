"""Writes what is generated from the package: pyproject.toml's block, docs/settings.md, docs/methods.md, the version.

``python -m tests.generated`` is ``make settings``; tests/server/test_config.py and tests/test_release.py compare.
"""

import re
from pathlib import Path

import tomli_w

from coterie import __version__
from coterie.fields.settings import AUTO, nested
from coterie.server import SETTINGS
from coterie.server.config import COMMON
from coterie.strategies.registry import STRATEGIES

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT, PAGE = ROOT / "pyproject.toml", ROOT / "docs" / "settings.md"
METHODS = ROOT / "docs" / "methods.md"
#: Lines that state the version, by file; Flower requires that of pyproject.toml.
_VERSION = {PYPROJECT: r'^version = ".*"$', ROOT / "CITATION.cff": r"^version: .*$"}
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
    for table in (*COMMON, *(method.settings_class for method in STRATEGIES.values())):
        declared = table.declared().values()
        if not declared:
            continue
        lines += ["", f"## {f'`[{table.table}]`' if table.table else 'Without a table'}", ""]
        lines += [f"{(table.__doc__ or '').splitlines()[0]}", "", "| Setting | Default | Allowed | Meaning |"]
        lines += ["| --- | --- | --- | --- |"]
        for each in declared:
            default = f"`{each.shown_default}`" if each.shown_default != "" else "empty"
            lines.append(f"| `{each.key}` | {default} | {each.allowed} | {each.help} |")
    return "\n".join(lines) + "\n"


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
    for path, text in with_version().items():
        path.write_text(text)
    text = PYPROJECT.read_text()
    before, after = text.partition(_FIRST)[0], text.partition(_AFTER)[2]
    PYPROJECT.write_text(f"{before}{block()}\n{_AFTER}{after}")
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
