"""Local: every client trains alone; what a method that shares models is worth is its distance from this.

The column "Local" of LCFL's Tables II and III (papers/lcfl), and the reference of every personalised method.

    client j
     1  W_j <- initialise the network
     2  in every round: W_j <- SGD on W_j, several epochs
     3      keep W_j; send nothing

Details
- All networks start from the same public values; that of a client that never took part keeps them.
- A round is one of the other methods': the same number of local epochs, so that equal rounds are equal work.
- The network is the client's own state, in its own file. A round that a crash cut short is trained again by those
  clients which had finished it, from where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from coterie.strategies.fedavg import FedAvg
from coterie.strategies.method import Parameters


class Local(FedAvg):
    """FedPer in the limit: all layers are personal, and messages hold no parameter, either way."""

    name: ClassVar[str] = "local"
    title: ClassVar[str] = "every client alone, a reference"
    paper: ClassVar[str] = "-"
    row_wise: ClassVar[bool] = True
    memory: ClassVar[bool] = True
    units: ClassVar[tuple[str, ...]] = ("none",)
    robust: ClassVar[bool] = False  # nothing travels

    def initial_parameters(self, draw: Callable[[], Parameters]) -> Parameters:
        """Line 3: nothing travels."""
        return {}
