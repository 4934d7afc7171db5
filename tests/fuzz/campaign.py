"""Runs with one changed reply each, and what must hold after each one.

1. The run ends, and no model or metric is NaN or Inf.
2. What entered a sum or a score is what the oracle reads from a valid reply; replies of others all count.
3. If nothing of the changed reply was accepted, the models equal those of a run in which the client is silent, bit by
   bit. If it was, they are within the clipping bound of it, where the plan has one.
4. Logs and counted reasons are printable and short.
"""

from __future__ import annotations

import json
import logging
import math
import random
import tempfile
import time
import traceback
import zlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import oracle
from federations import CLIENTS, EVALUATION, INTRODUCTION, SETTINGS, TRAINING, Delivery, Exchange, Federation, Target
from flwr.app import Message
from kit.hostile import mutate

from coterie.strategies.one_shot import UPLOAD_LIMIT

# Characters of a line of the log: a few of our own, and 200 of each of two clients' texts.
_LONGEST_LINE = 700
_LONGEST_REASON = 200
# Infinite where there is no privacy.
_UNBOUNDED = ("epsilon", "epsilon_rdp")
#: Seconds that one round of a toy may take.
MAX_SECONDS = 20.0


@dataclass
class Tally:
    """Counts of one setting and verb."""

    mutated: int = 0
    invalid: int = 0
    dropped: int = 0
    accepted: int = 0
    unexplained: int = 0
    compared: int = 0
    findings: int = 0

    def row(self) -> tuple[int, ...]:
        """In the order of the table."""
        return (self.mutated, self.invalid, self.dropped, self.accepted, self.unexplained, self.compared, self.findings)


@dataclass
class Report:
    """What a campaign found.

    Attributes:
        tallies: counts by setting and verb.
        findings: (setting, verb, number of the case, what happened).
        unexplained: valid replies that were dropped, by reason.
        seconds: of the whole campaign.
        slowest: seconds of the slowest run.
    """

    tallies: dict[tuple[str, str], Tally] = field(default_factory=lambda: defaultdict(Tally))
    findings: list[tuple[str, str, int, str]] = field(default_factory=list)
    unexplained: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    slowest: float = 0.0

    @property
    def mutated(self) -> int:
        """Replies that were changed."""
        return sum(tally.mutated for tally in self.tallies.values())


class _Log(logging.Handler):
    """Messages of a run that a terminal should not see."""

    def __init__(self) -> None:
        super().__init__()
        self.bad: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if not text.replace("\t", "").isprintable() or len(text) > _LONGEST_LINE:
            self.bad.append(text[:300])


class Campaign:
    """Seeded cases on one federation each.

    Args:
        seed: of the changes; the same seed gives the same cases.
        settings: names of :data:`federations.SETTINGS`.
        kinds: of requests whose replies are changed.
    """

    def __init__(
        self,
        seed: int,
        settings: Iterable[str] = SETTINGS,
        kinds: Collection[str] = (INTRODUCTION, TRAINING, EVALUATION),
    ) -> None:
        self.seed, self.settings, self.kinds = seed, list(settings), kinds
        self.report = Report()

    def run(self, replies: int, until: str | None = None) -> Report:
        """So many changed replies, spread evenly over settings and over the verbs of each.

        Args:
            replies: their number.
            until: the campaign ends with the first finding that contains this text.
        """
        started = time.perf_counter()
        logger = logging.getLogger("flwr")
        handlers, propagate, log = logger.handlers[:], logger.propagate, _Log()
        logger.handlers, logger.propagate = [log], False
        try:
            with tempfile.TemporaryDirectory() as folder:
                for place, name in enumerate(self.settings):
                    share = (replies * (place + 1)) // len(self.settings) - (replies * place) // len(self.settings)
                    self._federation(Federation(name, Path(folder)), share, log, until)
        finally:
            logger.handlers, logger.propagate = handlers, propagate
        self.report.seconds = time.perf_counter() - started
        return self.report

    def _federation(self, federation: Federation, replies: int, log: _Log, until: str | None) -> None:
        name = federation.name
        targets = [target for target in federation.targets if target[1] in self.kinds]
        rng = random.Random(zlib.crc32(f"{self.seed} {name}".encode()))
        silent: dict[Target, Exchange] = {}
        for case in range(replies):
            target = Target(*targets[case % len(targets)], rng.randrange(CLIENTS))
            if target not in silent:
                silent[target] = federation.run(target, lambda request, honest: [])
            self._case(federation, target, silent[target], rng, case, log)
            if until is not None and any(until in problem for *_, problem in self.report.findings):
                return

    def _case(
        self, federation: Federation, target: Target, silent: Exchange, rng: random.Random, case: int, log: _Log
    ) -> None:
        deliveries: list[Delivery] = []
        requests: list[Message] = []

        def change(request: Message, honest: Any) -> list[Delivery]:
            requests.append(request)
            deliveries[:] = mutate(rng, request, honest, federation.replies)
            return deliveries

        log.bad.clear()
        began, problems = time.perf_counter(), []
        exchange = None
        try:
            with np.errstate(all="ignore"):
                exchange = federation.run(target, change)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(last.filename).name}:{last.lineno}"
            problems.append(f"crash: {type(error).__name__}: {error!s:.200} at {where}")
        seconds = time.perf_counter() - began
        self.report.slowest = max(self.report.slowest, seconds)
        if seconds > MAX_SECONDS:
            problems.append(f"slow: {seconds:.1f} s")
        (request,) = requests
        verb = request.metadata.message_type
        tally = self.report.tallies[federation.name, verb]
        tally.mutated += 1
        why, expected = _judged(federation, target, request, deliveries)
        tally.invalid += why is not None
        if exchange is not None:
            found = (federation, target, exchange, silent, why, expected, len(deliveries))
            problems += _checked(*found, tally, self.report.unexplained)
        problems += [f"log: {text!r}" for text in log.bad]
        tally.findings += bool(problems)
        self.report.findings += [(federation.name, verb, case, problem) for problem in problems]


