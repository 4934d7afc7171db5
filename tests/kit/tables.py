"""One test of a whole table: refusals, bounds and other pure functions, each row with what is expected."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

Test = Callable[..., None]


def for_rows(names: str | tuple[str, ...], rows: Iterable[Any], ids: object = None) -> Callable[[Test], Test]:
    """Run a test once for all rows, and report every row that fails.

    It stands for ``pytest.mark.parametrize`` where a row needs no fixture of its own: as an item each, such rows take
    more time than what they check. Of several tables, all combinations are run.

    Args:
        names: arguments of the test, separated by commas.
        rows: values of the arguments; of one argument, its value.
        ids: for the reader alone, as in ``parametrize``.
    """
    keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    rows = list(rows)
    assert rows, "a table has rows"

    def of_all(test: Test) -> Test:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            failures = []
            for row in rows:
                values = dict(zip(keys, row if len(keys) > 1 else [row], strict=True))
                try:
                    test(**values, **fixtures)
                except (Exception, pytest.fail.Exception) as failure:
                    failure.add_note(f"in the row {values}")
                    failures.append(failure)
            if failures:
                raise BaseExceptionGroup(f"{len(failures)} of {len(rows)} rows", failures)

        signature = inspect.signature(test)
        rest = [parameter for name, parameter in signature.parameters.items() if name not in keys]
        run.__signature__ = signature.replace(parameters=rest)  # fixtures alone
        return run

    return of_all
