"""Networks with several or nested inputs: each example, one array, is split into their parts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from coterie.models.errors import ModelError

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Part:
    """A part of an example, which is one input of a network.

    Attributes:
        shape: of the input, without the examples; (): one number for each example.
        categories: above 0, the numbers are rounded and clamped to 0, ..., categories - 1, as int64, such as for
            ``nn.Embedding``; 0: they stay as they are.

    Raises:
        ModelError: a size is not above 0, or the number of categories is below 0.
    """

    shape: tuple[int, ...] = ()
    categories: int = 0

    def __post_init__(self) -> None:
        if not all(type(size) is int and size > 0 for size in self.shape) or self.categories < 0:
            raise ModelError(f"{self}: shape must be a tuple of sizes above 0, and categories at least 0")

    @property
    def size(self) -> int:
        """Number of numbers."""
        return math.prod(self.shape)


#: A part, or a dict, list or tuple of inputs, which the network receives as such.
Inputs: TypeAlias = Part | Mapping[str, "Inputs"] | list["Inputs"] | tuple["Inputs", ...]


def with_inputs(network: nn.Module, *inputs: Inputs, **named: Inputs) -> nn.Module:
    """Return a network of one input that gives its parts, in the order of the arguments, to a network of several.

    For example, ``with_inputs(net, Part((1, 8, 8)), Part(categories=4))`` calls ``net(images, kinds)``,
    ``with_inputs(net, x=Part((3,)), y=Part())`` calls ``net(x=..., y=...)``, and ``with_inputs(net, {"x": Part()})``
    calls ``net({"x": ...})``.

    Args:
        network: a network.
        inputs: its positional arguments.
        named: its keyword arguments.

    Raises:
        ModelError: there are no parts, or one is nothing of :class:`Part`, dict, list and tuple.
    """
    from coterie.models.split_inputs import SplitInputs  # imports PyTorch

    parts = [*leaves(inputs), *leaves(named)]
    if not parts:
        raise ModelError("with_inputs: name the parts of an example")
    return SplitInputs(network, inputs, named, parts)


def leaves(inputs: object) -> Iterator[Part]:
    """Yield the parts of inputs, in order.

    Raises:
        ModelError: one is something else.
    """
    if isinstance(inputs, Part):
        yield inputs
    elif isinstance(inputs, Mapping | list | tuple):
        for one in inputs.values() if isinstance(inputs, Mapping) else inputs:
            yield from leaves(one)
    else:
        raise ModelError(f"with_inputs: {inputs!r} is no Part, nor a dict, list or tuple of parts")
