"""Which network a run trains: a model by name, the file of its parameters, and what of it trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from coterie.models.adapters import NO_ADAPTERS, LoRA, frozen_beside, with_lora
from coterie.models.errors import ModelError, few
from coterie.models.pretrained import load_into

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class NetworkSpec:
    """A model, the file of its parameters, and what of it trains.

    Attributes:
        model: a built-in name, ``module:function``, or an entry point.
        adapters: "none", or adapters of low rank as text (:class:`~coterie.models.adapters.LoRA`); everything else is
            frozen.
        frozen: names or patterns of layers and parameters that are frozen, joined by "+"; empty: those of the model.
        pretrained: file of safetensors with the initial parameters; empty: those of the model.
    """

    model: str
    adapters: str = NO_ADAPTERS
    frozen: str = ""
    pretrained: str = ""

    def __str__(self) -> str:
        return self.model

    @property
    def freezes(self) -> bool:
        """Whether more than the model decides what trains."""
        return self.adapters != NO_ADAPTERS or bool(self.frozen)

    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        """Return the network of a function that builds the model.

        What is frozen without a file has the values of a build with seed 0, the same at every build.

        Raises:
            ModelError: file, adapters or names do not fit the network.
        """
        network = make()
        try:
            return self._changed(network, make) if self.freezes or self.pretrained else network
        except ModelError as error:
            raise ModelError(f"model '{self}': {error}") from None

    def _changed(self, network: nn.Module, make: Callable[[], nn.Module]) -> nn.Module:
        import torch

        lora = LoRA.parse(self.adapters)
        if lora and self.frozen:
            raise ModelError("adapters freeze all but what train names: leave frozen out")
        frozen = frozen_beside(network, lora) if lora else _matching(network, self.frozen)
        if self.pretrained:
            load_into(network, self.pretrained, frozen)
        elif frozen:
            with torch.random.fork_rng(devices=()):
                torch.default_generator.manual_seed(0)
                other = make()
            with torch.no_grad():
                for name in frozen:
                    network.get_parameter(name).copy_(other.get_parameter(name))
        for name in frozen:
            network.get_parameter(name).requires_grad_(False)
        return with_lora(network, **asdict(lora)) if lora else network


def _matching(network: nn.Module, patterns: str) -> list[str]:
    """Return the names of the parameters that patterns name, themselves or by a module."""
    names = [name for name, _ in network.named_parameters()]
    chosen: set[str] = set()
    for pattern in filter(None, patterns.split("+")):
        found = [name for name in names if fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")]
        if not found:
            raise ModelError(f"frozen: the network has no layer or parameter '{pattern}'; it has {few(names, 5)}")
        chosen.update(found)
    return [name for name in names if name in chosen]