def run_of(federation: Federation) -> oracle.Run:
    """The constants that the oracle needs."""
    config = federation.config
    exact = config["evaluate"] != "private" and not federation.name.endswith("library metrics")
    clips = federation.plan.unit != "none"
    limit = UPLOAD_LIMIT * 2**20 if config.method.produces == "labels" else 0
    return oracle.Run(CLIENTS, tuple(config.examples[0]), limit, exact, clips)


def _judged(
    federation: Federation, target: Target, request: Message, deliveries: list[Delivery]
) -> tuple[str | None, Any]:
    """The oracle's verdict on the first reply to the request; what belongs to no request counts for nobody."""
    own = [delivery for delivery in deliveries if delivery.reply_to in (None, request.metadata.message_id)]
    if not own:
        return "no reply", None
    return oracle.verdict(
        request.metadata.message_type, request.content, own[0].content, target.client, run_of(federation)
    )


def _checked(
    federation: Federation,
    target: Target,
    exchange: Exchange,
    silent: Exchange,
    why: str | None,
    expected: Any,
    delivered: int,
    tally: Tally,
    unexplained: Counter[str],
) -> list[str]:
    """What does not hold."""
    problems = []
    if target.kind == INTRODUCTION:
        problems, accepted = _introduced(target, exchange, why, expected)
    elif target.kind == TRAINING:
        problems, accepted = _summed(target, exchange, why, expected)
    else:
        problems, accepted = _scored(target, exchange, why, expected, delivered)
    tally.accepted += accepted
    tally.dropped += not accepted
    if why is None and not accepted:
        tally.unexplained += 1
        unexplained[f"{federation.name}: {', '.join(exchange.dropped) or 'no reason'}"] += 1
    problems += _sound(exchange)
    if target.kind != INTRODUCTION or not accepted:
        distance = _distance(exchange.models, silent.models)
        if target.kind == EVALUATION or not accepted:
            tally.compared += 1
            if distance != 0:
                problems.append(f"models differ by {distance:g} from those of a silent client; the reply: {why}")
        elif (bound := clipping_bound(federation, exchange)) < math.inf:
            tally.compared += 1
            if not distance <= bound * (1 + 1e-5) + 1e-6:
                problems.append(f"models moved by {distance:g}, more than {bound:g}")
        if exchange.accuracy is not None and silent.accuracy is not None and target.kind == EVALUATION:
            moved = abs(exchange.accuracy - silent.accuracy)
            if not moved <= (0.5 / CLIENTS + 1e-9 if accepted else 0):
                problems.append(f"one client moved the private accuracy by {moved:g}")
    return problems


