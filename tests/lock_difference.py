"""``python -m tests.lock_difference BASE OTHER``: the entries of a lock file that another one lacks."""

import re
import sys
from pathlib import Path


def entries(path):
    """Entries of a lock file, with their hashes."""
    return re.split(r"\n(?=[a-z0-9])", Path(path).read_text().rstrip("\n"))


def difference(base, other):
    """The entries of ``other`` whose package has another version in ``base``, or is not there."""
    pinned = {entry.split(" ")[0] for entry in entries(base)}
    return [entry for entry in entries(other) if not entry.startswith("#") and entry.split(" ")[0] not in pinned]


if __name__ == "__main__":
    print("\n".join(difference(*sys.argv[1:])))
