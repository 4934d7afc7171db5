"""Adapters of low rank (LoRA), which train beside frozen linear layers.

E. Hu et al.: LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022, arXiv:2106.09685. A linear layer W x + b of
a pre-trained network stays as it is, and gets an update of rank r:

    W x + b + (alpha / r) B A x,    A (r, in) drawn at random, B (out, r) zero at the start.

Only A and B train, travel, are clipped, and get noise (:mod:`coterie.models.trainable`). Both are linear layers
themselves, so that DP-SGD clips their gradients by ghost norms, and computes no gradient of W.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from coterie.models.errors import ModelError, few

if TYPE_CHECKING:
    from torch import nn


def with_lora(
    network: nn.Module,
    rank: int = 8,
    *,
    alpha: float | None = None,
    layers: Collection[str] = (),
    train: Collection[str] = (),
) -> nn.Module:
    """Return a copy of a network whose parameters are frozen, with adapters beside its linear layers.

    Args:
        network: a pre-trained network.
        rank: r, at most the smaller side of every layer.
        alpha: scale of the updates, times 1 / r; None for r.
        layers: names of the linear layers; empty for all, but for those inside of ``nn.MultiheadAttention`` and those
            that ``train`` names.
        train: names of further modules that train as a whole, such as a new output layer.

    Raises:
        ModelError: there is no such layer, it is not linear, or smaller than the rank.

    Example:
        >>> from torch import nn
        >>> from coterie.models import num_parameters, with_lora
        >>> network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        >>> num_parameters(network), num_parameters(with_lora(network, rank=4, layers=["0"], train=["2"]))
        (4810, 1162)
    """
    from torch.nn import Linear

    from coterie.models.lora_linear import LoRALinear

    network = copy.deepcopy(network).requires_grad_(False)
    modules = dict(network.named_modules())
    for name in (*layers, *train):
        if name not in modules:
            raise ModelError(f"adapters: the network has no layer '{name}'; it has {_layers(modules)}")
    chosen = list(layers) or [name for name in _linear(modules) if not _within(name, train)]
    if not chosen:
        raise ModelError("adapters: the network has no linear layer (nn.Linear) to adapt")
    adapted: dict[str, nn.Module] = {}
    for name in chosen:
        layer = modules[name]
        if type(layer) is not Linear:
            kind = type(layer).__name__
            raise ModelError(f"adapters: layer '{name}' is {kind}, not nn.Linear; choose from {_layers(modules)}")
        least = min(layer.in_features, layer.out_features)
        if not 1 <= rank <= least:
            raise ModelError(f"adapters: rank must be 1 to {least}, the smaller side of layer '{name}', not {rank}")
        adapted[name] = LoRALinear(layer, rank, rank if alpha is None else alpha)
    for name in train:
        modules[name].requires_grad_(True)
    return _replaced(network, adapted)


def merged(network: nn.Module) -> nn.Module:
    """Return a copy of a network whose adapters are part of their linear layers: the original architecture.

    Example:
        >>> from torch import nn
        >>> from coterie.models import merged, with_lora
        >>> merged(with_lora(nn.Sequential(nn.Linear(3, 2)), rank=1))
        Sequential(
          (0): Linear(in_features=3, out_features=2, bias=True)
        )
    """
    from coterie.models.lora_linear import LoRALinear

    network = copy.deepcopy(network)
    adapted = {name: module for name, module in network.named_modules() if isinstance(module, LoRALinear)}
    return _replaced(network, {name: module.merged() for name, module in adapted.items()})


def _replaced(network: nn.Module, replacements: Mapping[str, nn.Module]) -> nn.Module:
    for path, module in replacements.items():
        if not path:
            return module
        parent, _, name = path.rpartition(".")
        setattr(network.get_submodule(parent), name, module)
    return network


def _linear(modules: Mapping[str, nn.Module]) -> list[str]:
    from torch.nn import Linear

    return [name for name, module in modules.items() if type(module) is Linear]


def _within(name: str, modules: Collection[str]) -> bool:
    return any(f"{name}.".startswith(f"{module}.") for module in modules)


def _layers(modules: Mapping[str, nn.Module]) -> str:
    return few(_linear(modules), 5) or "none"
