"""Attacks on the secure mechanism by a server that works with the most clients that its plan allows.

The server takes off the vectors and the noise of those that work with it. What is left is the sum over the honest
survivors, at least l - c, of which one has sent its vector, or noise alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from coterie.audit.findings import Finding, FloatArray, dominance_test
from coterie.privacy import Secure, Streams
from coterie.privacy.discrete_gaussians import STEPS
from coterie.privacy.secure_aggregation import NoiseLayers
from coterie.privacy.secure_aggregation.keys import KEY_BYTES

# One parameter of each model: the noise of further ones tells nothing.
_SIZE, _LABEL = 1, 1
_HUGE = np.array([1e3])
_NUMBERS: dict[str, Any] = {
    "clients": 10,
    "num_clusters": 2,
    "sampling_rate": 1.0,
    "rounds": 1,
    "clip_norm": 0.3,
    "epsilon": math.inf,
    "delta": 1e-5,
    "noise_multiplier": 1.0,
    "identifier_share": 0.2,
    "clip_share": 0.1,
    "corrupt": 2,
}


class _SizedForAll(Secure):
    """The noise suffices only if every client of the cohort is honest and stays."""

    @property
    def layers(self) -> NoiseLayers:
        return NoiseLayers.of(self.noise_multiplier * STEPS, self.clients, self.clients, 0)

    def check_layers(self, noise: float, name: str, clients: int, layers: NoiseLayers) -> None:
        """Allow them."""


@dataclass(frozen=True)
class ServerAttack:
    """A client whose vector is in the sum, or not.

    Attributes:
        name: description of the attack.
        plan: the mechanism under attack.
        survivors: clients that stay, of which the plan's corrupt ones work with the server.
        missing: honest survivors that add no noise.
        revealed: layers of the noise that each of them reveals beyond its surplus.
        control: whether the claim is known to be wrong, so that the attack must succeed.
    """

    name: str
    plan: Secure
    survivors: int = 7
    missing: int = 0
    revealed: int = 0
    control: bool = False


def server_attacks() -> list[ServerAttack]:
    """Return the attacks on sums."""
    plan, for_all = Secure(**_NUMBERS), _SizedForAll(**_NUMBERS)
    return [
        ServerAttack("the server and 2 of 7 survivors, oversized update", plan),
        *(ServerAttack(f"the server and 2 of {many} survivors, without surplus", plan, many) for many in (8, 10)),
        ServerAttack("noise for 10 clients, of which 5 are honest and stay", for_all, control=True),
        ServerAttack("8 survivors that reveal two layers too many", plan, 8, revealed=2, control=True),
        ServerAttack("one honest client without noise", plan, missing=1, control=True),
    ]


def audit_server(draws: int, streams: Streams) -> list[Finding]:
    """Run every attack, and measure the norm of a client's vector over updates of any norm."""
    findings = []
    for attack in server_attacks():
        vector = attack.plan.encode(_HUGE, _LABEL, _LABEL)
        worlds = (_noise(attack, draws, streams), _noise(attack, draws, streams) + vector / STEPS)
        findings.append(dominance_test("secure", attack.name, {attack.plan.event(): 1}, worlds, attack.control))
    plan = Secure(**_NUMBERS)  # whose rounding cannot lengthen a vector
    rows = np.random.default_rng(0).standard_normal((8, 4))
    lengths = [*np.linspace(0.9, 1.1, 41), 1e-9, 1e3, 1e30, 1e300, math.inf, math.nan]
    updates = [length * plan.clip_norm * row / np.linalg.norm(row) for row in rows for length in lengths]
    longest = max(sum(int(entry) ** 2 for entry in plan.encode(update, _LABEL, 0)) for update in updates)
    mu, shift = 1 / plan.noise_multiplier, math.sqrt(longest) / STEPS / plan.noise_multiplier
    return [*findings, Finding("secure", "vector of any update", "mu", mu, shift, (), longest > STEPS**2)]


def _noise(attack: ServerAttack, draws: int, streams: Streams) -> FloatArray:
    plan, total = attack.plan, draws * attack.plan.vector_size(_SIZE)
    kept = replace(
        plan.layers, deviations=plan.layers.deviations[: plan.layers.kept(attack.survivors) - attack.revealed]
    )
    honest = attack.survivors - plan.corrupt - attack.missing
    keys = (streams.stream("noise", client).bytes(KEY_BYTES) for client in range(honest))
    return np.asarray(sum(kept.draw(key, total)[0] for key in keys), np.float64).reshape(draws, -1) / STEPS
