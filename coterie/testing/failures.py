"""What a conformance test finds."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
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
    """Collects the first failure of every item.

    Args:
        subject: name of what is tested.
        items: solution of every item.
        skip: items that are not tested.

    Raises:
        ValueError: an item to skip does not exist.
    """

    def __init__(self, subject: str, items: Mapping[str, str], skip: Collection[str]) -> None:
        if unknown := sorted(set(skip) - set(items)):
            raise ValueError(f"skip = {', '.join(unknown)}: must be some of {', '.join(items)}")
        self._subject, self._items, self._skip = subject, items, skip
        self.failures: dict[str, Failure] = {}

    def require(self, met: bool, item: str, problem: str) -> bool:
        """Add a failure unless ``met`` or the item is skipped; return ``met``."""
        if not met and item not in self._skip:
            self.failures.setdefault(item, Failure(item, problem, self._items[item]))
        return met

    @contextmanager
    def guarded(self, item: str, what: str) -> Iterator[None]:
        """Turn an exception into a failure."""
        try:
            yield
        except Exception as error:
            self.require(False, item, f"{what} raises {type(error).__name__}: {error}")

    def finish(self) -> None:
        """Raise :class:`ConformanceError` with all failures, if there are some."""
        if self.failures:
            raise ConformanceError(self._subject, self.failures.values())
