"""What all rooms rely on: a table reports every row that fails, and says which."""

import inspect

import pytest
from kit.tables import for_rows


def test_every_row_that_fails_is_reported():
    @for_rows(("x", "y"), [(1, 1), (1, 2), (2, 1), (3, 3)])
    def check(x, y, fixture):
        assert x == y, fixture

    assert list(inspect.signature(check).parameters) == ["fixture"]
    with pytest.raises(ExceptionGroup, match="2 of 4 rows") as caught:
        check(fixture="text")
    assert [error.__notes__ for error in caught.value.exceptions] == [
        ["in the row {'x': 1, 'y': 2}"],
        ["in the row {'x': 2, 'y': 1}"],
    ]


def test_all_combinations_of_two_tables_are_run():
    seen = []

    @for_rows("x", [1, 2])
    @for_rows("y", ["a", "b"])
    def note(x, y):
        seen.append((x, y))

    note()
    assert seen == [(1, "a"), (1, "b"), (2, "a"), (2, "b")]


def test_what_fails_to_raise_is_reported_too():
    @for_rows("x", [0, 1])
    def check(x):
        with pytest.raises(ZeroDivisionError):
            _ = 1 / x

    with pytest.raises(BaseExceptionGroup, match="1 of 2 rows"):
        check()


def test_a_table_has_rows():
    with pytest.raises(AssertionError, match="rows"):
        for_rows("x", [])
