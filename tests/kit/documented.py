"""Commands that a page of the documentation shows, in order."""

import difflib
import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def blocks(text):
    """Indented blocks of code, without the indentation."""
    for block in re.findall(r"(?:^|\n\n)((?: {4}.*(?:\n|$)|\n(?= {4}))+)", text):
        yield re.sub(r"^ {4}", "", block, flags=re.MULTILINE)


def commands_of(page):
    """Commands of all blocks; a command goes on after a backslash, and up to the end of a here-document."""
    found = []
    for block in blocks(Path(page).read_text()):
        lines = iter(block.splitlines())
        for line in lines:
            command = line
            while command.endswith("\\"):
                command += "\n" + next(lines)
            if end := re.search(r"<<'?(\w+)'?", command):
                for line in lines:
                    command += "\n" + line
                    if line == end[1]:
                        break
            if command.strip():
                found.append(command)
    return found


def app_difference(example, before, after):
    """Unified diff of the two apps of an example, each in a folder of its own."""
    lines = []
    for name in ("client_app.py", "server_app.py"):
        old, new = ((example / room / name).read_text().splitlines() for room in (before, after))
        lines += difflib.unified_diff(old, new, f"{before}/{name}", f"{after}/{name}", lineterm="", n=0)
    return lines


def hook(name):
    """A module of docs/hooks, which make pages of the site."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "hooks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
