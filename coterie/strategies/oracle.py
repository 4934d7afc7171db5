"""Oracle-CDPFL: DP-SGD clients in their true groups from the first round.

An upper baseline for clustering, from RC-DPFL (papers/rc_dpfl, section 5.1). It requires the true groups, which are
available in simulations only.

     1  R(i) <- the true group of client i
     2  for e in 1, ..., E do
     3      u_i <- DPSGD(theta_(R(i)), b, N_i, K, z_i, c), for each client i in parallel
     4      theta_m <- theta_m + weighted mean of u_i over R(i) = m, for every m

Deviations from the paper: none by default. With ``alone``, every client is a group of its own: local training under
DP-SGD whose models are released, the baseline of all methods that share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from coterie.fields.settings import Settings, setting
from coterie.rounds.run_state import StrategyError
from coterie.strategies.method import Models, Round
from coterie.strategies.strategy import ClusteredStrategy


@dataclass(frozen=True)
class OracleSettings(Settings):
    """Settings of the oracle."""

    table: ClassVar[str] = "oracle"

    alone: bool = setting(
        False, "every client is a group of its own: models of clients alone, released; clusters = clients"
    )


class Oracle(ClusteredStrategy):
    """One model per true group, from the option ``true_groups``."""

    name: ClassVar[str] = "oracle"
    title: ClassVar[str] = "true groups, given in advance; DP-SGD at the clients"
    paper: ClassVar[str] = "a baseline of RC-DPFL"
    row_wise: ClassVar[bool] = True
    equal_start: ClassVar[bool] = True  # models differ by their groups only
    units: ClassVar[tuple[str, ...]] = ("record", "none")
    needs: ClassVar[tuple[str, ...]] = ("true_groups",)
    robust: ClassVar[bool] = True
    settings_class: ClassVar[type[Settings]] = OracleSettings
    settings: OracleSettings

    def check(self) -> None:
        """Require a cluster for every group, and a group for every client."""
        super().check()
        groups, clients = self._groups, self.plan.clients
        if len(groups) != clients or max(groups) >= self.plan.num_clusters:
            raise StrategyError(
                f"strategy oracle requires one cluster per true group and the group of each of {clients} clients: "
                f"set clusters to {max(groups) + 1}"
            )

    def round(self, number: int, models: Models) -> Round:
        """Lines 3 and 4."""
        released = yield from self.sums(self.training(), models, to=self.assignments(number))  # line 3
        return self.step(models, released)  # line 4

    def assignments(self, number: int) -> Mapping[int, int]:
        """Line 1."""
        return dict(enumerate(map(int, self._groups)))

    @property
    def _groups(self) -> Sequence[int]:
        return range(self.plan.clients) if self.settings.alone else self.options.true_groups
