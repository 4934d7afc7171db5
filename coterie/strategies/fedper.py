"""FedPer: a global body, and a private head at every client.

M. G. Arivazhagan, V. Aggarwal, A. K. Singh, S. Choudhary: Federated Learning with Personalization Layers,
arXiv:1912.00818, Algorithms 1 and 2. A baseline of RR-Cluster (papers/rr_cluster, Tables 6 to 8).

    client j
     1  W_P_j <- initialise the personal layers
     2  in every round: receive the base layers W_B
     3      W_B_j, W_P_j <- SGD on (W_B, W_P_j), several epochs
     4      keep W_P_j; send W_B_j
    server
     5  W_B <- initialise the base layers
     6  in every round: send W_B; receive the W_B_j; W_B <- their mean

Deviations from the paper
- Clients are sampled at random with equal weights and send updates instead of base layers (see fedavg.py).
- All heads start from the same public values, which match the initial base layers.
- A client that has not participated is evaluated with the head of line 1.

A client's update depends on its head, which depends on the rounds in which the client participated. The proof of
``joint`` covers this, that of ``rr-slot`` does not (docs/privacy.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from coterie.rounds.run_state import StrategyError
from coterie.strategies.fedavg import FedAvg
from coterie.strategies.method import Parameters


class FedPer(FedAvg):
    """One global body; the last layer with parameters stays at the client, in its state file.

    ``initial_arrays`` of ``start`` hold the base layers only: clients add their personal layers.
    """

    name: ClassVar[str] = "fedper"
    title: ClassVar[str] = "one global body, a private head at every client"
    paper: ClassVar[str] = "Arivazhagan et al. 2019"
    row_wise: ClassVar[bool] = True
    memory: ClassVar[bool] = True
    units: ClassVar[tuple[str, ...]] = ("client", "none")

    def initial_parameters(self, draw: Callable[[], Parameters]) -> Parameters:
        """Line 5: the base layers.

        Raises:
            StrategyError: no layer would be personal, or none shared.
        """
        whole = draw()
        *shared, personal = dict.fromkeys(name.rpartition(".")[0] for name in whole)
        if not shared:
            raise StrategyError(f"the last layer is personal, but the network has only {personal}; use another one")
        return {name: values for name, values in whole.items() if name.rpartition(".")[0] in shared}
