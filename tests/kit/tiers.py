"""The tiers of tests: `make test` leaves out what is marked slow."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def mark_slow(cases: Iterable[Any], slow: Collection[Any]) -> list[Any]:
    """Return the cases of a parametrized test, with a mark on those that are in ``slow``."""
    return [pytest.param(*_values(case), marks=pytest.mark.slow) if case in slow else case for case in cases]


def _values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)
