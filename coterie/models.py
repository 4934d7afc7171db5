"""The networks of the papers, by name, and fixed features that can stand in front of them.

Every network is a plain chain of layers without buffers, dropout, batch normalisation or in-place operations,
so that it works per example under Opacus and, as a function of its parameters, under `torch.func`. torch is
imported when a network is built, so that listing names costs nothing.
"""

from __future__ import annotations

import difflib
import importlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import nn

Shape = tuple[int, int, int]
Builder = Callable[[Shape, int], "nn.Module"]
Features = Callable[[npt.NDArray[np.float32]], npt.NDArray[np.float32]]


class ModelError(ValueError):
    """A network or a feature that cannot be had; the message says which and what to do."""


@dataclass(frozen=True)
class ModelInfo:
    """A network: `source` uses it; `batched`: a CPU runs a cohort best as batched matrix products."""

    name: str
    title: str
    source: str
    batched: bool
    builder: Builder


@dataclass(frozen=True)
class FeatureInfo:
    """A fixed function of float32 images (n, C, H, W), each image alone, to float32 (n, C', H', W')."""

    name: str
    title: str
    apply: Features


def build(name: str, input_shape: Sequence[int], num_classes: int) -> nn.Module:
    """A new network from images (n, *input_shape) to logits (n, num_classes), as torch initialises it.

    Args:
        name: a key of `MODELS`, or `module:function` of the user's, called with (input_shape, num_classes).
        input_shape: (C, H, W).
        num_classes: number of logits.

    Raises:
        ModelError: unknown name, impossible shape, an image too small for the network, or a user's function
            that does not return a `torch.nn.Module`.
    """
    shape = tuple(int(size) for size in input_shape)
    if len(shape) != 3 or not min(shape) >= 1:
        raise ModelError(f"input_shape is {tuple(input_shape)}; it must be three positive sizes (C, H, W)")
    if not num_classes >= 1:
        raise ModelError(f"num_classes is {num_classes}; it must be at least 1")
    if ":" in name:
        return _build_own(name, shape, num_classes)
    if name not in MODELS:
        raise ModelError(f"{_unknown('model', name, MODELS)}, or module:function of your own")
    return MODELS[name].builder(shape, num_classes)


def initialise(
    name: str, input_shape: Sequence[int], num_classes: int, seed: int
) -> dict[str, npt.NDArray[np.float32]]:
    """The parameters that `build` gives right after `torch.manual_seed(seed)`, in `named_parameters` order.

    torch's global generators are left as they were.

    Raises:
        ModelError: see `build`.
    """
    import torch

    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also reseed every GPU
        module = build(name, input_shape, num_classes)
    return {key: value.detach().numpy().astype(np.float32) for key, value in module.named_parameters()}


def num_parameters(module: nn.Module) -> int:
    """How many numbers a module learns."""
    return sum(parameter.numel() for parameter in module.parameters())


def features(name: str) -> Features:
    """The feature function called `name`, a key of `FEATURES`; the same object every time.

    Raises:
        ModelError: unknown name.
    """
    if name not in FEATURES:
        raise ModelError(_unknown("features", name, FEATURES))
    return FEATURES[name].apply


