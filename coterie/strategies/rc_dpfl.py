"""RC-DPFL: robust clustered federated learning under record-level privacy.

A Provably Robust Algorithm for Differentially Private Clustered Federated Learning (anonymous, under review;
papers/rc_dpfl), Algorithm 1. Clients run DP-SGD, so no trusted party is required; all server computations are
post-processing.

     1  theta_1^1 = ... = theta_M^1 = theta^init
     2  for e in 1, ..., E do
     3      if e = 1 then
     4          for each client i in parallel do
     5              b_i <- N_i                                          full batch: updates with little noise
     6              u_i <- DPSGD(theta^init, b_i, N_i, K, z_i, c)
     7          server: if M is unknown then M <- argmax_m MSS(GMM(u_1, ..., u_n; m))
     8                  pi_1, ..., pi_n, MPO <- GMM(u_1, ..., u_n; M)
     9                  E_c <- (1 - MPO) E / 2;  go to the next round
    10      else if e <= E_c then
    11          R(i) <- m with probability pi_i[m], for each client i
    12      else
    13          R(i) <- argmin_m f_i(theta_m), at each client i
    14      u_i <- DPSGD(theta_(R(i)), b, N_i, K, z_i, c), for each client i in parallel
    15      theta_m <- theta_m + sum over R(i) = m of N_i u_i / sum over R(i) = m of N_i, for every m

Deviations from the paper
- Line 13 has a privacy cost, contrary to Appendix H: one record can change a deterministic argmin, which the server
  observes. By default, clients choose by the exponential mechanism, which is charged (``selection = "gumbel"``);
  ``exact`` follows the paper and is never certified.
- Lines 7 and 8 use M - 1 unscaled principal components instead of the authors' 2 scaled ones (``components = 2``);
  clustering/mixture.py gives the reason.
- A client without a reply in round 1 has equal probabilities for all clusters until it chooses by loss.
- Line 6 has a noise z_i of its own in round 1: with the z_i of the other rounds, a full batch costs these more than
  clustering requires. privacy/first_round.py derives it from public numbers. ``first-round-noise-ratio = 1`` follows
  the paper, and is the default if M is unknown: finding M needs more signal than finding its groups.
- N_i is the public number of the plan, not a value from a reply.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from coterie.clustering.mixture import cluster, project, switch_round
from coterie.fields.settings import Settings, setting
from coterie.privacy import ReleasedUpdates
from coterie.rounds.run_state import StrategyError
from coterie.strategies.method import Models, Round
from coterie.strategies.strategy import ClusteredStrategy

_PI, _SWITCH = "pi", "switch"


@dataclass(frozen=True)
class RCDPFLSettings(Settings):
    """Settings of RC-DPFL."""

    table: ClassVar[str] = "rc-dpfl"

    components: int = setting(
        0,
        "number of principal components of the updates; 0: one less than the number of groups; 2: the authors' value",
        at_least=0,
        tuned=True,
    )


class RCDPFL(ClusteredStrategy):
    """Assigns clients by a Gaussian mixture of the first updates, in later rounds by losses."""

    name: ClassVar[str] = "rc-dpfl"
    title: ClassVar[str] = "GMM on the first updates, then clients choose by loss; DP-SGD at the clients"
    paper: ClassVar[str] = "RC-DPFL, Algorithm 1"
    row_wise: ClassVar[bool] = False
    equal_start: ClassVar[bool] = True  # line 1
    units: ClassVar[tuple[str, ...]] = ("record", "none")
    settings_class: ClassVar[type[Settings]] = RCDPFLSettings
    settings: RCDPFLSettings
    finds_clusters: ClassVar[bool] = True
    full_first_batch: ClassVar[bool] = True
    robust: ClassVar[bool] = True

    def round(self, number: int, models: Models) -> Round:
        """Lines 3 to 15."""
        if number == 1:
            first = yield from self.updates(replace(self.training(), first_batch=True), models[:1])  # lines 4-6
            self._fit_mixture(first)  # lines 7-9
            return np.repeat(models[:1], self.state[_PI].shape[1], axis=0)
        if number <= self.switch:
            rng = self.streams.stream("assignment", number, self.attempt)
            labels = {i: int(rng.choice(len(pi), p=pi)) for i, pi in enumerate(self.state[_PI])}  # lines 10-11
            released = yield from self.sums(self.training(), models, to=labels)  # line 14
        else:  # lines 13-14: client/record_level.py
            released = yield from self.sums(replace(self.training(), choice=True), models)
        return self.step(models, released)  # line 15

    @property
    def fewest_clients(self) -> int:
        """Two for each component of the mixture, and no fewer than the search for their number takes."""
        return max(4, 2 * self.clusters)

    @property
    def switch(self) -> int:
        """E_c, the last round that uses the mixture; available after round 1."""
        return int(self.state[_SWITCH][0])

    def _fit_mixture(self, released: ReleasedUpdates) -> None:
        """Lines 7 to 9."""
        if len(released.updates) < self.fewest_clients:
            raise StrategyError(
                f"only {len(released.updates)} clients replied in round 1, too few for clustering; check why the other "
                "clients failed, or reduce clusters"
            )
        rng = self.streams.stream("mixture", 1, self.attempt)
        scores, components = project(released.updates), self.settings.components
        options: dict[str, Any] = {"components": components, "scaled": components == 2} if components else {}
        try:
            mixture, mss_of = cluster(scores, self.clusters or None, rng, **options)
        except ValueError as error:
            raise StrategyError(f"clustering in round 1 failed: {error}") from error
        pi = np.full((self.plan.clients, len(mixture.means)), 1 / len(mixture.means))
        pi[released.clients] = mixture.probabilities
        self.state = {_PI: pi, _SWITCH: np.array([switch_round(mixture.mpo, self.plan.rounds)])}
        self.notes = {
            "clusters": len(mixture.means),
            "mss": mixture.mss,
            "mpo": mixture.mpo,
            "mss_of": {str(m): mss for m, mss in mss_of.items()},
            "switch_round": self.switch,
            "clients": released.clients.tolist(),
            "labels": mixture.labels.tolist(),
            "projection": scores[:, :2].tolist(),
        }

    def assignments(self, number: int) -> Mapping[int, int] | None:
        """The most likely component up to round E_c; None afterwards: clients choose."""
        if number > self.switch:
            return None
        return {i: int(pi.argmax()) for i, pi in enumerate(self.state[_PI])}

    @classmethod
    def max_selections(cls, rounds: int) -> int:
        """One per round after E_c, which is at least 1."""
        return rounds - 1
