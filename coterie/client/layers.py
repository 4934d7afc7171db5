"""Networks with shared layers, which are sent, and personal layers, which stay at the client (FedPer)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from coterie.logs import printable
from coterie.models import trainable
from coterie.wire.messages import Layout

Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Layers:
    """Shared parameters of a network, those of a message, and personal parameters, all others.

    Attributes:
        whole: layout of the network's trainable part, D numbers.
        sent: layout of the shared parameters, d numbers.
        own: layout of the personal parameters, D - d numbers.
    """

    whole: Layout
    sent: Layout
    own: Layout

    @classmethod
    def of(cls, network: nn.Module, sent: Layout) -> Layers:
        """Return the layers of ``network`` if messages have the layout ``sent``.

        Raises:
            ValueError: the message holds parameters that the network lacks.
        """
        whole = Layout.of(trainable(network))
        shapes = dict(zip(whole.names, whole.shapes, strict=True))
        strange = [n for n, s in zip(sent.names, sent.shapes, strict=True) if shapes.get(n) != s]
        if strange:
            names = printable(", ".join(strange))
            raise ValueError(f"the message contains {names}, missing or shaped differently in the network")
        personal = tuple(name for name in whole.names if name not in sent.names)
        return cls(whole, sent, Layout(personal, tuple(shapes[name] for name in personal)))

    def join(self, sent: Vectors, own: Vectors) -> Vectors:
        """Combine (n, d) shared and (n, D - d) personal parameters to (n, D)."""
        if not self.own.names and self.whole == self.sent:
            return sent
        parts = {**self.sent.split(sent), **self.own.split(own)}
        return np.concatenate([parts[name].reshape(len(sent), -1) for name in self.whole.names], axis=1)

    def part(self, whole: Vectors) -> tuple[Vectors, Vectors]:
        """Split (n, D) into (n, d) shared and (n, D - d) personal parameters."""
        parts = self.whole.split(whole)
        sent, personal = (
            np.concatenate(
                [np.zeros((len(whole), 0), np.float32), *(parts[n].reshape(len(whole), -1) for n in names)], 1
            )
            for names in (self.sent.names, self.own.names)
        )
        return sent, personal


class Additive(nn.Module):
    """Two networks of one kind whose outputs are added (FedCAM); parameters ``global.*``, then ``cluster.*``."""

    def __init__(self, shared: nn.Module, own: nn.Module) -> None:
        super().__init__()
        self.add_module("global", shared)
        self.add_module("cluster", own)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both logits."""
        total: Tensor = self.get_submodule("global")(x) + self.get_submodule("cluster")(x)
        return total