def identity(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The images as they are."""
    return x


def pool2(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """2×2 average pooling, (n, C, H, W) to (n, C, H//2, W//2); an odd last row or column is dropped.

    Raises:
        ModelError: images of a single row or column.
    """
    height, width = x.shape[2] // 2 * 2, x.shape[3] // 2 * 2
    if not min(height, width) >= 2:
        raise ModelError(f"features 'pool2' need images of at least 2×2, not {x.shape[2]}×{x.shape[3]}")
    rows = x[:, :, 0:height:2] + x[:, :, 1:height:2]
    return (rows[..., 0:width:2] + rows[..., 1:width:2]) * np.float32(0.25)


def _chain(**layers: nn.Module) -> nn.Module:
    from torch import nn

    return nn.Sequential(OrderedDict(layers))


def _linear(shape: Shape, num_classes: int) -> nn.Module:
    from torch import nn

    return _chain(flatten=nn.Flatten(), output=nn.Linear(int(np.prod(shape)), num_classes))


def _mlp(width: int) -> Builder:
    def builder(shape: Shape, num_classes: int) -> nn.Module:
        from torch import nn

        return _chain(
            flatten=nn.Flatten(),
            hidden=nn.Linear(int(np.prod(shape)), width),
            relu=nn.ReLU(),
            output=nn.Linear(width, num_classes),
        )

    return builder


def _cnn_tiny(shape: Shape, num_classes: int) -> nn.Module:
    from torch import nn

    channels, height, width = _at_least("cnn-tiny", shape, 4)
    return _chain(
        conv1=nn.Conv2d(channels, 8, 3, padding=1),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(8, 20, 3, padding=1),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
        output=nn.Linear(20 * (height // 4) * (width // 4), num_classes),
    )


def _cnn_small(shape: Shape, num_classes: int) -> nn.Module:
    from torch import nn

    channels, height, width = _at_least("cnn-small", shape, 4)
    return _chain(
        conv1=nn.Conv2d(channels, 16, 5, padding=2),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(16, 32, 5, padding=2),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
        hidden=nn.Linear(32 * (height // 4) * (width // 4), 128),
        relu3=nn.ReLU(),
        output=nn.Linear(128, num_classes),
    )


def _lenet(shape: Shape, num_classes: int) -> nn.Module:
    from torch import nn

    channels, height, width = _at_least("lenet", shape, 12)
    return _chain(
        conv1=nn.Conv2d(channels, 6, 5, padding=2),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(6, 16, 5),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
        hidden1=nn.Linear(16 * ((height // 2 - 4) // 2) * ((width // 2 - 4) // 2), 120),
        relu3=nn.ReLU(),
        hidden2=nn.Linear(120, 84),
        relu4=nn.ReLU(),
        output=nn.Linear(84, num_classes),
    )


def _at_least(name: str, shape: Shape, side: int) -> Shape:
    if min(shape[1:]) < side:
        raise ModelError(
            f"model '{name}' needs images of at least {side}×{side}, not {shape[1]}×{shape[2]}; use "
            "'linear', 'mlp-32', or features that keep more of the image"
        )
    return shape


def _build_own(name: str, shape: Shape, num_classes: int) -> nn.Module:
    from torch import nn

    module, _, function = name.partition(":")
    try:
        make = getattr(importlib.import_module(module), function)
    except Exception as error:  # importing runs the user's code
        raise ModelError(
            f"model '{name}': cannot import {function or '(nothing)'} from {module or '(nothing)'} "
            f"({type(error).__name__}: {error}); write module:function, its folder on PYTHONPATH"
        ) from error
    if not callable(make):
        raise ModelError(f"model '{name}': {function} is a {type(make).__name__}, not a function")
    try:
        built = make(shape, num_classes)
    except Exception as error:
        raise ModelError(
            f"model '{name}': {function}({shape}, {num_classes}) failed: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(built, nn.Module):
        raise ModelError(
            f"model '{name}': {function} returned a {type(built).__name__}; it must return a torch.nn.Module"
        )
    return built


def _unknown(kind: str, name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    nearest = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.0)[0]
    return f"unknown {kind} '{name}'; the nearest is '{nearest}'; there are {', '.join(names)}"


MODELS: dict[str, ModelInfo] = {
    info.name: info
    for info in (
        ModelInfo("linear", "softmax regression", "convex case of IFCA and RR-Cluster", True, _linear),
        ModelInfo(
            "mlp-32", "one hidden layer of 32, ReLU", "our default; RR-Cluster's tables on pool2", True, _mlp(32)
        ),
        ModelInfo("mlp-200", "one hidden layer of 200, ReLU", "IFCA, Ghosh et al. 2020", True, _mlp(200)),
        ModelInfo("cnn-tiny", "conv3×3 8, conv3×3 20, output", "RR-Cluster's tables", False, _cnn_tiny),
        ModelInfo("cnn-small", "conv5×5 16, conv5×5 32, fc 128, output", "RC-DPFL", False, _cnn_small),
        ModelInfo("lenet", "LeNet-5 with ReLU and max pooling", "LeCun et al. 1998", False, _lenet),
    )
}

FEATURES: dict[str, FeatureInfo] = {
    info.name: info
    for info in (
        FeatureInfo("none", "the images as they are", identity),
        FeatureInfo("pool2", "2×2 average pooling", pool2),
    )
}
