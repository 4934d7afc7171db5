"""What a conformance test finds."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Failure:
    """An item of a contract that is not met.

    Attributes:
        item: name of the item.
        problem: what was observed.
        solution: what to change.
    """

    item: str
    problem: str
    solution: str

    def __str__(self) -> str:
        return f"{self.item}: {self.problem}. {self.solution}"


class ConformanceError(AssertionError):
    """A strategy or a ClientApp does not meet its contract.

    Attributes:
        failures: every item that is not met, with the observation and the solution.
    """

    def __init__(self, subject: str, failures: Collection[Failure]) -> None:
        self.failures = tuple(failures)
        lines = "\n".join(f"- {failure}" for failure in self.failures)
        super().__init__(f"{subject} does not meet {len(self.failures)} item(s) of its contract:\n{lines}")


class Report:
    """Collects failures.

    Args:
        subject: name of what is tested.
        items: names of all items.
        skip: items that are not tested.

    Raises:
        ValueError: an item to skip does not exist.
    """

    def __init__(self, subject: str, items: Collection[str], skip: Collection[str]) -> None:
        if unknown := sorted(set(skip) - set(items)):
            raise ValueError(f"skip = {', '.join(unknown)}: must be some of {', '.join(items)}")
        self._subject, self._items, self._skip = subject, items, frozenset(skip)
        self._failures: dict[tuple[str, str], Failure] = {}

    @property
    def failed(self) -> bool:
        """Whether there is a failure."""
        return bool(self._failures)

    def tests(self, item: str) -> bool:
        """Whether an item is tested."""
        assert item in self._items, item
        return item not in self._skip

    def fail(self, item: str, problem: str, solution: str) -> None:
        """Add a failure, unless the item is skipped."""
        if self.tests(item):
            self._failures.setdefault((item, solution), Failure(item, problem, solution))

    def require(self, met: bool, item: str, problem: str, solution: str) -> bool:
        """Add a failure unless ``met``; return ``met``."""
        if not met:
            self.fail(item, problem, solution)
        return met

    @contextmanager
    def guarded(self, item: str, what: str, solution: str) -> Iterator[None]:
        """Turn an exception into a failure."""
        try:
            yield
        except Exception as error:
            self.fail(item, f"{what} raises {type(error).__name__}: {error}", solution)

    def finish(self) -> None:
        """Raise all failures.

        Raises:
            ConformanceError: there are some.
        """
        if self._failures:
            raise ConformanceError(self._subject, self._failures.values())
