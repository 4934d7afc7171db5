"""Adam's steps from noisy gradients, whose noise is known: post-processing of what DP-SGD computes.

In step t, a client has u_t, the sum of clipped gradients in units of the clipping norm, with noise of standard
deviation z in every coordinate. With beta = 0.999, its parameters move against

    u_t / max( sqrt(max(v_t / (1 - beta^t) - z^2, 0)), z ),   v_t = beta v_(t-1) + (1 - beta) u_t^2,

by the step size lr: DP-AdamBC without momentum, with the floor of the server's Adam (strategies/server_optimizer.py).
Momentum delays the few steps of a round, and lost up to 3 points (docs/results.md). A coordinate without signal moves
as by SGD in units of the noise. Clipping norm and batch size cancel. The second moment starts at 0 in every round.
"adamw" also decays parameters by lr / 100 in a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from coterie.client.dpsgd import DPSGD

_SECOND, _DECAY = 0.999, 0.01
# Floor of the root of the second moment, of sums in units of the clipping norm, without noise.
_LEAST = 1e-8


class NoisyAdam:
    """Steps of n clients in a round.

    Args:
        settings: of the clients, which may take different numbers of steps.
    """

    def __init__(self, settings: Sequence[DPSGD]) -> None:
        device = settings[0].device

        def column(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64, device=device)[:, None]

        self._lr = column([dpsgd.lr for dpsgd in settings])
        self._noise = column([dpsgd.noise_multiplier for dpsgd in settings])
        self._steps = column([dpsgd.steps for dpsgd in settings])
        self._decay = _DECAY if settings[0].optimizer == "adamw" else 0.0
        self._taken = 0
        self._square = torch.zeros((), dtype=torch.float64, device=device)

    def moves(self, sums: Tensor, values: Tensor) -> Tensor:
        """Return what to subtract from (n, d) parameters in the next step; 0 for clients without steps left.

        Args:
            sums: (n, d) float64 noisy sums of clipped gradients, in units of the clipping norm.
            values: the parameters.
        """
        self._taken += 1
        self._square = _SECOND * self._square + (1 - _SECOND) * sums**2
        signal = self._square / (1 - _SECOND**self._taken) - self._noise**2
        direction = sums / torch.maximum(signal.clamp(min=0).sqrt(), self._noise.clamp(min=_LEAST))
        return self._lr * (self._steps >= self._taken) * (direction + self._decay * values)
