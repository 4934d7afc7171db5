"""The module of :func:`coterie.models.with_inputs`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from coterie.models.several_inputs import Inputs, Part


class SplitInputs(nn.Module):
    """Splits examples into parts, and gives them to a network as its arguments.

    Args:
        network: the network.
        inputs: its positional arguments.
        named: its keyword arguments.
        parts: of both, in order.
    """

    def __init__(
        self, network: nn.Module, inputs: tuple[Inputs, ...], named: Mapping[str, Inputs], parts: Sequence[Part]
    ) -> None:
        super().__init__()
        self.network, self._inputs, self._named, self._parts = network, inputs, dict(named), list(parts)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs for (n, *shape) examples.

        Raises:
            ValueError: an example has more or fewer numbers than the parts.
        """
        flat, sizes = x.flatten(1), [part.size for part in self._parts]
        if flat.shape[1] != sum(sizes):
            raise ValueError(f"the parts of with_inputs have {sum(sizes)} numbers, an example has {flat.shape[1]}")
        pieces = zip(torch.split(flat, sizes, 1), self._parts, strict=True)
        tensors = iter([_shaped(piece, part) for piece, part in pieces])
        arguments = [_filled(one, tensors) for one in self._inputs]
        outputs: Tensor = self.network(*arguments, **{key: _filled(one, tensors) for key, one in self._named.items()})
        return outputs


def _shaped(piece: Tensor, part: Part) -> Tensor:
    if part.categories:
        numbers = piece.round().nan_to_num() if piece.is_floating_point() else piece
        piece = numbers.clamp(0, part.categories - 1).long()
    return piece.reshape(piece.shape[0], *part.shape) if part.shape else piece[:, 0]


def _filled(inputs: Inputs, tensors: Iterator[Tensor]) -> Any:
    """Return the structure with the next tensors for its parts."""
    if isinstance(inputs, Part):
        return next(tensors)
    if isinstance(inputs, Mapping):
        return {key: _filled(one, tensors) for key, one in inputs.items()}
    return type(inputs)(_filled(one, tensors) for one in inputs)
