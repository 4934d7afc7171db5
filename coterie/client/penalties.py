"""Penalties on how far a client's model moves from its start, by the name that a request carries.

A penalty adds a term to the local loss that does not depend on data. A function here is its gradient: it maps the
trained and the initial values of a parameter, of any shape, to a tensor of that shape, element by element. Under
record-level privacy it is post-processing of the noisy steps before, and costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from coterie.wire import RequestError, TrainRequest


def proximal(value: Tensor, start: Tensor) -> Tensor:
    """1/2 ||w - w^t||^2 (FedProx; Li et al. 2020, Algorithm 2)."""
    return value - start


#: Gradients of all penalties.
PENALTIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"proximal": proximal}


@dataclass(frozen=True)
class Penalty:
    """A penalty and its weight.

    Attributes:
        name: a key of :data:`PENALTIES`.
        weight: at least 0; 0 turns it off.
    """

    name: str = "proximal"
    weight: float = 0.0

    @classmethod
    def of(cls, request: TrainRequest) -> Penalty:
        """The penalty of a request.

        Raises:
            RequestError: its name is unknown.
        """
        if request.penalty is None or request.penalty_weight is None:
            return cls()
        if request.penalty not in PENALTIES:
            raise RequestError(f"penalty is {request.penalty!r}; expected one of {', '.join(PENALTIES)}")
        return cls(request.penalty, request.penalty_weight)

    def gradient(self, value: Tensor, start: Tensor) -> Tensor:
        """The weighted gradient."""
        return self.weight * PENALTIES[self.name](value, start)


NO_PENALTY = Penalty()
