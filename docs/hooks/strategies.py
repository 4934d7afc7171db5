"""One page per method: its docstring, declarations and settings, and its rows in the tables of benchmarks/results."""

import inspect
import json
import re
import tomllib
from pathlib import Path

from mkdocs.structure.files import File

from coterie.bench.outcome import markdown
from coterie.bench.table import decimals
from coterie.fields.settings import AUTO
from coterie.server import SETTINGS
from coterie.strategies.registry import STRATEGIES

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
REPRODUCTIONS = tomllib.loads(Path(__file__).with_name("reproductions.toml").read_text())
_UNITS = {"client": "whole clients", "record": "single records", "none": "none (ε = ∞)"}


def on_config(config):
    """List the pages in the navigation."""
    pages = ["strategies/index.md", *({name: f"strategies/{name}.md"} for name in sorted(STRATEGIES))]
    for section in config.nav:
        if "Methods" in section:
            section["Methods"] = pages
    return config


def on_files(files, config):
    """Add a page per method, and their list."""
    pages = {"index": overview(), **{name: page(method) for name, method in STRATEGIES.items()}}
    for name, text in pages.items():
        files.append(File.generated(config, f"strategies/{name}.md", content=text))
    return files


def overview():
    """All methods in one table."""
    lines = ["# Methods", "", "[Which method](../methods.md) helps to choose.", ""]
    lines += ["| Method | What it does | Protects | Source |", "| --- | --- | --- | --- |"]
    for name, method in sorted(STRATEGIES.items()):
        lines.append(f"| [`{name}`]({name}.md) | {method.title} | {', '.join(method.units)} | {method.paper} |")
    return "\n".join(lines) + "\n"


def page(method):
    """The page of one method."""
    module = inspect.getmodule(method)
    title, _, rest = inspect.getdoc(module).partition("\n")
    parts = [f"# `{method.name}`", title, *reproduction(method.name), prose(rest.strip())]
    if inspect.getdoc(method) and method.__module__ == module.__name__:
        parts += ["## In this implementation", f"{inspect.getdoc(method).partition(chr(10))[0]}", facts(method)]
    parts += ["## Settings", settings(method), "## Run it", command(method)]
    tables = list(figures(method.name, title.partition(":")[0]))
    if tables:
        note = "Cells read *paper → ours ± standard deviation over seeds (difference)*; a single figure is ours. "
        note += "[Results](../results.md) explains the differences."
        parts += ["## Figures beside the paper's", note, *tables]
    return "\n\n".join(parts) + "\n"


def reproduction(name):
    """What the paper published, as printed, and certified, in one table, and why they differ."""
    if name not in REPRODUCTIONS:
        return
    chosen = REPRODUCTIONS[name]
    document = json.loads((RESULTS / f"{chosen['table']}.json").read_text())
    rows = {row["name"]: row["cells"] for row in document["rows"]}
    printed = rows[chosen["printed"]]
    certified = rows[chosen["certified"]] if "certified" in chosen else None
    lines = ["| | Published | As printed |", "| --- | ---: | ---: |"]
    if certified:
        lines = ["| | Published | As printed | Certified |", "| --- | ---: | ---: | ---: |"]
    for index, column in enumerate(document["columns"]):
        if printed[index] and printed[index]["paper"] is not None:
            places = decimals(column)
            shown = [f"{printed[index]['paper']:.{places}f}", measured(printed[index], places)]
            shown += [measured(certified[index], places)] if certified else []
            lines.append(f"| {column['name']} | {' | '.join(shown)} |")
    made = f"{document['source']}: {document['title']} (`{document['command']}`)"
    names = f"“{chosen['printed']}”" + (f" and “{chosen['certified']}”" if certified else "")
    yield f"## Published and measured\n\n{made}; the rows are {names}.\n\n" + "\n".join(lines)
    yield f"**Why they differ.** {' '.join(chosen['why'].split())} [Results](../results.md) has all rows."
    yield "## Algorithm"


def measured(cell, places):
    """Our figure, with its deviation over seeds."""
    if cell["mean"] is None:
        return "–"
    return f"{cell['mean']:.{places}f}" + (f" ± {cell['std']:.{places}f}" if cell["std"] is not None else "")


def prose(text):
    """A docstring as Markdown: indented lines are pseudo-code, simple tables too; a line before a list is a heading."""
    blocks = []
    for block in re.split(r"\n\n(?=\S)|\n\n(?=    )", text):
        lines = block.splitlines()
        if lines[0].startswith("    ") or lines[0].startswith("==="):
            blocks.append(fenced(lines))
            continue
        if len(lines) > 1 and lines[1].startswith("- "):
            block = f"### {lines[0]}\n\n" + "\n".join(re.sub("^  ", "    ", line) for line in lines[1:])
        blocks.append(block.replace("``", "`").replace("<", "&lt;").replace("*", r"\*"))
    return "\n\n".join(blocks)


def fenced(lines):
    """Lines as code, without their common indentation."""
    code = inspect.cleandoc("\n".join(["", *lines]))
    return f"```text\n{code}\n```"


def facts(method):
    """What the method declares."""
    rows = {
        "Name in settings": f"`strategy = {method.name}`",
        "Class": f"`{method.__module__}.{method.__qualname__}`",
        "Source": method.paper,
        "Units of privacy": ", ".join(f"`{unit}`: {_UNITS[unit]}" for unit in method.units),
        "Client-level guarantee": "yes" if method.row_wise and "client" in method.units else "no",
        "Finds the number of clusters": "with `clusters=0`" if method.finds_clusters else "no",
        "Robust aggregators": "all" if method.robust else "none, `mean` only",
        "Clients keep state between rounds": "yes" if method.memory else "no",
    }
    return "\n".join(
        ["| Property | Value |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows.items())]
    )


def settings(method):
    """Own settings and changed defaults."""
    own = method.settings_class.declared().values()
    lines = ["Of this method alone:", "", "| Setting | Default | Allowed | Meaning |", "| --- | --- | --- | --- |"]
    lines += [f"| `{each.name}` | `{each.shown_default}` | {each.allowed} | {each.help} |" for each in own]
    parts = ["\n".join(lines)] if own else []
    if method.defaults:
        keys = {each.key: each for each in SETTINGS.values()}
        changed = ["Common settings with another default:", "", "| Setting | Default here | Elsewhere |"]
        changed += ["| --- | --- | --- |"]
        changed += [
            f"| `{key}` | `{AUTO if value is None else value}` | `{keys[key].shown_default}` |"
            for key, value in method.defaults.items()
        ]
        parts.append("\n".join(changed))
    return "\n\n".join([*parts, "All others: [settings](../settings.md)."])


def command(method):
    """The shortest command; what it trains on is embedded."""
    sizes = ""
    if method.units[0] == "record":
        sizes = " --clients 21 --set samples-per-client=60 --set delta=1e-3"
    elif method.produces == "labels":
        sizes = " --clients 10"
    return f"    coterie run --strategy {method.name}{sizes}"


def figures(name, title):
    """Tables of papers, with the rows of this method only: of its setting, or with its title as name."""
    for path in sorted(RESULTS.glob("*.json")):
        document = json.loads(path.read_text())
        default = document.get("set", {}).get("strategy")
        rows = [
            row
            for row in document["rows"]
            if row.get("set", {}).get("strategy", default) == name or row["name"].startswith(title)
        ]
        if rows:
            made = f"`{document['command']}`, seeds {', '.join(map(str, document['seeds']))}"
            yield f"### {document['source']}: {document['title']}\n\n{made}\n\n{markdown({**document, 'rows': rows})}"
