"""Ghost clipping: clipped gradients of chains of linear layers without materialised per-record gradients.

The gradient of a linear layer for one record is g aᵀ, of norm |g| |a|, where a is the layer's input and g the loss's
gradient at its output. The sums of many clients are then a few batched matrix products (Goodfellow, arXiv:1510.01799).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from coterie.client.sgd import example_loss
from coterie.messages import Layout

# Margin below the clipping norm for rounding. In float64 the relative error of a norm over d numbers is at most d 2⁻⁵³,
# 1e-9 at d = 1e7, and the error of a sum of n clipped records n² 2⁻⁵³ c, 4e-7 c at n = 60,000. In float32 these bounds
# are 0.6 and 200 c.
_MARGIN = 1e-6


def clip_factors(norms: Tensor, clip_norm: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return factors that clip gradients to norm c and divide them by c, and which gradients are finite.

    Clipped gradients have norm at most 1, so that noise is added in units of the sensitivity. Norms are float64, in
    which the squares of finite float32 numbers do not overflow.
    """
    kept = norms.isfinite()
    return torch.where(kept, (1 - _MARGIN) / torch.clamp(norms, min=clip_norm * (1 - _MARGIN)), 0), kept


def clipped_sums(
    model: nn.Sequential, layout: Layout, vectors: Tensor, x: Tensor, y: Tensor, there: Tensor, clips: Tensor
) -> Tensor:
    """Return (n, d) float64 sums of clipped per-record gradients, in units of the clipping norm.

    Args:
        model: a chain (:func:`coterie.client.training.is_chain`).
        layout: of its parameters.
        vectors: (n, d) parameters of the n clients.
        x: (n, m, *shape) records.
        y: (n, m) targets.
        there: (n, m) which records count; the others are padding.
        clips: (n, 1) clipping norms.
    """
    parameters = layout.split(vectors)
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    hidden = x.flatten(0, 1)
    for name, layer in model.named_children():
        if isinstance(layer, nn.Linear):
            inputs[name] = hidden.reshape(*y.shape, hidden.shape[1])
            output = torch.bmm(inputs[name], parameters[f"{name}.weight"].mT)
            if layer.bias is not None:
                output += parameters[f"{name}.bias"][:, None]
            outputs[name] = output if outputs else output.requires_grad_()
            hidden = output.flatten(0, 1)
        else:
            hidden = layer(hidden)
    slopes = torch.autograd.grad(example_loss(hidden, y.flatten()).sum(), list(outputs.values()))
    backward = {name: slope.double() for name, slope in zip(outputs, slopes, strict=True)}
    forward = {name: each.detach().double() for name, each in inputs.items()}
    biased = {name: f"{name}.bias" in parameters for name in outputs}
    squares = torch.zeros((), dtype=torch.float64, device=x.device)
    for name, g in backward.items():
        squares = squares + g.square().sum(2) * (forward[name].square().sum(2) + biased[name])
    weights, kept = clip_factors(squares.sqrt(), clips)
    kept &= there
    sums = {}
    for name, g in backward.items():
        clipped = torch.where(kept[..., None], weights[..., None] * g, 0)
        sums[f"{name}.weight"] = torch.bmm(clipped.mT, forward[name].where(kept[..., None], 0))
        sums[f"{name}.bias"] = clipped.sum(1)
    return torch.cat([sums[name].flatten(1) for name in layout.names], dim=1)
