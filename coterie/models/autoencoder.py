"""The stacked autoencoders of PPFC-GAN (Table A.8), and the labeller that clients receive: an encoder and centroids.

Clients label each record independently of others, so the labeller has no batch normalisation: its statistics are
folded into the linear layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_linear_bn_eval

#: Widths of the encoder in Table A.8; the decoder mirrors them, and the last one is the code.
WIDTHS = (500, 500, 2000, 10)
# Examples per forward pass of the labeller.
_CHUNK = 4096


class Autoencoder(nn.Module):
    """Encoder and decoder of vectors (n, F).

    Table A.8: ReLU and batch normalisation in every layer, except for the last layer of the decoder, which has
    neither, and the first layer, which has no normalisation.

    Args:
        features: F.
        linear_code: omit ReLU and batch normalisation after the code.
    """

    def __init__(self, features: int, *, linear_code: bool) -> None:
        super().__init__()
        sizes = list(pairwise(WIDTHS))
        self.encoder = nn.Sequential(
            nn.Linear(features, WIDTHS[0]), nn.ReLU(), *(layer for a, b in sizes for layer in _normalised(a, b))
        )
        if linear_code:
            del self.encoder[-2:]
        self.decoder = nn.Sequential(
            *(layer for a, b in reversed(sizes) for layer in _normalised(b, a)), nn.Linear(WIDTHS[0], features)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (n, code) codes and (n, F) reconstructions of (n, F) vectors."""
        codes = self.encoder(x)
        return codes, self.decoder(codes)


def _normalised(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU()]


class Labeller(nn.Module):
    """Map examples to scores (n, k): the negative squared distance of the code to every centroid, Equation (4).

    Args:
        shape: of an example.
        k: number of centroids.
        encoder: a key of :data:`ENCODERS`, or "none": the examples are the codes.
    """

    def __init__(self, shape: Sequence[int], k: int, encoder: str) -> None:
        super().__init__()
        sizes = [int(np.prod(shape)), *(() if encoder == "none" else WIDTHS)]
        layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
        self.encoder = nn.Sequential(nn.Flatten(), *(layers[:-1] if ENCODERS.get(encoder) else layers))
        self.centroids = nn.Parameter(torch.zeros(k, sizes[-1]))

    def forward(self, x: Tensor) -> Tensor:
        """Return (n, k) scores; the largest gives the label."""
        return -torch.cdist(self.encoder(x), self.centroids).square()

    @torch.no_grad()
    def label(self, x: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
        """Return the (n,) indices of the nearest centroids of (n, *shape) examples, computed in chunks."""
        parts = torch.split(torch.as_tensor(x), _CHUNK)
        labels = [self(chunk.to(self.centroids.device)).argmax(dim=1).cpu() for chunk in parts]
        return np.asarray(torch.cat(labels).numpy())


#: Whether the code of an encoder is linear, by name. After batch normalisation and ReLU, codes hardly move towards
#: centroids (docs/results.md).
ENCODERS = {"sae": True, "sae-relu": False}


@torch.no_grad()
def scaled_input(labeller: Labeller, factor: float) -> Labeller:
    """Return the labeller of examples x that equals this one at x * factor; it has a linear layer."""
    first = next(layer for layer in labeller.encoder if isinstance(layer, nn.Linear))
    first.weight *= factor
    return labeller


def folded(encoder: nn.Sequential) -> list[nn.Linear]:
    """Return linear layers equivalent to ``encoder`` in evaluation mode, with batch normalisation folded in."""
    layers: list[nn.Linear] = []
    for layer in encoder:
        if isinstance(layer, nn.Linear):
            layers.append(layer)
        elif isinstance(layer, nn.BatchNorm1d):
            layers[-1] = fuse_linear_bn_eval(layers[-1].eval(), layer.eval())
    return layers
