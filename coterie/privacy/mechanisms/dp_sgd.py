"""Record-level privacy without a trusted party: each client trains by DP-SGD and keeps its own ledger.

What reaches the server is private already, so the server may look at every update and may weigh, cluster and add
up as it likes. It plans for all clients (their numbers of records, batches and budgets are public), asks, and
believes nothing: an update longer than clipping and noise allow is dropped, and weights come from the plan.

The run's ledger is that of a client with the largest budget. Its first line holds the plans of all clients, so that the
certificate can state the epsilon of each of them. What a client really spent is in its own ledger, which it writes
before it replies (client/budget.py).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from coterie.privacy.accountants import Event, PrivacyError
from coterie.privacy.ledger import Ledger
from coterie.privacy.plan import Collected, Contributions, IntArray, MechanismOutput, Plan
from coterie.privacy.randomness import FloatArray
from coterie.privacy.record import Priced, RecordPlan

#: How clients of one cluster are weighed: by the public numbers of their records, or all alike.
WEIGHTS = ("examples", "equal")


class Weighted(Contributions):
    """Sums of w_i times the update, and of w_i, by label; w_i is public."""

    def __init__(self, plan: RecordLevel, size: int) -> None:
        super().__init__(plan, size)
        self.weights = plan.weight_of_clients()
        self.sums = np.zeros((plan.num_clusters, size))
        self.totals = np.zeros(plan.num_clusters)

    def add(self, slot: int, label: Any, redrawn_label: Any, update: npt.ArrayLike) -> None:
        """All clients take part, so a slot is a client."""
        self.sums[label] += self.weights[slot] * np.asarray(update, np.float64)
        self.totals[label] += self.weights[slot]


@dataclass(frozen=True, kw_only=True)
class RecordLevel(Plan):
    """The server's view of clients that run DP-SGD. Build it with :meth:`of`.

    Attributes:
        of_clients: the plans of clients 0, 1, ...; the others have them in turn.
        weights: one of :data:`WEIGHTS`.
    """

    of_clients: tuple[RecordPlan, ...]
    weights: str = "examples"

    mechanism: ClassVar[str] = RecordPlan.mechanism
    title: ClassVar[str] = "DP-SGD at every client, without a trusted party"
    unit: ClassVar[str] = RecordPlan.unit
    adjacency: ClassVar[str] = RecordPlan.adjacency
    sampler: ClassVar[str] = RecordPlan.sampler
    accountants: ClassVar[tuple[str, ...]] = ("pld", "rdp", "opacus-rdp", "opacus-prv")
    clients_account: ClassVar[bool] = True

    @classmethod
    def of(cls, plans: tuple[RecordPlan, ...], *, clients: int, num_clusters: int, weights: str) -> RecordLevel:
        """The plan of a server for clients that have these plans in turn.

        Raises:
            PrivacyError: numbers that do not fit together.
        """
        if weights not in WEIGHTS:
            raise PrivacyError(f"weights must be {' or '.join(WEIGHTS)}, not {weights!r}")
        worst = _largest(plans[:clients])
        return cls(
            clients=clients,
            num_clusters=num_clusters,
            sampling_rate=1.0,
            rounds=worst.rounds,
            clip_norm=worst.clip_norm,
            epsilon=worst.epsilon,
            delta=worst.delta,
            noise_multiplier=worst.noise_multiplier,
            accountant=worst.accountant,
            of_clients=plans,
            weights=weights,
        )

    @property
    def worst(self) -> RecordPlan:
        """The plan with the largest budget, by which the run's ledger counts."""
        return _largest(self.of_clients[: self.clients])

    def of_client(self, client: int) -> RecordPlan:
        """One client's plan."""
        return self.of_clients[client % len(self.of_clients)]

    def weight_of_clients(self) -> FloatArray:
        """(M,) w_i."""
        if self.weights == "equal":
            return np.ones(self.clients)
        return np.array([float(self.of_client(client).num_examples) for client in range(self.clients)])

    def ledger(self, path: Path | None = None, **about: Any) -> Ledger:
        """The ledger of a client with the largest budget; its first line holds the public plans of all clients."""
        worst = self.worst
        profiles = [
            {"clients": len(range(place, self.clients, len(self.of_clients))), "plan": plan.terms()}
            for place, plan in enumerate(self.of_clients[: self.clients])
        ]
        shared = {"clients": self.clients, "num_clusters": self.num_clusters, "weights": self.weights}
        public = {**about.pop("public", {}), **shared}
        header = {"plan": worst.terms(), "profiles": profiles, "public": public, **about}
        return Ledger(worst.delta, worst.epsilon, path, worst.accountant, header)

    @property
    def record_plans(self) -> str:
        """The terms of every client's plan, as JSON."""
        terms = [{k: v for k, v in plan.terms().items() if k != "mechanism"} for plan in self.of_clients]
        return json.dumps(terms)

    def charges(self, request: Priced, cohort: IntArray | None = None) -> Counter[Event]:
        """What a request costs a client with the largest budget that takes part from the start."""
        return self.worst.charges(request)

    def max_update_norm(self, client: int, size: int, lr: float, first: bool) -> float:
        """See :meth:`RecordPlan.max_update_norm`."""
        return self.of_client(client).max_update_norm(size, lr, first=first)

    def sample(self, rng: np.random.Generator) -> IntArray:
        """All clients, in every round."""
        return np.arange(self.clients)

    def contributions(self, size: int, draws: int = 1, shared: int = 0) -> Weighted:
        """Weighted sums on arrival."""
        return Weighted(self, size)

    def collected(self, size: int, cohort: IntArray) -> Collected:
        """Every update by itself: it was private when it left the client."""
        return Collected(self, size, cohort, self.weight_of_clients()[cohort])

    def releases(self) -> Collection[Event | None]:
        """Steps of any round, choices, losses, and what clients that came late pay by themselves."""
        worst = self.worst
        paid = {event for first in (True, False) for event in worst.part(first=first, chooses=True)}
        sizes = range(1, worst.models_per_message + 1) if worst.compared else ()
        return {None} | paid | {event for models in sizes for event in worst.losses(models)}

    def perturb(
        self,
        contributions: Weighted,
        noise: np.random.Generator,
        coins: np.random.Generator,
        redraw: FloatArray,
        state: object | None = None,
    ) -> MechanismOutput:
        """The clients drew the noise; what they sent is divided by the weights of those who sent it."""
        totals = contributions.totals
        return MechanismOutput(contributions.sums[None], None, np.where(totals > 0, totals, 1.0)[None])

    def reasons(self) -> list[str]:
        """Why runs are never certified, if they are not."""
        return self.worst.reasons()


def _largest(plans: tuple[RecordPlan, ...]) -> RecordPlan:
    return max(plans, key=lambda plan: plan.epsilon)
