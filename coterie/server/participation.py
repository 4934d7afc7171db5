"""Ways to let clients take part at one budget: sampling rates and mechanisms, compared by public numbers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from coterie.client.backend import train
from coterie.client.personal import sum_of_two
from coterie.datasets import DataError
from coterie.fields.settings import ConfigError
from coterie.models import trainable
from coterie.privacy import PLANS, Plan, PrivacyError, certificate
from coterie.privacy.accounting import min_noise
from coterie.privacy.certificate import visible_epsilon
from coterie.server import planning
from coterie.server.config import RunConfig
from coterie.server.simulated_scores import SomeClients
from coterie.wire.messages import Layout

_RATES = (0.05, 0.1, 0.2, 0.5, 1.0)
_MECHANISMS = ("joint", "banded", "secure")
# Clients whose training is timed, and seconds of one of them after which no others are.
_TIMED, _LONG = 20, 0.3


@dataclass(frozen=True)
class Participation:
    """One way, with the noise that the budget requires.

    Attributes:
        mechanism: of client-level privacy.
        sampling_rate: q.
        slots: number of groups of clients that take part in turn; 0: cohorts are drawn.
        protects: adversaries against whom the budget holds: "outsiders", also "observers" of participation, or also
            "the server".
        noise_multiplier: of a round.
        noise: root mean square over rounds of the noise of a model, in units of C times the server's step size.
        messages: expected training requests of a round.
        seconds: that one process of this machine trains their clients, without messages; None: not measured.
        epsilon: against those who do not observe who takes part.
        epsilon_observers: against those who do; None: no bound.
    """

    mechanism: str
    sampling_rate: float
    slots: int
    protects: str
    noise_multiplier: float
    noise: float
    messages: float
    seconds: float | None
    epsilon: float
    epsilon_observers: float | None

    @classmethod
    def of(cls, plan: Plan, protects: str, seconds: float | None) -> Participation:
        """The way of a plan, where one client trains for some seconds."""
        stated = certificate({"plan": plan.terms()}, [])
        return cls(
            mechanism=plan.mechanism,
            sampling_rate=plan.rate,
            slots=plan.round_event(1).slots,
            protects=protects,
            noise_multiplier=plan.noise_multiplier,
            noise=plan.model_noise / plan.expected_members,
            messages=plan.rate * plan.clients,
            seconds=None if seconds is None else seconds * plan.rate * plan.clients,
            epsilon=stated["epsilon"],
            epsilon_observers=stated["epsilon_participation_visible"],
        )


def seconds_of_client(config: RunConfig) -> float:
    """Return the time of one client's training in a round, on this machine and with its data.

    The mean of some clients that train as in a simulation, after a first time that prepares the network; of one client,
    if it takes long.

    Raises:
        DataError: the data are not at hand.
    """
    some = SomeClients.drawn(config, _TIMED)
    if not some.shards:
        raise DataError("no client has records")
    once, network, initial = replace(some.training, local_epochs=1), some.network, some.initial
    request = config.strategy(planning.sketch(config)).training()
    if request.additive:
        network, initial = sum_of_two(network), np.concatenate([initial, initial])
    layout = Layout.of(trainable(network))

    def measured(many: int) -> float:
        began, start = time.perf_counter(), np.tile(initial, (many, 1))
        train(network, layout, start, some.shards[:many], some.rngs[:many], once)
        return (time.perf_counter() - began) * some.training.local_epochs / many

    if measured(1) <= _LONG:
        measured(len(some.shards))
        return measured(len(some.shards))
    return measured(1)


def participations(config: RunConfig, seconds: float | None = None) -> list[Participation]:
    """Return the ways at the budget of a run: those against observers first, then by noise.

    Args:
        config: of the run.
        seconds: that one client trains in a round; None: unknown.

    Raises:
        ConfigError: the run has no client-level privacy, or its noise is set.
    """
    if config.privacy.privacy_unit != "client":
        raise ConfigError(f"privacy-unit = {config.privacy.privacy_unit}: only client-level privacy has participation")
    if config.privacy.noise_multiplier is not None:
        raise ConfigError("noise-multiplier is set: ways are compared at one epsilon; leave it out")
    return sorted(_ways(config, seconds), key=lambda way: (way.protects == "outsiders", way.noise))


def _ways(config: RunConfig, seconds: float | None) -> Iterator[Participation]:
    options = {"privacy." + option.replace("_", "-") for plan in PLANS.values() for option in plan.options}
    common = {name: value for name, value in config.values.items() if name not in options}  # of all mechanisms
    for mechanism in _MECHANISMS:
        for rate in sorted({*_RATES, config.sampling_rate}):
            in_turn = abs(1 / rate - round(1 / rate)) < 1e-9
            if (mechanism != "joint" and not in_turn) or (mechanism, rate) == ("banded", 1.0):
                continue
            changes = {"privacy.mechanism": mechanism, "aggregation.sampling-rate": rate}
            try:
                plan = RunConfig({**common, **changes}).plan
            except (ConfigError, PrivacyError):  # not possible for this run, such as too few clients at this rate
                continue
            if mechanism != "joint" or rate == 1:
                yield Participation.of(plan, "the server" if mechanism == "secure" else "observers", seconds)
                continue
            yield Participation.of(plan, "outsiders", seconds)
            noise = min_noise(partial(_visible_epsilon, plan), plan.epsilon)
            if noise is not None:  # its budget holds against observers, too
                yield Participation.of(plan.recalibrated(noise), "observers", seconds)


def _visible_epsilon(plan: Plan, noise: float) -> float:
    """Return epsilon against those who observe who takes part, at another noise."""
    return visible_epsilon(plan.recalibrated(noise).planned(), plan.delta)