def _introduced(target: Target, exchange: Exchange, why: str | None, claimed: Any) -> tuple[list[str], bool]:
    """Only a node with a valid client-id takes part; of two that claim one, the one that came first."""
    others = {client: client + 1 for client in range(CLIENTS) if client != target.client}
    nodes = dict(others)
    if why is None and claimed == target.client:
        nodes[target.client] = target.client + 1
    elif why is None:
        nodes[claimed] = min(target.client, claimed) + 1
    problems = [] if exchange.nodes == nodes else [f"clients at nodes {exchange.nodes}, expected {nodes}; {why}"]
    too_late = why is None and nodes == others  # a valid claim of a client that is there
    return problems, exchange.nodes != others or too_late


def _summed(target: Target, exchange: Exchange, why: str | None, expected: Any) -> tuple[list[str], bool]:
    """What entered the sums of the phase is what valid replies hold."""
    problems = []
    for place, (asked, added) in enumerate(zip(exchange.asked, exchange.added, strict=True)):
        counted = [client for client, _ in added]
        there = set(asked) - ({target.client} if place == target.place else set())
        if not there <= set(counted) or len(counted) != len(set(counted)):
            problems.append(f"phase {place}: replies of clients {counted} counted once of {asked}")
    own = [value for client, value in exchange.added[target.place] if client == target.client]
    if own and why is not None:
        problems.append(f"accepted though invalid: {why}")
    elif own:
        read = expected[-1] if isinstance(expected, tuple) else expected
        if not np.array_equal(own[0], read):
            problems.append("accepted with other numbers than the reply holds")
    return problems, bool(own)


def _scored(
    target: Target, exchange: Exchange, why: str | None, expected: Any, delivered: int
) -> tuple[list[str], bool]:
    """What was aggregated is what valid replies hold, and all others were."""
    problems = []
    if exchange.labelled is not None:
        accepted = exchange.labelled == CLIENTS
        if exchange.labelled < CLIENTS - 1:
            problems.append(f"{exchange.labelled} clients labelled")
    elif exchange.reported is not None:
        accepted = target.client in exchange.reported
    else:
        accepted = sum(exchange.dropped.values()) < delivered
    if exchange.reported is not None:
        if others := set(range(CLIENTS)) - set(exchange.reported) - {target.client}:
            problems.append(f"evaluations of clients {sorted(others)} are lost")
        read = exchange.reported.get(target.client)
        if read is not None and why is None:
            wrong = [key for key, value in (expected or {}).items() if getattr(read, key) != value]
            if wrong or expected is None:
                problems.append(f"accepted with other values of {wrong}")
        elif read is not None:
            problems.append(f"scores accepted though invalid: {why}")
    if accepted and why is not None:
        # A library's metrics are read by its own function; a private evaluation clips them.
        problems.append(f"accepted though invalid: {why}")
    return problems, accepted


def _sound(exchange: Exchange) -> list[str]:
    """Finite models and metrics, and short, printable reasons."""
    problems = []
    if not np.isfinite(exchange.models).all():
        problems.append("a model is not finite")
    for line in exchange.lines:
        try:
            json.dumps({key: value for key, value in line.items() if key not in _UNBOUNDED}, allow_nan=False)
        except (TypeError, ValueError) as error:
            problems.append(f"metrics are no JSON: {error}")
    for reason in exchange.dropped:
        if not reason.isprintable() or len(reason) > _LONGEST_REASON:
            problems.append(f"reason: {reason[:300]!r}")
    return problems


def _distance(ours: np.ndarray, theirs: np.ndarray) -> float:
    """L2 norm of the difference; inf where the shapes differ or a number is not finite."""
    if ours.shape != theirs.shape:
        return math.inf
    if np.array_equal(ours, theirs):
        return 0.0
    with np.errstate(all="ignore"):
        between = float(np.linalg.norm(ours.astype(np.float64) - theirs.astype(np.float64)))
    return between if math.isfinite(between) else math.inf


def clipping_bound(federation: Federation, exchange: Exchange) -> float:
    """How far one client moves the models of a round at most; inf where the plan clips nothing.

    At client level a sum moves by C, and is divided by qM/k. At record level a weighted mean of updates, none of them
    longer than L, moves by 2 L at most; only where the method takes such means.
    """
    plan, config = federation.plan, federation.config
    if plan.unit == "client" and plan.divisor == "fixed":
        return float(config.server_lr * plan.clip_norm / (plan.sampling_rate * CLIENTS / plan.num_clusters))
    if plan.unit == "record" and federation.strategy in ("fedavg", "oracle", "f-cdpfl"):
        assert exchange.question is not None
        request = exchange.question.content["config"]
        return 2 * config.server_lr * oracle.max_update_norm(request, 0, exchange.models.shape[1])
    return math.inf
