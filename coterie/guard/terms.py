"""The terms of a site: budget, public size of its data, and what may leave beside what the budget covers."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from coterie.fields import BETWEEN, COUNT, Bounded, Bounds
from coterie.guard.owners import UNNAMED, is_name
from coterie.privacy import Event

#: Key of a node configuration that makes it, and not the app, the source of all terms.
_BUDGET = "epsilon"
# Names of terms in a node configuration.
_NODE = {"epsilon": float, "delta": float, "num-examples": int, "state-dir": str, "data": str, "budget-file": str}
_DECLARED = {"noise-multiplier": float, "sampling-rate": float, "steps": int}
# Rates and noise for which accountants take less than a second and little memory: others may be proposed by an
# adversary.
_RATES, _NOISES = Bounds(1e-9, 1), Bounds(0.1, 1e6)


class GuardError(RuntimeError):
    """The guard refuses a request or a reply; the reason is for the site's own log."""


def checked_event(rate: float, noise: float) -> Event:
    """The event of a step.

    Raises:
        GuardError: the sampling rate or the noise multiplier is out of range.
    """
    for name, bounds, value in (("sampling rate", _RATES, rate), ("noise multiplier", _NOISES, noise)):
        if value not in bounds:
            raise GuardError(f"the {name} must be {bounds.in_words}, not {value}")
    return Event(rate, noise)


@dataclass(frozen=True, kw_only=True)
class Declared(Bounded):
    """DP training that the guard cannot see, as its owner declares it: what one training message executes.

    Attributes:
        noise_multiplier: z, noise standard deviation / L2 sensitivity of a step.
        sampling_rate: probability with which each record is in a batch.
        steps: noisy gradient steps of a message.
    """

    error = GuardError

    noise_multiplier: Annotated[float, _NOISES]
    sampling_rate: Annotated[float, _RATES]
    steps: Annotated[int, Bounds(1, 1_000_000)]

    def events(self) -> Counter[Event]:
        """The events of one training message."""
        return Counter({checked_event(self.sampling_rate, self.noise_multiplier): self.steps})


@dataclass(frozen=True, kw_only=True)
class Terms(Bounded):
    """Terms of a site.

    Attributes:
        epsilon: budget of the site's data over all apps and runs.
        delta: of the budget; at most 1 / num_examples.
        num_examples: N, a public number of the site's records. It sets sampling rates and steps, and replaces the true
            number in replies.
        state_dir: folder for ledgers, an absolute path.
        data: absolute path of the site's data; the ledger is then beside them, as that of Coterie's own ClientApp.
        budget_file: absolute path of the ledger, if it is somewhere else.
        allow: further message types and names of metrics that may leave the site, although no budget covers them.
        declared: DP training that the guard cannot see; None: the app trains with Opacus.
        client_id: number of the site, which names its ledger in ``state_dir``.
        site: public name of the records, the same whatever node they are at; empty: none.

    Raises:
        GuardError: a term is missing or out of range.
    """

    error = GuardError

    epsilon: Annotated[float, Bounds(0, above=True)]
    delta: Annotated[float, BETWEEN]
    num_examples: Annotated[int, COUNT]
    state_dir: str
    data: str | None = None
    budget_file: str | None = None
    allow: frozenset[str] = frozenset()
    declared: Declared | None = None
    client_id: int = 0
    site: str = UNNAMED

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.delta > 1 / self.num_examples:
            raise GuardError(f"delta must be at most 1 / num-examples, not {self.delta}")
        if self.site != UNNAMED and not is_name(self.site):
            raise GuardError(f"site must be 1 to 64 printable characters, without spaces around, not {self.site!r}")
        for name, path in (("state-dir", self.state_dir), ("data", self.data), ("budget-file", self.budget_file)):
            if path is not None and not os.path.isabs(path):
                raise GuardError(f"{name} must be an absolute path, not {path!r}")

    @classmethod
    def of_node(cls, node: Mapping[str, Any], defaults: Mapping[str, Any]) -> Terms:
        """Return the terms of a node.

        Args:
            node: its configuration, which its owner writes. If it sets ``epsilon``, all terms are from it. Its ``site``
                is always; without one, ``client-id`` or ``partition-id`` is the name.
            defaults: terms in the app's code, for simulations.

        Raises:
            GuardError: a term is missing, of another type or out of range.
        """
        client_id = node.get("client-id", node.get("partition-id"))
        number = _number(0 if client_id is None else client_id, int, "client-id")
        if node.get("site") == "":
            raise GuardError("site in the node configuration is empty: leave it out, or set a name")
        site = str(node.get("site", UNNAMED if client_id is None else number))
        values: dict[str, Any] = dict(defaults)
        if _BUDGET in node:
            values = _stated(_NODE, node) | {"allow": str(node.get("allow", "")).split()}
            if declared := _stated(_DECLARED, node):
                if len(declared) != len(_DECLARED):
                    raise GuardError(f"set all or none of {', '.join(_DECLARED)} in the node configuration")
                values["declared"] = Declared(**declared)
        for name in ("state_dir", "data", "budget_file"):
            if values.get(name) is not None:
                values[name] = os.path.expanduser(str(values[name]))
        values["allow"] = frozenset(values.get("allow", ()))
        missing = [name for name in ("epsilon", "delta", "num_examples", "state_dir") if values.get(name) is None]
        if missing:
            raise GuardError(f"set {', '.join(name.replace('_', '-') for name in missing)} in the node configuration")
        return cls(**values, client_id=number, site=site)


def _stated(kinds: Mapping[str, type], node: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name.replace("-", "_"): _number(node[name], value_type, name)
        for name, value_type in kinds.items()
        if name in node
    }


def _number(value: Any, value_type: type, name: str) -> Any:
    try:
        return value_type(value)
    except (TypeError, ValueError, OverflowError):
        raise GuardError(f"{name} = {value!r} in the node configuration: must be a {value_type.__name__}") from None
