"""Record-level privacy without a trusted party: each client trains by DP-SGD and keeps its own ledger.

Updates are private before they reach the server, which may read, weight, cluster and sum them in any way. The server
plans for all clients, whose numbers of records, batch sizes and budgets are public, and validates replies: it drops
updates whose norm exceeds what clipping and noise allow, and takes weights from the plan.

The run's ledger is that of a client with the largest budget. Its first line contains the plans of all clients, so that
the certificate can state the epsilon of each. The actual spending of a client is in its own ledger, which it writes
before it replies (client/budget.py).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Unpack

import numpy as np
import numpy.typing as npt

from coterie.fields import OneOf
from coterie.privacy.accountants import Event
from coterie.privacy.clipping import clip
from coterie.privacy.contributions import Collected, Contributions
from coterie.privacy.ledger import Ledger, Permit
from coterie.privacy.plan import FOR_HISTOGRAM, Plan
from coterie.privacy.randomness import FloatArray, Streams
from coterie.privacy.record import RecordPlan
from coterie.privacy.releases import IntArray, MechanismOutput
from coterie.privacy.schedule import LedgerHeader
from coterie.privacy.score_histograms import BINS, CELLS, ScoreHistogram, deviation_of_client, finite_counts
from coterie.privacy.statement import PricedRequest, Statement

#: Weights of the clients of a cluster: their public numbers of records, or equal.
WEIGHTS = ("examples", "equal")


class Weighted(Contributions):
    """Sums of w_i times the update, and of w_i, by label, with public weights w_i."""

    def __init__(self, size: int, num_clusters: int, weights: FloatArray) -> None:
        super().__init__(size)
        self.weights = weights
        self.sums = np.zeros((num_clusters, size))
        self.totals = np.zeros(num_clusters)

    def add(self, slot: int, label: Any, redrawn_label: Any, update: npt.ArrayLike) -> None:
        """Add to both sums; all clients participate, so a slot is a client."""
        self.sums[label] += self.weights[slot] * np.asarray(update, np.float64)
        self.totals[label] += self.weights[slot]


@dataclass(frozen=True, kw_only=True)
class RecordLevel(Plan):  # large: what a server derives from the plans of all clients
    """The server's plan for clients that run DP-SGD. Create it with :meth:`of`.

    Attributes:
        client_plans: the plans of clients 0, 1, ..., assigned cyclically to further clients.
        weights: one of :data:`WEIGHTS`.
    """

    client_plans: tuple[RecordPlan, ...]
    weights: Annotated[str, OneOf(WEIGHTS)] = "examples"

    mechanism: ClassVar[str] = RecordPlan.mechanism
    title: ClassVar[str] = "DP-SGD at every client, without a trusted party"
    unit: ClassVar[str] = RecordPlan.unit
    adjacency: ClassVar[str] = RecordPlan.adjacency
    sampler: ClassVar[str] = RecordPlan.sampler
    accountants: ClassVar[tuple[str, ...]] = RecordPlan.accountants
    hides_clients: ClassVar[bool] = False
    clips_records: ClassVar[bool] = True
    clients_keep_ledgers: ClassVar[bool] = True
    fixed_rounds: ClassVar[str] = "at record level every client keeps the plan of the first request in its own ledger"
    adapts_clipping: ClassVar[bool] = True

    @classmethod
    def of(cls, plans: tuple[RecordPlan, ...], *, clients: int, num_clusters: int, weights: str) -> RecordLevel:
        """Create the plan of a server for clients to which these plans are assigned cyclically.

        Raises:
            PrivacyError: a parameter is invalid.
        """
        worst = _largest(plans[:clients])
        return cls(
            clients=clients,
            num_clusters=num_clusters,
            sampling_rate=1.0,
            rounds=worst.rounds,
            clip_norm=worst.clip_norm,
            clip_share=worst.clip_share,
            clip_factor=worst.clip_factor,
            epsilon=worst.epsilon,
            delta=worst.delta,
            noise_multiplier=worst.noise_multiplier,
            accountant=worst.accountant,
            client_plans=plans,
            weights=weights,
            histograms=int(worst.held_out_epsilon > 0),
        )

    @property
    def worst(self) -> RecordPlan:
        """The plan with the largest budget, which the run's ledger charges."""
        return _largest(self.client_plans[: self.clients])

    @property
    def units(self) -> int:
        """N of such a client."""
        return self.worst.num_examples

    def of_client(self, client: int) -> RecordPlan:
        """Return the plan of a client."""
        return self.client_plans[client % len(self.client_plans)]

    def with_clip_norm(self, clip_norm: float) -> RecordLevel:
        """Return this plan with another clipping norm, the same for all clients."""
        plans = tuple(replace(plan, clip_norm=clip_norm) for plan in self.client_plans)
        return replace(self, clip_norm=clip_norm, client_plans=plans)

    def weight_of_clients(self) -> FloatArray:
        """(M,) w_i."""
        if self.weights == "equal":
            return np.ones(self.clients)
        return np.array([float(self.of_client(client).num_examples) for client in range(self.clients)])

    def ledger(self, path: str | Path | None = None, **about: Unpack[LedgerHeader]) -> Ledger:
        """Create the ledger of a client with the largest budget; its first line contains the plans of all clients."""
        worst = self.worst
        profiles = [
            {"clients": len(range(index, self.clients, len(self.client_plans))), "plan": plan.terms()}
            for index, plan in enumerate(self.client_plans[: self.clients])
        ]
        shared = {"clients": self.clients, "num_clusters": self.num_clusters, "weights": self.weights}
        public = {**about.pop("public", {}), **shared}
        header = {"plan": worst.terms(), "profiles": profiles, "public": public, **about}
        return Ledger(worst.delta, worst.epsilon, path, worst.accountant, header)

    @property
    def record_plans(self) -> str:
        """The terms of every client's plan, as JSON."""
        terms = [{k: v for k, v in plan.terms().items() if k != "mechanism"} for plan in self.client_plans]
        return json.dumps(terms)

    def charges(self, request: PricedRequest, cohort: IntArray | None = None) -> Counter[Event]:
        """Events of a request for a client with the largest budget that participates from the start."""
        return self.worst.charges(request)

    def max_update_norm(self, client: int, size: int, lr: float, first: bool, optimizer: str = "sgd") -> float:
        """See :meth:`RecordPlan.max_update_norm`."""
        return self.of_client(client).max_update_norm(size, lr, first=first, optimizer=optimizer)

    def noise_walk(self, lr: float, optimizer: str = "sgd") -> float:
        """See :meth:`Plan.noise_walk`; of a cluster that has an equal share of all clients.

        A mean of updates has the noise sqrt(k sum w_i^2 s_i^2) / sum w_i in a coordinate, where s_i is that of an
        update (:meth:`RecordPlan.update_noise`). Round 1 counts as one of the others.
        """
        weights = self.weight_of_clients()
        noises = [plan.update_noise(lr, optimizer=optimizer) for plan in self.client_plans]
        noise = np.resize(noises, self.clients)  # assigned cyclically
        return math.sqrt(self.rounds * self.num_clusters) * float(np.linalg.norm(weights * noise) / np.sum(weights))

    def sample(self, rng: np.random.Generator, number: int) -> IntArray:
        """All clients, in every round."""
        return np.arange(self.clients)

    def contributions(self, size: int, draws: int = 1, shared: int = 0) -> Weighted:
        """Create weighted sums, computed on arrival."""
        return Weighted(size, self.num_clusters, self.weight_of_clients())

    def collected(self, size: int, cohort: IntArray) -> Collected:
        """Create the container for single updates, which are private when they leave the client."""
        return Collected(size, cohort, self.weight_of_clients()[cohort])

    def planned(self) -> Counter[Event]:
        """All events of such a client."""
        return self.worst.planned()

    def evaluation_events(self) -> Counter[Event]:
        """None: clients are charged for held-out records beside their events."""
        return Counter()

    def charge_histogram(self, ledger: Ledger, number: int) -> Permit:
        """Charge held-out records of a client with the largest budget."""
        return ledger.charge_held_out(number, self.worst.held_out_epsilon, **FOR_HISTOGRAM)

    def release_histogram(
        self, permit: Permit, counts: Mapping[int, Any], streams: Streams, attempt: int
    ) -> ScoreHistogram:
        """Return the sum of the counts of all clients that sent some, which have added the noise.

        The counts of a client are clipped to an L2 norm of N, its public number of training records, since it may lie.
        """
        permit.use()
        known = {client: valid for client, sent in counts.items() if (valid := finite_counts(sent)) is not None}
        noises = (deviation_of_client(sent, self.of_client(client).held_out_epsilon) for client, sent in known.items())
        deviation = math.sqrt(math.fsum(noise**2 for noise in noises))
        total = np.zeros(CELLS)
        for client, valid in known.items():
            total += clip(valid, self.of_client(client).num_examples)
        return ScoreHistogram(total.reshape(2, BINS), np.full(2, deviation))

    def pays(self, permit: Permit) -> bool:
        """Whether a permit is for steps, a selection or losses; without an event, clients alone are charged."""
        worst, event = self.worst, permit.event
        steps = {event for first in (True, False) for event in worst.part(first=first)}
        return event is None or event in steps | worst.choices_and_losses()

    def perturb(
        self,
        contributions: Weighted,
        noise: np.random.Generator,
        coins: np.random.Generator,
        redraw: FloatArray,
        state: object | None = None,
    ) -> MechanismOutput:
        """Return weighted sums, with the sums of weights as divisors; clients have added the noise."""
        totals = contributions.totals
        return MechanismOutput(contributions.sums[None], None, np.where(totals > 0, totals, 1.0)[None])

    def noise_of_sums(self, number: int) -> float:
        """Return 0: clients add noise in every step, and train on."""
        return 0.0

    def noises(self) -> dict[str, float | None]:
        """Return the noise multiplier of round 1."""
        return {"first_noise_multiplier": self.worst.noise(True)}

    @property
    def statement(self) -> Statement:
        """That of the plan with the largest budget."""
        return self.worst.statement


def _largest(plans: tuple[RecordPlan, ...]) -> RecordPlan:
    return max(plans, key=lambda plan: plan.epsilon)
