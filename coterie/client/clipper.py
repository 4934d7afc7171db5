"""Clipped sums of gradients of records: what all ways to take them share (client/gradients.py names the ways)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor, nn

#: Maps outputs and targets to the loss of every record.
Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
#: Parameters of a network by name.
Values: TypeAlias = Mapping[str, Tensor]
#: Sums of clipped gradients, and the norms of the gradients.
Sums: TypeAlias = tuple[Tensor, Tensor]

# Margin below the clipping norm for rounding. In float64 the relative error of a norm over d numbers is at most d 2⁻⁵³,
# 1e-9 at d = 1e7, and the error of a sum of n clipped records n² 2⁻⁵³ c, 4e-7 c at n = 60,000. In float32 these bounds
# are 0.6 and 200 c.
_MARGIN = 1e-6


def clip_factors(norms: Tensor, clip_norm: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return factors that clip gradients to norm c and divide them by c, and which gradients are finite.

    Clipped gradients have norm at most 1, so that noise is added in units of the sensitivity. Norms are float64, in
    which the squares of finite float32 numbers do not overflow.
    """
    finite = norms.isfinite()
    return torch.where(finite, (1 - _MARGIN) / torch.clamp(norms, min=clip_norm * (1 - _MARGIN)), 0), finite


class Clipper:
    """Clips the gradients of the records of n clients, and adds them up for each client.

    Attributes:
        numbers: float32 numbers held for each record.
    """

    numbers: int

    def sums(self, parameters: Values, x: Tensor, y: Tensor, counted: Tensor, clip_norms: Tensor) -> Sums:
        """Return (n, d) float64 sums of clipped gradients, in units of the clipping norm, and (n, m) norms.

        Args:
            parameters: (n, *shape) each, of the n clients, in the order of the result.
            x: (n, m, *shape) records.
            y: (n, m) targets.
            counted: (n, m) which records count; the others are padding.
            clip_norms: (n, 1) clipping norms, of all parameters together.
        """
        raise NotImplementedError


class OneClient(Clipper):
    """Clips the gradients of one client at a time, n = 1, whose m > 0 records all count.

    Attributes:
        named: trainable parameters of a copy of the network, by name.
    """

    named: dict[str, nn.Parameter]

    def sums(self, parameters: Values, x: Tensor, y: Tensor, counted: Tensor, clip_norms: Tensor) -> Sums:
        """Clip the gradients of the one client; see :class:`Clipper`."""
        self.set_values({name: value[0] for name, value in parameters.items()})
        total, norms = self.clipped_sum(x[0], y[0], clip_norms[0])
        return total[None], norms[None]

    def set_values(self, values: Values) -> None:
        """Let the network compute with these parameters, in its own types."""
        for name, value in values.items():
            self.named[name].data = value.to(self.named[name].dtype)

    def clipped_sum(self, x: Tensor, y: Tensor, clip_norm: float | Tensor) -> Sums:
        """Return the (d,) sum and the (m,) norms at these parameters, given (m, *shape) records and (m,) targets."""
        raise NotImplementedError
