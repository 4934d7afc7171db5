"""The generative adversarial networks of PPFC-GAN, its Tables A.5 to A.7, by name.

A GAN is an `nn.ModuleDict` of two parts: `generator`, from (n, normals + categories) latent vectors to examples, and
`discriminator`, from examples (n, *shape) to logits (n, 1) that are high for real examples. Each GAN has a variant with
GroupNorm instead of batch normalisation (`-gn`), which treats examples independently, as DP-SGD requires.

Batch normalisation has no running statistics, so examples are generated in batches of the size used in training.
torch is imported when a network is built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from coterie.fields.plugins import unknown
from coterie.models.errors import ModelError

if TYPE_CHECKING:
    from torch import nn

Shape = tuple[int, ...]
#: Returns a normalisation layer from the number of features and whether they are of images.
Norm = Callable[[int, bool], "nn.Module"]

_SLOPE = 0.2  # of LeakyReLU, in all tables
_GROUPS = 8  # of GroupNorm; divides every width of the tables


@dataclass(frozen=True)
class GANInfo:
    """A GAN and its optimisers.

    Attributes:
        name: key of `GANS`.
        title: its layers.
        source: the paper's table.
        normals: number of Gaussian entries of a latent vector; a one-hot category follows them.
        low: smallest output of the generator: 0 for a final sigmoid, -1 for tanh. The largest is 1.
        shape: supported shape of examples; None: any, which is flattened.
        parts: builds generator and discriminator from (shape, latent size, normalisation layer).
        records_apart: whether examples are treated independently.
        lr: Adam's step sizes of generator and discriminator.
        betas: Adam's betas.
    """

    name: str
    title: str
    source: str
    normals: int
    low: float
    shape: Shape | None
    parts: Callable[[Shape, int, Norm], tuple[nn.Module, nn.Module]]
    records_apart: bool = False
    lr: tuple[float, float] = (6e-4, 2e-4)
    betas: tuple[float, float] = (0.5, 0.999)


def gan_for(shape: Sequence[int], *, private: bool = False) -> str:
    """Return the name of the GAN for examples of this shape: the paper's for its images, otherwise that for vectors.

    For vectors it has GroupNorm. The discriminator of Table A.7 normalises real and generated batches separately in
    its first layer, and cannot detect a difference of their means; GroupNorm gives samples several times nearer to
    the data (docs/results.md).

    Args:
        shape: of an example.
        private: whether records must be treated independently.
    """
    fits = [info.name for info in GANS.values() if info.shape == tuple(shape) and info.records_apart == private]
    return fits[0] if fits else "gan-pendigits-gn"


def check_gan(name: str, shape: Sequence[int]) -> None:
    """Check that a GAN supports examples of this shape.

    Raises:
        ModelError: the name is unknown, or the shape is not supported.
    """
    if name not in GANS:
        raise ModelError(unknown("gan", name, GANS))
    wanted = GANS[name].shape
    if wanted not in (None, tuple(shape)):
        fits = gan_for(shape, private=GANS[name].records_apart)
        raise ModelError(f"gan '{name}' generates examples of shape {wanted}, not {tuple(shape)}; use '{fits}'")


def build_gan(name: str, shape: Sequence[int], categories: int) -> nn.ModuleDict:
    """Build a GAN with torch's default initialisation.

    Args:
        name: a key of `GANS`.
        shape: of an example: (C, H, W) or (F,).
        categories: length of the one-hot part of a latent vector, k.

    Raises:
        ModelError: the name is unknown, or the shape is not supported.
    """
    from torch import nn

    check_gan(name, shape)
    info, shape = GANS[name], tuple(int(size) for size in shape)
    generator, discriminator = info.parts(shape, info.normals + categories, _group if info.records_apart else _batch)
    return nn.ModuleDict({"generator": generator, "discriminator": discriminator})


def _batch(width: int, images: bool) -> nn.Module:
    from torch import nn

    return (nn.BatchNorm2d if images else nn.BatchNorm1d)(width, track_running_stats=False)


def _group(width: int, images: bool) -> nn.Module:
    from torch import nn

    return nn.GroupNorm(_GROUPS, width)


def _leaky(*layers: Any) -> list[Any]:
    from torch import nn

    return [*layers, nn.LeakyReLU(_SLOPE)]


def _relu(*layers: Any) -> list[Any]:
    from torch import nn

    return [*layers, nn.ReLU()]


def _grey_images(third: bool) -> Callable[[Shape, int, Norm], tuple[nn.Module, nn.Module]]:
    """Table A.5; the GAN for Fashion-MNIST lacks the third convolution of the discriminator."""

    def parts(shape: Shape, latent: int, norm: Norm) -> tuple[nn.Module, nn.Module]:
        from torch import nn

        generator = nn.Sequential(
            *_relu(nn.Linear(latent, 1024), norm(1024, False)),
            *_relu(nn.Linear(1024, 6272), norm(6272, False)),
            nn.Unflatten(1, (128, 7, 7)),
            *_relu(nn.ConvTranspose2d(128, 64, 4, 2, 1), norm(64, True)),
            nn.ConvTranspose2d(64, 1, 4, 2, 1),
            nn.Sigmoid(),
        )
        last = _leaky(nn.Conv2d(128, 256, 4, 2, 1), norm(256, True)) if third else []
        discriminator = nn.Sequential(
            *_leaky(nn.Conv2d(1, 64, 4, 2, 1), norm(64, True)),
            *_leaky(nn.Conv2d(64, 128, 4, 2, 1), norm(128, True)),
            *last,
            nn.Flatten(),
            *_leaky(nn.Linear(256 * 3 * 3 if third else 128 * 7 * 7, 1024), norm(1024, False)),
            nn.Linear(1024, 1),
        )
        return generator, discriminator

    return parts


def _colour_images(shape: Shape, latent: int, norm: Norm) -> tuple[nn.Module, nn.Module]:
    """Table A.6."""
    from torch import nn

    generator = nn.Sequential(
        nn.Unflatten(1, (latent, 1, 1)),
        *_relu(nn.ConvTranspose2d(latent, 128, 4, 1, 0), norm(128, True)),
        *_relu(nn.ConvTranspose2d(128, 64, 4, 2, 1), norm(64, True)),
        *_relu(nn.ConvTranspose2d(64, 32, 4, 2, 1), norm(32, True)),
        nn.ConvTranspose2d(32, 3, 4, 2, 1),
        nn.Tanh(),
    )
    discriminator = nn.Sequential(
        *_leaky(nn.Conv2d(3, 32, 4, 2, 1)),
        *_leaky(nn.Conv2d(32, 64, 4, 2, 1), norm(64, True)),
        *_leaky(nn.Conv2d(64, 128, 4, 2, 1), norm(128, True)),
        nn.Conv2d(128, 1, 4, 1, 0),
        nn.Flatten(),
    )
    return generator, discriminator


def _vectors(shape: Shape, latent: int, norm: Norm) -> tuple[nn.Module, nn.Module]:
    """Table A.7, which has 16 features."""
    from torch import nn

    size = int(np.prod(shape))
    generator = nn.Sequential(
        *_leaky(nn.Linear(latent, 256), norm(256, False)),
        *_leaky(nn.Linear(256, 256), norm(256, False)),
        nn.Linear(256, size),
        nn.Sigmoid(),
        *([nn.Unflatten(1, shape)] if len(shape) > 1 else []),
    )
    discriminator = nn.Sequential(
        *([nn.Flatten()] if len(shape) > 1 else []),
        *_leaky(nn.Linear(size, 256), norm(256, False)),
        *_leaky(nn.Linear(256, 256), norm(256, False)),
        nn.Linear(256, 1),
    )
    return generator, discriminator


_CONVOLUTIONS = "generator fc 1024, fc 6272, deconv4×4 64, deconv4×4 1; discriminator conv4×4 64, 128, {}fc 1024, 1"
_PLAIN = (
    GANInfo(
        "gan-mnist", _CONVOLUTIONS.format("256, "), "PPFC-GAN, Table A.5", 62, 0.0, (1, 28, 28), _grey_images(True)
    ),
    GANInfo("gan-fashion", _CONVOLUTIONS.format(""), "PPFC-GAN, Table A.5", 62, 0.0, (1, 28, 28), _grey_images(False)),
    GANInfo(
        "gan-cifar",
        "generator deconv4×4 128, 64, 32, 3; discriminator conv4×4 32, 64, 128, 1",
        "PPFC-GAN, Table A.6",
        62,
        -1.0,
        (3, 32, 32),
        _colour_images,
    ),
    GANInfo(
        "gan-pendigits", "fc 256, fc 256, on vectors, in both parts", "PPFC-GAN, Table A.7", 5, 0.0, None, _vectors
    ),
)

#: All GANs.
GANS: dict[str, GANInfo] = {
    info.name: info
    for plain in _PLAIN
    for info in (
        plain,
        GANInfo(
            **{**vars(plain), "name": f"{plain.name}-gn", "title": f"{plain.title}; GroupNorm", "records_apart": True}
        ),
    )
}
