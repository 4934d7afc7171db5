"""One-line mutations that break a guarantee, and the test that catches each: tests/mutations.txt.

``python -m tests.mutations [WORD ...]`` applies them one by one (those whose name or file has all the words) to a copy
of the working tree, runs the named test there, and reports which are killed. It exits with 1 when one survives. A test
of the suite keeps the list in step with the code (tests/test_mutations.py).

In the list, ``@`` names a file and the file of its tests; then follow mutations: a name, the old text (``-``), the new
one (``+``), and the test (``>``). An old text that ends with an empty line ends with a line break.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
_COPIED = ("coterie", "tests", "benchmarks", "pyproject.toml", "README.md", "docs")


@dataclass(frozen=True)
class Mutation:
    """A text of ``file``, what replaces it, and the test that must fail then."""

    name: str
    file: str
    old: str
    new: str
    test: str


def read(text: str) -> Iterator[Mutation]:
    """Yield the mutations of a list."""
    name, old, new = "", [], []
    for line in text.splitlines():
        if line.startswith("@ "):
            file, tests = line[2:].split()
        elif line.startswith("-"):
            old.append(line[1:])
        elif line.startswith("+"):
            new.append(line[1:])
        elif line.startswith("> "):
            yield Mutation(name, file, "\n".join(old), "\n".join(new), f"{tests}::{line[2:]}")
        elif line:
            name, old, new = line, [], []


MUTATIONS = list(read((Path(__file__).parent / "mutations.txt").read_text()))


def survives(mutation: Mutation) -> bool:
    """Whether the named test passes in a copy of the tree with this mutation.

    Raises:
        RuntimeError: the test cannot be run.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name in _COPIED:
            source = ROOT / name
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, Path(folder, name))
        file = Path(folder, mutation.file)
        file.write_text(file.read_text().replace(mutation.old, mutation.new))
        environment = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", mutation.test]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):  # pytest's status for tests that failed is 1
        raise RuntimeError(f"{mutation.test} cannot be run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 0


def main(words: list[str]) -> int:
    """Number of mutations that survive."""
    survivors = 0
    for mutation in MUTATIONS:
        if all(word in f"{mutation.name} {mutation.file}" for word in words):
            alive = survives(mutation)
            survivors += alive
            print(f"{'SURVIVES' if alive else 'killed':8} {mutation.name:60} {mutation.test}", flush=True)
    print(f"{survivors} survive")
    return survivors


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
