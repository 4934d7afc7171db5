"""The models of another run as the initial ones, with its charges where its clients are the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from coterie.fields.settings import ConfigError
from coterie.models import fingerprint
from coterie.privacy import Event, Plan
from coterie.privacy.accountants import events_of_a_client
from coterie.privacy.accounting import certifies
from coterie.privacy.certificate import certificate, plan_in_force
from coterie.privacy.check import verified
from coterie.privacy.ledger_lines import earlier_events, header_digest
from coterie.privacy.statement import Guarantee
from coterie.rounds.recorder import Checkpoint
from coterie.server.checkpoints import read_checkpoint
from coterie.server.config import RunConfig
from coterie.wire.messages import Layout

_OTHERS = "; of a run on other clients, export the models and set pretrained"


@dataclass(frozen=True)
class StartModels:
    """The last models of another run.

    Attributes:
        checkpoint: of that run.
        entry: of the first line of the new run's ledger.
        events: that run's charged and remaining planned events, of one client; empty if its clients are others, or if
            the new run has no privacy.
    """

    checkpoint: Checkpoint
    entry: Mapping[str, Any]
    events: Counter[Event]

    @classmethod
    def of(cls, config: RunConfig) -> StartModels | None:
        """Return what a new run starts from; None: its models are new.

        Raises:
            ConfigError: there are no models, they have other constants, or the charges of that run cannot be composed
                with those of the new one.
            LedgerError: the ledger of that run is damaged.
        """
        if not config.run.start_from:
            return None
        run = Path(config.run.start_from)
        checkpoint, _ = read_checkpoint(run / "checkpoint" / "state.safetensors")
        if checkpoint is None or not checkpoint.round:
            raise ConfigError(f"start-from = '{run}': this folder contains no models of a run with a completed round")
        header, charges = verified(run)
        there = header.get("public", {}).get("constants")
        if there is not None and there != fingerprint(config.constants):
            raise ConfigError(
                f"start-from = '{run}': its models have other frozen parameters or buffers than those that model "
                f"'{config.training.model}' builds; use the code and files of that run"
            )
        events, reasons = Counter[Event](), []
        if config.privacy.privacy_unit != "none":
            earlier = plan_in_force(header, charges)
            if reason := _obstacle(earlier, config.plan):
                raise ConfigError(f"start-from = '{run}': {reason}{_OTHERS}")
            events = events_of_a_client(earlier.expected(charges, earlier, earlier_events(header)))
            reasons = certificate(header, charges)["reasons"]
        entry = {
            "run": run.absolute().name,
            "ledger": charges[-1].get("chain", "") if charges else "",
            "header": header_digest(header),
            "reasons": reasons,
            "events": [
                {name: value for name, value in asdict(event).items() if name not in ("slot", "slots")}
                | {"count": count}
                for event, count in events.items()
            ],
        }
        return cls(checkpoint, entry, events)

    def plan(self, config: RunConfig) -> Plan:
        """Return the plan of the new run, whose budget covers the events of both.

        Raises:
            ConfigError: that run has spent the budget.
            PrivacyError: no noise reaches the target.
        """
        plan = config.plan
        if not self.events:
            return plan
        if config.privacy.noise_multiplier is None:
            evaluations = Counter({plan.evaluation_event(): plan.evaluations})
            plan = plan.recalibrated(plan.noise_for(plan.rounds, +evaluations + self.events))
        if not plan.budget.covers(self.events + Counter({plan.event(): 1})):
            raise ConfigError(
                f"epsilon = {plan.epsilon:g}: the charges of {self.entry['run']}, which count too, leave no round; "
                f"increase epsilon{_OTHERS}"
            )
        return plan

    def check_layout(self, layout: Layout, num_clusters: int) -> None:
        """Check that the models fit the new run.

        Raises:
            ConfigError: they have other parameters, or there are more than one and not as many as clusters.
        """
        there = self.checkpoint.layout
        shapes = dict(zip(there.names, there.shapes, strict=True))
        for name, shape in zip(layout.names, layout.shapes, strict=True):
            if shapes.pop(name, None) != shape:
                raise ConfigError(
                    f"start-from: the models of {self.entry['run']} have no parameter {name} of shape {shape}; set "
                    "model, features and the data as in that run"
                )
        if shapes or layout.names != there.names:
            raise ConfigError(
                f"start-from: the models of {self.entry['run']} have other parameters: set model as there"
            )
        count = len(self.checkpoint.models)
        if count not in (1, num_clusters):
            raise ConfigError(
                f"start-from: {self.entry['run']} has {count} models, this run {num_clusters}; set clusters to {count}"
            )


def _obstacle(earlier: Guarantee, plan: Plan) -> str:
    """Return why the events of two runs on the same clients cannot be composed; empty if they can."""
    if not earlier.private:
        return "that run has no privacy, so its models may reveal the clients' data"
    if plan.unit != "client" or earlier.unit != "client":
        return (
            f"that run has privacy unit {earlier.unit}, this one {plan.unit}; only the charges of client-level runs "
            "are composed"
        )
    if earlier.units != plan.units:
        return f"that run has {earlier.units} clients, this one {plan.units}: the same clients must be as many"
    if (earlier.sampler, earlier.adjacency) != (plan.sampler, plan.adjacency):
        return f"mechanisms {earlier.mechanism} and {plan.mechanism} have different adjacencies and cannot be composed"
    if not certifies(plan.accountant):
        return f"accountant {plan.accountant} does not compose other runs (pld and rdp do)"
    return ""
