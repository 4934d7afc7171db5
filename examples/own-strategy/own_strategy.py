"""IFCA with heavy-ball momentum at the server.

Line 9 of IFCA (coterie/strategies/ifca.py) becomes

     9  v_j^(t+1) <- beta v_j^(t) + eta / D_j * sum of the updates with label j
    10  theta_j^(t+1) <- theta_j^(t) + v_j^(t+1)

Both lines read released values only, so that a round costs what it costs in IFCA.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from coterie.fields.settings import Settings, setting
from coterie.strategies import IFCA, Round
from coterie.strategies.method import Models


@dataclass(frozen=True)
class MomentumSettings(Settings):
    """Settings of IFCA with momentum."""

    table: ClassVar[str] = "momentum"

    beta: float = setting(0.5, "weight of the last step; 0 is IFCA", at_least=0, below=1, tuned=True)


class Momentum(IFCA):
    """IFCA with momentum."""

    name: ClassVar[str] = "momentum"
    title: ClassVar[str] = "IFCA with heavy-ball momentum at the server"
    paper: ClassVar[str] = "-"
    row_wise: ClassVar[bool] = True  # clients choose as in IFCA: by their own data and released models
    robust: ClassVar[bool] = False
    settings_class: ClassVar[type[Settings]] = MomentumSettings
    settings: MomentumSettings

    def round(self, number: int, models: Models) -> Round:
        """Lines 9 and 10."""
        new = yield from super().round(number, models)
        last = self.state.get("velocity", np.zeros_like(models))  # arrays in self.state are part of checkpoints
        velocity = np.asarray(new - models + self.settings.beta * last, np.float32)
        self.state = {"velocity": velocity}
        return np.asarray(models + velocity, np.float32)
