"""Which network a run trains: a model by name, and what of it trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from coterie.models.adapters import NO_ADAPTERS, LoRA, with_lora
from coterie.models.errors import ModelError

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class NetworkSpec:
    """A model, and what of it trains.

    Attributes:
        model: a built-in name, ``module:function``, or an entry point.
        adapters: "none", or adapters of low rank as text (:class:`~coterie.models.adapters.LoRA`); everything else is
            frozen.
    """

    model: str
    adapters: str = NO_ADAPTERS

    def __str__(self) -> str:
        return self.model

    @property
    def is_changed(self) -> bool:
        """Whether something but the model decides what trains."""
        return self.adapters != NO_ADAPTERS

    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        """Return the network of a function that builds the model.

        Under adapters the model is built with seed 0, so that its frozen parameters are the same at every build.

        Raises:
            ModelError: the adapters do not fit the network.
        """
        lora = LoRA.parse(self.adapters)
        return make() if lora is None else _adapted(self, lora, make)


def _adapted(spec: NetworkSpec, lora: LoRA, make: Callable[[], nn.Module]) -> nn.Module:
    import torch

    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(0)
        network = make()
    try:
        return with_lora(network, **asdict(lora))
    except ModelError as error:
        raise ModelError(f"model '{spec}': {error}") from None
    except Exception as error:  # a user's code
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"model '{spec}' cannot be copied, as adapters require: {reason}") from error
