"""The conformance test of a strategy: whole runs on toy clients."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import ConfigRecord, RecordDict

from coterie.fields.settings import Settings
from coterie.privacy import (
    Event,
    Joint,
    Ledger,
    MechanismOutput,
    NoPrivacy,
    Permit,
    Plan,
    RecordLevel,
    RecordPlan,
    Streams,
)
from coterie.privacy.contributions import Summed
from coterie.rounds.recorder import Checkpoint, Recorder
from coterie.rounds.run_state import StrategyError
from coterie.strategies import ClusteredStrategy, StrategyOptions
from coterie.strategies.registry import contract_problems
from coterie.testing.failures import Report
from coterie.testing.toys import CLIENTS, LAYOUT, MALFORMED, Spoil, ToyGrid, honest, malformed
from coterie.wire.messages import REPLY, UPDATE, Layout, pack_models, pack_update, unpack_models

Models = npt.NDArray[np.float32]

#: Items of the contract of a strategy, with what to do where one is not met.
STRATEGY_ITEMS = {
    "class": "See the table in docs/extending.md.",
    "runs": "Three rounds must run under every unit of privacy that the class declares.",
    "models": "round must yield phases and return finite float32 models (k, d).",
    "requests": "Send a request of coterie.wire, which clients can read.",
    "deterministic": "Draw from self.streams.stream(name, round, self.attempt), and keep no state in the class.",
    "charges": "Read replies through self.sums only: it charges the ledger before it releases noisy sums.",
    "budget": "Let BudgetError pass: it ends the run with the latest models.",
    "row-wise": "Compute from the values that self.sums releases only; or declare row_wise = False.",
    "malformed": "Do not override the validation of replies; take releases from self.sums or self.updates.",
    "silent": "Expect releases of zero clients, do not divide by counts of 0, or raise StrategyError.",
    "resume": "Keep what a round needs of earlier ones in self.state, as NumPy arrays, and nothing elsewhere.",
    "certificate": "Do not change the ledger.",
}
_ROUNDS = 3


@dataclass
class _Run:
    """One run on toy clients.

    Attributes:
        grid: the clients.
        strategy: the strategy.
        models: after every round.
        events: "charge" and "release" in order, and "round" at the end of a round.
        checkpoint: the last one.
    """

    grid: ToyGrid
    strategy: ClusteredStrategy
    models: list[Models] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    checkpoint: Checkpoint | None = None


class _InterruptedError(Exception):
    """The run is interrupted after a checkpoint."""


class _Recorder(Recorder):
    def __init__(self, run_: list[_Run], stop_after: int) -> None:
        self._run, self._stop_after = run_, stop_after

    def checkpoint(self, state: Checkpoint, line: Mapping[str, Any]) -> None:
        if not state.round:
            return
        (run,) = self._run
        run.events.append("round")
        run.models.append(state.models.copy())
        kept = {name: np.array(values) for name, values in state.state.items()}
        run.checkpoint = Checkpoint(state.round, state.models.copy(), state.layout, state.histogram, state.mean, kept)
        if state.round == self._stop_after:
            raise _InterruptedError


class _WatchedLedger(Ledger):
    log: list[str]

    def charge_round(self, number: int, event: Event, count: int = 1, **details: object) -> Permit:
        permit = super().charge_round(number, event, count, **details)
        self.log.append("charge")
        return permit


@dataclass(frozen=True, kw_only=True)
class _WatchedJoint(Joint):
    """Notes releases; optionally releases constants, whatever clients contribute."""

    events: list[str] = field(default_factory=list, compare=False)
    constant: bool = False

    def terms(self) -> dict[str, Any]:
        """Return the parameters of the joint mechanism."""
        return {name: value for name, value in super().terms().items() if name not in ("events", "constant")}

    def perturb(
        self,
        contributions: Summed,
        noise: np.random.Generator,
        coins: np.random.Generator,
        redraw: npt.NDArray[np.float64],
        state: object | None = None,
    ) -> MechanismOutput:
        self.events.append("release")
        output = super().perturb(contributions, noise, coins, redraw, state)
        if not self.constant:
            return output
        histogram = None if output.histogram is None else np.ones_like(output.histogram)
        return MechanismOutput(np.full_like(output.sums, 0.01), histogram, np.ones_like(output.divisors))


def check_strategy(
    strategy_class: type[ClusteredStrategy], *, settings: Settings | None = None, skip: Collection[str] = ()
) -> None:
    """Test a strategy against the contract of methods (docs/extending.md), in runs of six toy clients.

    Args:
        strategy_class: the class.
        settings: its own settings; None: their defaults.
        skip: items of :data:`STRATEGY_ITEMS` that are not tested.

    Raises:
        ConformanceError: items that are not met, all of them, each with the solution.
        ValueError: an item to skip does not exist.
    """
    name = getattr(strategy_class, "__name__", repr(strategy_class))
    report = Report(name, STRATEGY_ITEMS, skip)
    for problem in contract_problems(strategy_class):
        report.require(False, "class", problem)
    report.finish()  # nothing else can be tested
    test = _Test(report, strategy_class, settings)
    units = [unit for unit in strategy_class.units if unit != "client" or strategy_class.row_wise]
    ran = [unit for unit in units if test.unit(unit)]
    if "client" in ran:
        test.released_only()
        test.budget()
    report.finish()


class _Test:
    def __init__(self, report: Report, strategy_class: type[ClusteredStrategy], settings: Settings | None) -> None:
        self._report, self._kind, self._settings = report, strategy_class, settings

    def plan(self, unit: str, events: list[str], **numbers: Any) -> Plan:
        """A plan of the unit, with little noise."""
        strategy_class = self._kind
        k = 1 if not strategy_class.clustered or strategy_class.grows else 2
        shape: dict[str, Any] = {"clients": CLIENTS, "num_clusters": k, "rounds": _ROUNDS, "sampling_rate": 1.0}
        shape["rebalance_min"] = 1.0 if strategy_class.rebalances else 0.0
        if unit == "none":
            return NoPrivacy(**shape)
        if unit == "client":
            privacy = {"clip_norm": 0.5, "epsilon": math.inf, "delta": 1e-3, "noise_multiplier": 0.5}
            return _WatchedJoint(**{**shape, **privacy, "identifier_share": 0.04, "events": events, **numbers})
        selections = strategy_class.max_selections(_ROUNDS)
        losses: dict[str, Any] = strategy_class.released_losses(
            CLIENTS, self._settings or strategy_class.settings_class()
        )
        one = RecordPlan(
            num_examples=10,
            batch_size=10,
            rounds=_ROUNDS,
            epsilon=1e5,
            delta=1e-4,
            noise_multiplier=0.5,
            selection="gumbel" if selections else "none",
            selections=selections,
            **losses,
        )
        return RecordLevel.of((one,), clients=CLIENTS, num_clusters=k, weights="equal")

    def run(
        self, unit: str, spoil: Spoil = honest, *, stop_after: int = 0, resume: _Run | None = None, **numbers: Any
    ) -> _Run:
        """Run three rounds.

        Raises:
            Exception: what the strategy raises.
        """
        events: list[str] = [] if resume is None else resume.events
        plan = self.plan(unit, events, **numbers)
        ledger = (
            _WatchedLedger(plan.delta, plan.epsilon, accountant="rdp") if resume is None else resume.strategy.ledger
        )
        if isinstance(ledger, _WatchedLedger):
            ledger.log = events
        kept: list[_Run] = []
        options = StrategyOptions(
            ledger=ledger,
            streams=Streams(0),
            recorder=_Recorder(kept, stop_after),
            registration_timeout=0.0,
            evaluate_every=2,
            resume_from=None if resume is None else resume.checkpoint,
            true_groups=[i % 2 for i in range(CLIENTS)],
            example_shape=(4,),
        )
        strategy = self._kind(plan, self._settings, options=options)
        run = _Run(ToyGrid(spoil), strategy, events=events)
        kept.append(run)
        start, layout = _initial(strategy)
        with suppress(_InterruptedError):
            strategy.start(run.grid, pack_models(start, layout), _ROUNDS, train_config=ConfigRecord({"lr": 0.2}))
        return run

    def unit(self, unit: str) -> bool:
        """Test one unit of privacy; return whether a run ended without an error."""
        report, where = self._report, f"with privacy-unit {unit}"
        try:
            run = self.run(unit)
        except Exception as error:
            return report.require(False, "runs", f"{where}: {type(error).__name__}: {error}")
        whole = len(run.models) == _ROUNDS or run.strategy.finished
        if report.require(whole, "models", f"{where}: {len(run.models)} of {_ROUNDS} rounds returned models"):
            finite = all(models.ndim == 2 and len(models) and np.isfinite(models).all() for models in run.models)
            report.require(finite, "models", f"{where}: models are not finite")
        problems = ", ".join(dict.fromkeys(run.grid.malformed))
        report.require(not problems, "requests", f"{where}: {problems}")
        with report.guarded("certificate", "strategy.certificate()"):
            json.dumps(run.strategy.certificate(), allow_nan=False)
        report.require(_same(run, self.run(unit)), "deterministic", f"{where}: two runs with equal streams differ")
        if unit == "client":
            rounds = " ".join(run.events).split("round")[:-1]
            paired = all(
                set(zip(*[iter(round_events.split())] * 2, strict=False)) == {("charge", "release")}
                for round_events in rounds
            )
            problem = f"{run.grid.trainings} exchanges had the events {' '.join(run.events)}"
            self._report.require(paired and run.events.count("charge") == run.grid.trainings, "charges", problem)
        self._replies(unit)
        with report.guarded("resume", f"{where}: a resumed run"):
            rest = self.run(unit, resume=self.run(unit, stop_after=1))
            same = len(rest.models) + 1 == len(run.models) and all(map(np.array_equal, rest.models, run.models[1:]))
            report.require(same, "resume", f"{where}: a resumed run has other models")
        return True

    def _replies(self, unit: str) -> None:
        if unit == "none":
            without = self.run(unit, malformed("silent"))
            for fault in MALFORMED:
                problem = f"a reply with a wrong {fault}"
                with self._report.guarded("malformed", problem):
                    same = _same(self.run(unit, malformed(fault)), without)
                    self._report.require(same, "malformed", f"{problem} changes the models")
        with (
            self._report.guarded("silent", f"with privacy-unit {unit}, a run without replies"),
            suppress(StrategyError),
        ):
            run = self.run(unit, lambda client, content: None)
            finite = all(np.isfinite(models).all() for models in run.models)
            self._report.require(finite, "silent", "models are not finite without replies")

    def released_only(self) -> None:
        """Compare runs whose releases are equal, but whose client 0 behaves differently."""
        runs = [self.run("client", spoil, constant=True) for spoil in (honest, _other, malformed("silent"))]
        seen = [
            [
                (message_type, request, models.tobytes())
                for message_type, request, models, client in run.grid.requests
                if client != 0
            ]
            for run in runs
        ]
        same = seen[0] == seen[1] == seen[2] and _same(runs[0], runs[1]) and _same(runs[0], runs[2])
        problem = "the update of one client changes requests to others, or models, although the releases are equal"
        self._report.require(same, "row-wise", problem)

    def budget(self) -> None:
        """Run with a budget of two rounds."""
        with self._report.guarded("budget", "a run whose budget is exhausted"):
            plan = self.plan("client", [])
            ledger = plan.ledger()
            costs = [ledger.charge_round(number, plan.event()).epsilon for number in (1, 2, 3)]
            run = self.run("client", epsilon=(costs[1] + costs[2]) / 2, accountant="pld")
            charged, stopped = run.events.count("charge"), run.strategy.stopped
            problem = f"{charged} charges were made, two fit; stopped is {stopped!r}"
            self._report.require(stopped is not None and charged <= 2, "budget", problem)


def _initial(strategy: ClusteredStrategy) -> tuple[Models, Layout]:
    rng = np.random.default_rng(0)

    def draw(**_: Any) -> dict[str, Models]:
        return {
            name: rng.standard_normal(shape).astype(np.float32)
            for name, shape in zip(LAYOUT.names, LAYOUT.shapes, strict=True)
        }

    drawn = [strategy.initial_parameters(draw) for _ in range(strategy.plan.num_clusters)]
    layout = Layout.of(drawn[0])
    return np.stack([layout.flatten(parameters) for parameters in drawn]), layout


def _same(one: _Run, other: _Run) -> bool:
    return len(one.models) == len(other.models) and all(map(np.array_equal, one.models, other.models))


def _other(client: int, content: RecordDict) -> RecordDict | None:
    if client != 0:
        return content
    models, layout = unpack_models(content.array_records[UPDATE])
    return RecordDict({UPDATE: pack_update(-models[0], layout), REPLY: content[REPLY]})
