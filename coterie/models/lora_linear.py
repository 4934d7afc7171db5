"""A frozen linear layer with an adapter of low rank; see models/adapters.py."""

from __future__ import annotations

import copy

from torch import Tensor, nn


class LoRALinear(nn.Module):
    """A frozen linear layer with an adapter of low rank.

    Args:
        base: the layer; its parameters are frozen.
        rank: r.
        alpha: scale of the update, times 1 / r.
        std: standard deviation of B at the start.
    """

    def __init__(self, base: nn.Linear, rank: int, alpha: float, std: float) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        like = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.down = nn.Linear(base.in_features, rank, bias=False, **like)
        self.up = nn.Linear(rank, base.out_features, bias=False, **like)
        nn.init.normal_(self.up.weight, std=std)
        self.scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        output: Tensor = self.base(x) + self.scale * self.up(self.down(x))
        return output

    @property
    def weight(self) -> Tensor:
        """(out, in) W + (alpha / r) B A, which transformer layers of PyTorch read in evaluation."""
        return self.base.weight + self.scale * self.up.weight @ self.down.weight

    @property
    def bias(self) -> Tensor | None:
        """(out,) b."""
        return self.base.bias

    def merged(self) -> nn.Linear:
        """Return one linear layer that computes the same."""
        layer = copy.deepcopy(self.base)
        layer.weight.data = self.weight.detach()
        return layer
