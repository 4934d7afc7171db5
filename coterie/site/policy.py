"""What the owner of a client's data consents to: a TOML file beside the budget.

    submitters = ["alice"]             # who may start runs: names of the roster
    strategies = ["fedavg", "ifca"]    # methods, as the server names them
    releases = ["updates"]             # what replies may hold
    epsilon-per-run = 2.0              # of the client's budget
    epsilon-per-month = 4.0            # in any 30 days

A key that is left out allows everything. The client refuses all other requests before it reads its data.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from coterie.fields import EPSILON, Fields, Length, OneOf
from coterie.files import FileError, read_text
from coterie.site.errors import DeployError

#: What a reply can hold: trained updates, masked ones of which the server learns noisy sums, losses of received models,
#: samples of a GAN, centroids of records, counts of labels, exact scores, histograms of scores of records, which the
#: server or the client makes noisy, and both masked, of which the server learns noisy sums.
RELEASES = (
    "updates",
    "masked updates",
    "losses",
    "samples",
    "centroids",
    "counts",
    "scores",
    "histograms",
    "masked scores",
)
DAYS_OF_MONTH = 30


@dataclass(frozen=True, kw_only=True)
class Policy(Fields):
    """What a client's owner allows.

    Attributes:
        submitters: names of those who may start runs, by a signed request (:mod:`coterie.site.run_request`); None:
            anybody, without one.
        strategies: names of methods; None: any.
        releases: names in :data:`RELEASES`; None: all.
        epsilon_per_run: largest epsilon of the charges of one run; None: the budget alone limits it.
        epsilon_per_month: the same, of all charges in 30 days.

    Raises:
        DeployError: a value is out of bounds.
    """

    error = DeployError

    submitters: Annotated[tuple[str, ...] | None, Length(1000)] = None
    strategies: Annotated[tuple[str, ...] | None, Length(1000)] = None
    releases: Annotated[tuple[str, ...] | None, OneOf(RELEASES)] = None
    epsilon_per_run: Annotated[float | None, EPSILON] = None
    epsilon_per_month: Annotated[float | None, EPSILON] = None

    def __post_init__(self) -> None:
        self.to_record()

    @classmethod
    def read(cls, path: Path) -> Policy:
        """Read a policy.

        Raises:
            DeployError: the file cannot be read, has a key that no policy has, or a value that is not allowed.
        """
        try:
            values = tomllib.loads(read_text(path))
            unknown = sorted(values.keys() - cls.keys())
            if unknown:
                raise DeployError(f"unknown key {', '.join(unknown)}; allowed are {', '.join(sorted(cls.keys()))}")
            return cls.from_record(values)
        except FileError as error:
            raise DeployError(f"policy: {error}") from None
        except tomllib.TOMLDecodeError as error:
            raise DeployError(f"policy {path}: not valid TOML: {error}") from None
        except DeployError as error:
            raise DeployError(f"policy {path}: {error}") from None

    @property
    def limits_epsilon(self) -> bool:
        """Whether there is a limit that needs a budget, whose delta it shares."""
        return self.epsilon_per_run is not None or self.epsilon_per_month is not None

    def refuses(self, strategy: str | None, releases: Iterable[str]) -> str:
        """Return why a request is refused; empty if it is allowed.

        Args:
            strategy: the method, as the server names it.
            releases: what the reply would hold.
        """
        if self.strategies is not None and strategy not in self.strategies:
            asked = "no strategy is named" if strategy is None else f"strategy {strategy!r} is not allowed"
            return f"{asked}; allowed are {', '.join(self.strategies) or 'none'}"
        return next(filter(None, map(self.refuses_release, releases)), "")

    def refuses_release(self, release: str) -> str:
        """Return why a release is refused; empty if it is allowed."""
        if self.releases is None or release in self.releases:
            return ""
        return f"the release of {release} is not allowed; allowed are {', '.join(self.releases) or 'none'}"

    def __str__(self) -> str:
        shown: dict[str, Any] = {
            name: ", ".join(value) or "none" if isinstance(value, list) else f"{value:g}"
            for name, value in self.to_record().items()
        }
        return "; ".join(f"{name} {value}" for name, value in shown.items()) or "allows everything"
