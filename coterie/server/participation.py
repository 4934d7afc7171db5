"""Ways to let clients take part at one budget: sampling rates and mechanisms, compared by public numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from coterie.privacy import PLANS, Plan, PrivacyError, certificate
from coterie.privacy.accounting import min_noise
from coterie.privacy.certificate import visible_epsilon
from coterie.server.config import RunConfig
from coterie.settings import ConfigError

_RATES = (0.05, 0.1, 0.2, 0.5, 1.0)
_MECHANISMS = ("joint", "banded")


@dataclass(frozen=True)
class Participation:
    """One way, with the noise that the budget requires.

    Attributes:
        mechanism: of client-level privacy.
        sampling_rate: q.
        slots: number of groups of clients that take part in turn; 0: cohorts are drawn.
        protects: adversaries against whom the budget holds: "outsiders", or also "observers" of participation.
        noise_multiplier: of a round.
        noise: root mean square over rounds of the noise of a model, in units of C times the server's step size.
        messages: expected training requests of a round.
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
    epsilon: float
    epsilon_observers: float | None

    @classmethod
    def of(cls, plan: Plan, protects: str) -> Participation:
        """The way of a plan."""
        stated = certificate({"plan": plan.terms()}, [])
        return cls(
            mechanism=plan.mechanism,
            sampling_rate=plan.rate,
            slots=plan.round_event(1).slots,
            protects=protects,
            noise_multiplier=plan.noise_multiplier,
            noise=plan.model_noise / plan.expected_members,
            messages=plan.rate * plan.clients,
            epsilon=stated["epsilon"],
            epsilon_observers=stated["epsilon_participation_visible"],
        )


def participations(config: RunConfig) -> list[Participation]:
    """Return the ways at the budget of a run: those against observers first, then by noise.

    Raises:
        ConfigError: the run has no client-level privacy, or its noise is set.
    """
    if config.privacy.privacy_unit != "client":
        raise ConfigError(f"privacy-unit = {config.privacy.privacy_unit}: only client-level privacy has participation")
    if config.privacy.noise_multiplier is not None:
        raise ConfigError("noise-multiplier is set: ways are compared at one epsilon; leave it out")
    found = list(_ways(config))
    return sorted(found, key=lambda way: (way.protects != "observers", way.noise))


def _ways(config: RunConfig) -> Iterator[Participation]:
    for mechanism in _MECHANISMS:
        for rate in sorted({*_RATES, config.sampling_rate}):
            if mechanism == "banded" and (rate == 1 or abs(1 / rate - round(1 / rate)) > 1e-9):
                continue
            changes = {"privacy.mechanism": mechanism, "aggregation.sampling-rate": rate}
            try:
                plan = RunConfig({**_kept(config), **changes}).plan
            except (ConfigError, PrivacyError):  # not possible for this run, such as too few clients at this rate
                continue
            if mechanism == "banded" or rate == 1:
                yield Participation.of(plan, "observers")
                continue
            yield Participation.of(plan, "outsiders")
            if (shown := against_observers(plan)) is not None:
                yield Participation.of(shown, "observers")


def against_observers(plan: Plan) -> Plan | None:
    """Return the plan with the least noise whose budget holds against observers; None: no noise suffices."""

    noise = min_noise(lambda noise: visible_epsilon(plan.recalibrated(noise).planned(), plan.delta), plan.epsilon)
    return None if noise is None else plan.recalibrated(noise)


def _kept(config: RunConfig) -> dict[str, Any]:
    """The settings of the run without those of a mechanism alone."""
    options = {"privacy." + option.replace("_", "-") for plan in PLANS.values() for option in plan.options}
    return {name: value for name, value in config.values.items() if name not in options}
