"""Adapters of low rank (LoRA), which train beside frozen linear layers.

E. Hu et al.: LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022, arXiv:2106.09685. A linear layer W x + b of
a pre-trained network stays as it is, and gets an update of rank r:

    W x + b + (alpha / r) B A x,    A (r, in) drawn at random, B (out, r) zero at the start, or small.

Only A and B train, travel, are clipped, and get noise (:mod:`coterie.models.trainable`). Both are linear layers
themselves, so that DP-SGD clips their gradients by ghost norms, and computes no gradient of W.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from coterie.models.errors import ModelError, few

if TYPE_CHECKING:
    from torch import nn


#: Value of the setting ``adapters`` without any, and the form of the others.
NO_ADAPTERS = "none"
ADAPTERS_FORM = (
    "none or lora:rank=R (R at least 1) and after commas if wanted alpha=A (above 0) layers=NAME+... train=NAME+... "
    "std=S (at least 0)"
)
# Method of peft's models.
_MERGES = "merge_and_unload"


@dataclass(frozen=True)
class LoRA:
    """The arguments of :func:`with_lora`, as a text.

    By default B is drawn with a small standard deviation, so that the models of clusters differ from the start: clients
    could not choose among equal ones.

    Example:
        >>> LoRA.parse("lora:rank=2,layers=blocks.*,train=head+norm")
        LoRA(rank=2, alpha=None, layers=('blocks.*',), train=('head', 'norm'), std=0.02)
    """

    rank: int = 8
    alpha: float | None = None
    layers: tuple[str, ...] = ()
    train: tuple[str, ...] = ()
    std: float = 0.02

    @classmethod
    def parse(cls, text: str) -> LoRA | None:
        """Read the setting ``adapters``; None: there are none.

        Raises:
            ModelError: the text has another form.
        """
        if text == NO_ADAPTERS:
            return None
        kind, _, given = text.partition(":")
        pairs = [pair.partition("=")[::2] for pair in given.split(",")] if given else []
        try:
            values = {key: _PARTS[key](value) for key, value in pairs}
        except (KeyError, ValueError):
            values = {}
        if kind != "lora" or len(values) < len(pairs):
            raise ModelError(f"adapters = {text!r}: must be {ADAPTERS_FORM}")
        return cls(**values)


def _rank(text: str) -> int:
    if not int(text) >= 1:
        raise ValueError
    return int(text)


def _alpha(text: str) -> float:
    if not 0 < float(text) < math.inf:
        raise ValueError
    return float(text)


def _std(text: str) -> float:
    if not 0 <= float(text) < math.inf:
        raise ValueError
    return float(text)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split("+"))
    if not all(names):
        raise ValueError
    return names


_PARTS: dict[str, Callable[[str], Any]] = {
    "rank": _rank,
    "alpha": _alpha,
    "layers": _names,
    "train": _names,
    "std": _std,
}


def with_lora(
    network: nn.Module,
    rank: int = 8,
    *,
    alpha: float | None = None,
    layers: Collection[str] = (),
    train: Collection[str] = (),
    std: float = 0.0,
) -> nn.Module:
    """Return a copy of a network whose parameters are frozen, with adapters beside its linear layers.

    Args:
        network: a pre-trained network.
        rank: r, below the smaller side of every layer.
        alpha: scale of the updates, times 1 / r; None for r.
        layers: names of the linear layers, or patterns such as ``blocks.*``; empty for all, but for those inside of
            ``nn.MultiheadAttention`` and those that ``train`` names.
        train: names of further modules that train as a whole, such as a new output layer.
        std: standard deviation of B at the start; 0: the network computes the same as before.

    Raises:
        ModelError: there is no such layer, it is not linear, or a side of it is not larger than the rank.

    Example:
        >>> from torch import nn
        >>> from coterie.models import num_parameters, with_lora
        >>> network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        >>> num_parameters(network), num_parameters(with_lora(network, rank=4, layers=["0"], train=["2"]))
        (4810, 1162)
    """
    from torch.nn import Linear

    from coterie.models.lora_linear import LoRALinear

    try:
        network = copy.deepcopy(network).requires_grad_(False)
    except Exception as error:  # a user's code
        raise ModelError(f"adapters: the network cannot be copied: {' '.join(str(error).split())[:200]}") from error
    modules = dict(network.named_modules())
    layers = _named(layers, modules, _linear(modules))
    train = _named(train, modules, list(modules))
    chosen = layers or [name for name in _linear(modules) if not _within(name, train)]
    if not chosen:
        raise ModelError("adapters: the network has no linear layer (nn.Linear) to adapt")
    adapted: dict[str, nn.Module] = {}
    for name in chosen:
        layer = modules[name]
        if type(layer) is not Linear:
            kind = type(layer).__name__
            raise ModelError(f"adapters: layer '{name}' is {kind}, not nn.Linear; choose from {_layers(modules)}")
        least = min(layer.in_features, layer.out_features)
        if not 1 <= rank < least:
            raise ModelError(
                f"adapters: rank must be at least 1 and below {least}, the smaller side of layer '{name}', not {rank}; "
                "choose other layers (layers), or train this one as a whole (train)"
            )
        adapted[name] = LoRALinear(layer, rank, rank if alpha is None else alpha, std)
    for name in train:
        modules[name].requires_grad_(True)
    return _replaced(network, adapted)


def frozen_beside(network: nn.Module, lora: LoRA) -> list[str]:
    """Return the names of the parameters that adapters freeze."""
    modules = dict(network.named_modules())
    whole = _named(lora.train, modules, list(modules))
    return [name for name, _ in network.named_parameters() if not _within(name, whole)]


def merged(network: nn.Module) -> nn.Module:
    """Return a copy of a network whose adapters are part of their linear layers: the original architecture.

    The adapters are those of :func:`with_lora`, or of models of the package peft.

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
    whole = {name: module.merged() for name, module in network.named_modules() if isinstance(module, LoRALinear)}
    of_peft = {name: module for name, module in network.named_modules() if hasattr(module, _MERGES)}
    return _replaced(network, whole | {name: getattr(module, _MERGES)() for name, module in of_peft.items()})


def _replaced(network: nn.Module, replacements: Mapping[str, nn.Module]) -> nn.Module:
    for path, module in replacements.items():
        if not path:
            return module
        parent, _, name = path.rpartition(".")
        setattr(network.get_submodule(parent), name, module)
    return network


def _named(names: Collection[str], modules: Mapping[str, nn.Module], among: Collection[str]) -> list[str]:
    """Return the modules of these names, and those ``among`` which match a pattern."""
    found: dict[str, None] = {}
    for name in names:
        matching = [name] if name in modules else [other for other in among if fnmatchcase(other, name)]
        if not matching:
            raise ModelError(f"adapters: the network has no layer '{name}'; it has {_layers(modules)}")
        found |= dict.fromkeys(matching)
    return list(found)


def _linear(modules: Mapping[str, nn.Module]) -> list[str]:
    from torch.nn import Linear

    return [name for name, module in modules.items() if type(module) is Linear]


def _within(name: str, modules: Collection[str]) -> bool:
    return any(f"{name}.".startswith(f"{module}.") for module in modules)


def _layers(modules: Mapping[str, nn.Module]) -> str:
    return few(_linear(modules), 5) or "none"
