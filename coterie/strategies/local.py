"""Local: every client trains alone, as a reference for methods that share models.

The column "Local" of LCFL's Tables II and III (papers/lcfl), and the reference of every personalised method.

    client j
     1  W_j <- initialise the network
     2  in every round: W_j <- SGD on W_j, several epochs
     3      keep W_j; send nothing

Details
- All networks start from the same public values, which a client that has not participated keeps.
- A round has the same number of local epochs as with other methods, so that equal rounds mean equal computation.
- In the last quarter of the rounds the step size is a tenth: see models/personalization.py.
- The network is part of the client's state file. If a crash interrupts a round, clients that had finished it train it
  again, from their current state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from coterie.models.personalization import SMALL_STEP, small_steps
from coterie.strategies.fedavg import FedAvg
from coterie.strategies.method import Parameters


class Local(FedAvg):
    """FedPer with personal layers only: messages contain no parameters."""

    name: ClassVar[str] = "local"
    title: ClassVar[str] = "every client trains alone; a reference"
    paper: ClassVar[str] = "-"
    row_wise: ClassVar[bool] = True
    memory: ClassVar[bool] = True
    units: ClassVar[tuple[str, ...]] = ("none",)
    robust: ClassVar[bool] = False  # no updates are sent

    def step_size(self, number: int) -> float:
        """Line 2, with small last steps."""
        small = number > self.plan.rounds - small_steps(self.plan.rounds)
        return super().step_size(number) * (SMALL_STEP if small else 1.0)

    def initial_parameters(self, draw: Callable[[], Parameters]) -> Parameters:
        """Line 3: no parameters are sent."""
        return {}
