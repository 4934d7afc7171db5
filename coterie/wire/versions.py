"""Versions of Coterie and of the libraries on which a guarantee depends, as a client states them when it registers."""

from __future__ import annotations

import re
from functools import cache
from importlib import metadata
from importlib.metadata import PackageNotFoundError

from coterie import __version__

#: Libraries of a client, and the oldest versions with which this version of Coterie works.
LEAST = {"flwr": "1.39", "torch": "2.9", "opacus": "1.5.4", "dp-accounting": "0.6"}
_LONGEST = 100

version = cache(metadata.version)  # which reads files


def versions() -> str:
    """Return the versions in this environment, such as ``coterie 0.3.0, flwr 1.39.0, ...``."""
    return ", ".join(f"{name} {number}" for name, number in {"coterie": __version__, **_installed()}.items())


def incompatible() -> str:
    """Return which libraries in this environment are missing or too old, and what to do; empty if none is."""
    problems = [
        f"{name} {LEAST[name]} is needed, {number} is installed"
        for name, number in _installed().items()
        if _numbers(number) < _numbers(LEAST[name])
    ]
    if not problems:
        return ""
    least = " ".join(f"'{name}>={number}'" for name, number in LEAST.items())
    return f"{'; '.join(problems)} (for Coterie {__version__}): pip install {least}"


def stated_versions(value: object) -> str:
    """Return the versions that a client states, if it states any in this form; otherwise an empty text."""
    well = isinstance(value, str) and len(value) <= _LONGEST * len(LEAST) and re.fullmatch(r"[\w .,+-]+", value)
    return str(value) if well else ""


def _installed() -> dict[str, str]:
    return {name: _version(name) for name in LEAST}


def _version(name: str) -> str:
    try:
        return version(name)[:_LONGEST]
    except PackageNotFoundError:
        return "none"


def _numbers(number: str) -> list[int]:
    """Return the leading numbers of a version: [2, 9, 1] of 2.9.1+cu128."""
    leading = re.match(r"\d+(?:\.\d+)*", number)
    return [int(part) for part in leading[0].split(".")] if leading else []
