"""Plan of one client with record-level privacy, which trains by DP-SGD without a trusted party.

Per-sample gradients are clipped to c, their sum receives noise z c, and batches are Poisson samples. A first round with
full batches (RC-DPFL) or another batch size, private cluster selections by loss, and losses of other clients' models
(LCFL) form one heterogeneous composition:

    K steps an epoch at rate 1 (or b_1 / N), then (E - 1) K floor(N / b) steps at rate b / N, selections, losses.

If c is adaptive, a step also releases how many gradients of its batch are shorter than c / factor: a sum of numbers
from -1/2 to 1/2, one per record, as one more coordinate of the same event. With z_c on the gradients and deviation s_b
on that sum,

    1 / z^2 = 1 / z_c^2 + 1 / (2 s_b)^2,   where the second term is a share w of 1 / z^2.

Adjacency is add/remove one record. N, b, K and E are public constants.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Required, TypedDict, Unpack, get_args, get_type_hints

import numpy as np
import numpy.typing as npt

from coterie.fields import CLIP_NORM, COUNT, EPSILON, LOCAL_EPOCHS, Bounds, OneOf
from coterie.privacy.accountants import MAX_NOISE, Event, PrivacyError
from coterie.privacy.accounting import affordable, min_noise
from coterie.privacy.ledger_lines import count_events
from coterie.privacy.noise import NoiseSplit, check_noise
from coterie.privacy.preconditions import RECORDS
from coterie.privacy.selection import selection_event
from coterie.privacy.statement import NO_EVENTS, Guarantee, PricedRequest, Statement

# Limits of counts, noise and budgets, because a server that proposes a plan is not trusted.
_RELEASES, _NOISE = Bounds(0, 1_000_000), Bounds(0, 100 * MAX_NOISE, above=True)
_CLIP_SHARE = Bounds(1e-4, 0.5)
# Term of a plan that older versions lack.
_HELD_OUT = "held_out_epsilon"

#: Ways for a client to choose a cluster by its losses.
SELECTIONS = ("none", "gumbel", "exact")


class RecordNumbers(TypedDict, total=False):  # large: the arguments of every plan
    """Arguments of :meth:`RecordPlan.calibrated`; see the attributes of :class:`RecordPlan`."""

    num_examples: Required[int]
    batch_size: Required[int]
    rounds: Required[int]
    epsilon: Required[float]
    delta: Required[float]
    noise_multiplier: float
    clip_norm: float
    clip_share: float
    clip_factor: float
    first_batch_size: int | None
    first_noise_multiplier: float | None
    local_epochs: int
    selection: str
    selections: int
    selection_epsilon: float
    compared: int
    loss_noise: float
    models_per_message: int
    held_out_epsilon: float
    accountant: str


@dataclass(frozen=True, kw_only=True)
class RecordPlan(Guarantee):  # large: one field per number of a plan
    """Public parameters of one client's DP-SGD over a whole run.

    Attributes, beside those of :class:`Guarantee`:
        num_examples: N, number of the client's records.
        batch_size: b, expected batch size.
        first_batch_size: expected batch size of round 1; None for b. N means full batches.
        first_noise_multiplier: z of round 1; None for that of the other rounds.
        local_epochs: K.
        selection: selection of a cluster by loss: "none", "gumbel", or "exact" (as in the papers; not private).
        selections: number of selections.
        selection_epsilon: epsilon of each selection.
        compared: largest number of models whose losses the client releases.
        loss_noise: noise multiplier of all these losses together.
        models_per_message: number of models whose losses are released at a time.
        held_out_epsilon: epsilon, at delta 0, of a histogram of scores of held-out records, of which none is in
            training; 0: none is released.
    """

    num_examples: Annotated[int, COUNT]
    batch_size: Annotated[int, COUNT]
    noise_multiplier: Annotated[float, _NOISE]
    clip_norm: Annotated[float, CLIP_NORM] = 1.0
    clip_factor: Annotated[float, Bounds(1e-3, 1)] = 1.0
    first_batch_size: Annotated[int | None, COUNT] = None
    first_noise_multiplier: Annotated[float | None, _NOISE] = None
    local_epochs: Annotated[int, LOCAL_EPOCHS] = 1
    selection: Annotated[str, OneOf(SELECTIONS)] = "none"
    selections: Annotated[int, _RELEASES] = 0
    selection_epsilon: float = 0.02
    compared: Annotated[int, _RELEASES] = 0
    loss_noise: Annotated[float, _NOISE] = 5.0
    models_per_message: Annotated[int, Bounds(1, _RELEASES.high)] = 32
    held_out_epsilon: Annotated[float, Bounds(0, EPSILON.high)] = 0.0

    mechanism: ClassVar[str] = "dp-sgd"
    unit: ClassVar[str] = "record"
    adjacency: ClassVar[str] = "add/remove one record of one client, at a fixed public number of its records"
    sampler: ClassVar[str] = "poisson"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, batch in (("batch-size", self.batch_size), ("first-batch-size", self.first_batch_size)):
            if batch is not None and batch > self.num_examples:
                raise PrivacyError(f"{name} must be at most num-examples = {self.num_examples}, not {batch}")
        if not self.epsilon > 0:
            raise PrivacyError(f"epsilon must be positive, not {self.epsilon}")
        selection_event(self.selection_epsilon)
        if not self.held_out_epsilon <= self.epsilon:
            raise PrivacyError(
                f"held out epsilon must be at most epsilon = {self.epsilon:g}, not {self.held_out_epsilon:g}"
            )
        if self.clip_share and self.clip_share not in _CLIP_SHARE:
            raise PrivacyError(f"clip-share must be 0, or {_CLIP_SHARE.in_words}, not {self.clip_share}")
        for first in (False, True):
            check_noise([(1.0, self.noise_of_gradients(first)), (0.5, self.noise_of_norms(first))], self.noise(first))

    def terms(self) -> dict[str, Any]:
        """See :meth:`Guarantee.terms`; without a histogram as in older ledgers."""
        return {name: value for name, value in super().terms().items() if value or name != _HELD_OUT}

    @classmethod
    def from_terms(cls, terms: Any) -> RecordPlan:
        """Return the plan described by another machine: all entries of :meth:`terms` except for the mechanism.

        Raises:
            PrivacyError: a term is missing, unknown, of another type or out of range.
        """
        names = {field.name for field in fields(cls)}
        hints = {name: hint for name, hint in get_type_hints(cls).items() if name in names}
        if not isinstance(terms, dict) or terms.keys() | {_HELD_OUT} != hints.keys():
            raise PrivacyError(f"a plan must have exactly the terms {', '.join(hints)}")
        for name, hint in ((name, hints[name]) for name in terms):
            kinds = get_args(hint) or (hint,)
            if type(terms[name]) not in ((*kinds, int) if float in kinds else kinds):
                raise PrivacyError(f"{name.replace('_', ' ')} must not be {terms[name]!r:.60}")
        plan = cls(**terms)
        if not plan.epsilon <= EPSILON.high:
            raise PrivacyError(f"epsilon must be at most {EPSILON.high:g}, not {plan.epsilon}")
        return plan

    @classmethod
    def calibrated(cls, *, first_noise_ratio: float = 1.0, **numbers: Unpack[RecordNumbers]) -> RecordPlan:
        """Return the plan with the smallest noise whose total cost is at most (epsilon, delta).

        By default, one z for all rounds is calibrated. If ``first_noise_multiplier`` is given, z of the other rounds
        is calibrated; if ``noise_multiplier`` is given, z of round 1. ``first_noise_ratio`` is the ratio of the noise
        of round 1 to that of the other rounds.

        Raises:
            PrivacyError: a parameter is invalid, or no noise suffices.
        """
        return cls._calibrated(first_noise_ratio, **numbers)

    @classmethod
    @lru_cache(maxsize=512)
    def _calibrated(cls, first_noise_ratio: float, **numbers: Any) -> RecordPlan:
        free = "first_noise_multiplier" if "noise_multiplier" in numbers else "noise_multiplier"
        plan = cls(**{"noise_multiplier": 1.0, **numbers})

        def at(noise: float) -> RecordPlan:
            first: dict[str, Any] = (
                {} if first_noise_ratio == 1 else {"first_noise_multiplier": first_noise_ratio * noise}
            )
            return cls(**{**asdict(plan), **first, free: noise})

        if not 0 < first_noise_ratio < math.inf:
            raise PrivacyError(f"first noise ratio must be positive and finite, not {first_noise_ratio}")
        if not 0 < plan.epsilon < math.inf:
            raise PrivacyError(f"epsilon must be positive and finite, not {plan.epsilon}")
        # The fixed events may already exceed the budget; checking this first avoids minutes of search.
        possible = at(MAX_NOISE).cost() <= plan.epsilon
        noise = min_noise(lambda z: at(z).cost(), plan.epsilon) if possible else None
        if noise is None:
            raise PrivacyError(
                f"no {free.replace('_', ' ')} reaches epsilon {plan.epsilon:g} at delta {plan.delta:g} with the fixed "
                "events: use fewer rounds, smaller batches, or a larger epsilon or delta"
            )
        return at(noise)

    def batch(self, first: bool) -> int:
        """Expected batch size of round 1 or of later rounds."""
        return (self.first_batch_size or self.batch_size) if first else self.batch_size

    def noise(self, first: bool) -> float:
        """z of round 1 or of later rounds."""
        return (self.first_noise_multiplier or self.noise_multiplier) if first else self.noise_multiplier

    def noise_of_gradients(self, first: bool) -> float:
        """z_c, noise on the sum of gradients, in units of c."""
        return NoiseSplit(self.noise(first), 0.0, self.clip_share).updates

    def noise_of_norms(self, first: bool) -> float | None:
        """s_b, noise on the sum of numbers from -1/2 to 1/2 per record; None: it is not released."""
        return NoiseSplit(self.noise(first), 0.0, self.clip_share).norms

    def steps(self, batch_size: int) -> int:
        """Noisy gradient steps of one round."""
        return self.local_epochs * (self.num_examples // batch_size)

    @property
    def loss_deviation(self) -> float:
        """Standard deviation of the noise on one model's summed loss, in units of the bound L of a record's loss.

        A record changes the sums of m models by at most L sqrt(m) in L2 norm.
        """
        return self.loss_noise * math.sqrt(self.compared)

    def losses(self, models: int) -> Counter[Event]:
        """The event of releasing the losses of ``models`` models; all ``compared`` of them compose to the loss noise.

        Raises:
            PrivacyError: the plan does not cover losses.
        """
        if not self.compared:
            raise PrivacyError("this plan does not cover losses of other models")
        return Counter({Event(1.0, self.loss_deviation / math.sqrt(models)): 1}) if models else Counter()

    def part(self, *, first: bool = False, chooses: bool = False) -> Counter[Event]:
        """The events of one round: its steps, and the selection of a cluster by loss if it has one."""
        batch = self.batch(first)
        events = Counter({Event(batch / self.num_examples, self.noise(first)): self.steps(batch)})
        if chooses and self.selection == "gumbel":
            events[selection_event(self.selection_epsilon)] += 1
        return events

    def charges(self, request: PricedRequest, cohort: npt.NDArray[np.int64] | None = None) -> Counter[Event]:
        """The events of one reply to ``request``, independent of other recipients.

        Raises:
            PrivacyError: the plan does not cover the reply.
        """
        release_spec = request.release_spec
        if release_spec is None:
            raise PrivacyError(f"this plan does not cover replies to {type(request).__name__}")
        if release_spec.histogram:
            if not self.held_out_epsilon:
                raise PrivacyError("this plan does not cover a histogram of scores")
            return Counter()  # held-out records are charged apart: none of them is in a step
        if release_spec.losses:
            return self.losses(release_spec.losses)
        return self.part(first=release_spec.first_batch, chooses=release_spec.choice)

    def planned(self) -> Counter[Event]:
        """All events of the client in the whole run."""
        events = self.part(first=True)
        for event, count in self.part().items():
            events[event] += (self.rounds - 1) * count
        if self.selection == "gumbel" and self.selections:
            events[selection_event(self.selection_epsilon)] += self.selections
        messages, rest = divmod(self.compared, self.models_per_message)
        if messages:
            for event in self.losses(self.models_per_message):
                events[event] += messages
        if rest:
            events += self.losses(rest)
        return +events

    def max_update_norm(self, size: int, lr: float, *, first: bool = False, optimizer: str = "sgd") -> float:
        """L2 norm that an honest client's update of one round exceeds with probability below 1e-8.

        Every step changes the model by lr / b times a sum of clipped gradients and noise. The batches of a round
        contain S b records on average and, by Bernstein's inequality, at most S b + 6.5 sqrt(S b) + 14. The noise of S
        steps adds up to a Gaussian of standard deviation z c sqrt(S) in each of d coordinates. By Adam, a client
        shortens a longer update to this norm.

        Args:
            size: d.
            lr: step size.
            first: whether the update is of round 1.
            optimizer: of the client.
        """
        batch = self.batch(first)
        records = self.steps(batch) * batch
        gradients = records + 6.5 * math.sqrt(records) + 14
        noise = self.update_noise(lr, first=first, optimizer=optimizer) * (math.sqrt(size) + 6.5)
        return self._step_size(lr, first, optimizer) * self.clip_norm / batch * gradients + noise

    def _step_size(self, lr: float, first: bool, optimizer: str) -> float:
        """Step size of SGD of which no step is longer: Adam divides gradients by at least their noise, z_c c / b."""
        noise = self.noise_of_gradients(first) * self.clip_norm / self.batch(first)
        return lr if optimizer == "sgd" else lr / noise

    def update_noise(self, lr: float, *, first: bool = False, optimizer: str = "sgd") -> float:
        """Standard deviation of the noise in a coordinate of one round's update: lr z_c c sqrt(S) / b for S steps.

        By Adam it is at most about lr sqrt(S).
        """
        batch = self.batch(first)
        lr = self._step_size(lr, first, optimizer)
        return lr * self.clip_norm / batch * self.noise_of_gradients(first) * math.sqrt(self.steps(batch))

    def expected(
        self, charges: Sequence[Mapping[str, Any]], plan: RecordPlan, earlier: Mapping[Event, int] = NO_EVENTS
    ) -> Counter[Event]:
        """See :meth:`Guarantee.expected`; at most the events that the client's own ledger allows."""
        charged = count_events(charges)
        events = self._charged(charges, charged, plan) | self.planned()
        if self == plan and not self.budget.covers(charged):
            return events
        return affordable(events, self.epsilon, self.delta, self.accountant)

    def charged(self, charges: Sequence[Mapping[str, Any]], plan: RecordPlan) -> Counter[Event]:
        """Return the most events of a client with this plan for the requests that a run charged under ``plan``."""
        return self._charged(charges, count_events(charges), plan)

    def _charged(
        self, charges: Sequence[Mapping[str, Any]], charged: Counter[Event], plan: RecordPlan
    ) -> Counter[Event]:
        """Return the most events of a client with this plan for the requests charged under ``plan``."""
        if self == plan:
            return charged
        ((first, first_steps),), ((later, later_steps),) = plan.part(first=True).items(), plan.part().items()
        in_round_1 = count_events(charge for charge in charges if charge.get("round") == 1)
        firsts = math.ceil((in_round_1 if first == later else charged)[first] / first_steps)
        laters = math.ceil(charged[later] / later_steps)
        if first == later and self.part(first=True) == self.part():
            firsts = 0  # included in the later ones; if the two differ here, round 1 may have been of either kind
        choices_and_losses = {event for event in charged if event not in (first, later)} | plan.choices_and_losses()
        return +(
            Counter({event: firsts * steps for event, steps in self.part(first=True).items()})
            + Counter({event: laters * steps for event, steps in self.part().items()})
            + Counter({event: charged[event] for event in choices_and_losses})
        )

    def choices_and_losses(self) -> set[Event]:
        """Return the events of selections and losses, which are equal for all plans of a run."""
        sizes = range(1, min(self.models_per_message, self.compared) + 1)
        losses = {event for models in sizes for event in self.losses(models)}
        return losses | ({selection_event(self.selection_epsilon)} if self.selection == "gumbel" else set())

    @property
    def units(self) -> int:
        """N."""
        return self.num_examples

    @property
    def _histogram(self) -> str:
        return (
            f"a noisy histogram of scores by label of held-out records, which are in no training: epsilon = "
            f"{self.held_out_epsilon:g} at delta 0 for each of these"
        )

    @property
    def statement(self) -> Statement:
        """See :class:`Statement`."""
        exact = (
            "selection exact: the choice of a cluster by exact losses is visible to the server and can flip on one "
            "record; use selection gumbel"
        )
        return Statement(
            (
                "what clients send in training, and all that the server computes from it: models and clusters",
                *([self._histogram] if self.held_out_epsilon else []),
            ),
            RECORDS,
            (exact,) if self.selection == "exact" else (),
        )
