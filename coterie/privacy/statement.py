"""What a certificate needs to know of a plan, at client level and at record level."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Protocol, Self

import numpy as np
import numpy.typing as npt

from coterie.fields import BETWEEN, RATE, ROUNDS, Bounded, Bounds
from coterie.privacy.accountants import MAX_NOISE, Event, PrivacyError
from coterie.privacy.accounting import Budget, epsilon
from coterie.privacy.noise import NoiseSplit
from coterie.privacy.preconditions import Precondition

NO_EVENTS: Mapping[Event, int] = MappingProxyType({})


@dataclass(frozen=True)
class Statement:
    """What a certificate states of a plan in words.

    Attributes:
        covers: the values to which epsilon applies.
        preconditions: those of the theorem behind the guarantee.
        reasons: why runs of the plan are never certified; empty if they may be.
    """

    covers: tuple[str, ...]
    preconditions: tuple[Precondition, ...]
    reasons: tuple[str, ...] = ()

    @property
    def outside(self) -> tuple[str, ...]:
        """What the guarantee does not hide: the preconditions that nothing enforces."""
        return tuple(precondition.outside for precondition in self.preconditions if precondition.outside)


@dataclass(frozen=True, kw_only=True)
class ReleaseSpec:
    """Information about a client's records that one reply releases.

    Attributes:
        losses: number of models whose losses are released, without training; 0: the client trains.
        first_batch: whether the client trains with the batches and the noise of round 1.
        choice: whether the client chooses a cluster by loss.
        histogram: whether a histogram of scores of held-out records is released, and nothing of training records.
    """

    losses: int = 0
    first_batch: bool = False
    choice: bool = False
    histogram: bool = False


class PricedRequest(Protocol):
    """A request whose cost a plan computes."""

    @property
    def round(self) -> int:
        """Number of the round, from 1."""

    @property
    def release_spec(self) -> ReleaseSpec | None:
        """Released information; None: no plan covers the reply."""


class Pricing(Protocol):
    """Basis of the charges of a server or a client: the plan of a run, or of one client."""

    def charges(self, request: PricedRequest, cohort: npt.NDArray[np.int64] | None = None) -> Counter[Event]:
        """Events of the replies of ``cohort`` to ``request``; None: of any cohort."""


@dataclass(frozen=True, kw_only=True)
class Guarantee(Bounded, ABC):
    """Public numbers of a guarantee, which are fixed before a run, for the server (:class:`Plan`) or one client.

    Attributes:
        rounds: T, or E, the number of rounds in which a client takes part.
        epsilon: the budget; inf without privacy.
        delta: of the guarantee.
        noise_multiplier: of a round, or of all but the first; 0 without privacy.
        clip_norm: C, L2 bound of one client's update; at record level c, of one record's gradient.
        clip_share: share of the noise (:class:`NoiseSplit`) for the number of updates (gradients) shorter than a
            threshold, which an adaptive clipping norm follows; 0: it is not released, and the norm is fixed.
        clip_factor: the clipping norm over that threshold, in (0, 1].
        accountant: name of the accountant of the budget; a key of :data:`~coterie.privacy.accounting.ACCOUNTANTS`.
    """

    error = PrivacyError

    rounds: Annotated[int, ROUNDS]
    epsilon: float
    delta: Annotated[float, BETWEEN]
    noise_multiplier: Annotated[float, Bounds(0, MAX_NOISE)]
    clip_norm: float
    clip_share: float = 0.0
    clip_factor: Annotated[float, RATE] = 1.0
    accountant: str = "pld"

    #: Name in configurations and certificates.
    mechanism: ClassVar[str]
    unit: ClassVar[str]
    adjacency: ClassVar[str]
    sampler: ClassVar[str]
    #: Accountants that are valid for this mechanism (for `paper`: those used in the paper).
    accountants: ClassVar[tuple[str, ...]] = ("pld", "rdp")

    def terms(self) -> dict[str, Any]:
        """Return all parameters, JSON-ready (None stands for infinity)."""
        numbers = {name: None if value == math.inf else value for name, value in asdict(self).items()}
        return {"mechanism": self.mechanism, **numbers}

    @property
    def private(self) -> bool:
        """Whether this plan gives a guarantee."""
        return self.unit != "none"

    @property
    def budget(self) -> Budget:
        """The budget, by the plan's accountant."""
        return Budget(self.epsilon, self.delta, self.accountant)

    @property
    def norm_threshold(self) -> float:
        """The clipping norm / clip_factor, with which norms of updates (gradients) are compared."""
        return self.clip_norm / self.clip_factor

    @property
    def split(self) -> NoiseSplit:
        """How the noise of a round divides between what it releases."""
        return NoiseSplit(self.noise_multiplier, 0.0, self.clip_share)

    @property
    @abstractmethod
    def units(self) -> int:
        """The number of clients, or of a client's records."""

    @abstractmethod
    def planned(self) -> Counter[Event]:
        """All events of the run."""

    @abstractmethod
    def charges(self, request: PricedRequest, cohort: npt.NDArray[np.int64] | None = None) -> Counter[Event]:
        """Events of releasing the replies to ``request``.

        Args:
            request: the request.
            cohort: (m,) its recipients. The events may depend on public groups of clients, but not on secret sampling.

        Raises:
            PrivacyError: the plan does not cover the reply.
        """

    @abstractmethod
    def expected(
        self, charges: Sequence[Mapping[str, Any]], plan: Self, earlier: Mapping[Event, int] = NO_EVENTS
    ) -> Counter[Event]:
        """Return the most events of a client with this plan: charged and remaining planned ones.

        Args:
            charges: lines of the run's ledger.
            plan: the plan under which they were charged: this one, or that of the client with the largest budget.
            earlier: events of an earlier run on the same clients, which the budget covers too; client level only.
        """

    @property
    @abstractmethod
    def statement(self) -> Statement:
        """For the certificate."""

    def extended(self, terms: Mapping[str, float]) -> Self:
        """Return this plan with more rounds or evaluations, as the charges of a continued run state them."""
        return replace(self, **{name: max(getattr(self, name), value) for name, value in terms.items()})

    def slot(self, number: int) -> int | None:
        """Return the slot of clients that contributes to round ``number``, from 1; None: all may."""
        return None

    def noises(self) -> dict[str, float | None]:
        """Return derived noise multipliers that the certificate states."""
        return {}

    def cost(self, accountant: str | None = None) -> float:
        """Epsilon of the whole run."""
        return epsilon(self.planned(), self.delta, accountant or self.accountant)
