"""The networks of the papers, by name.

Networks consist of layers without buffers, dropout, batch normalisation or in-place operations, so that they work per
example under Opacus and, as functions of their parameters, under `torch.func`. torch is imported when a network is
built, so that listing names is fast.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from coterie.fields.plugins import PluginError, load_function, provided, unknown
from coterie.models.errors import ModelError
from coterie.models.spec import NetworkSpec
from coterie.models.trainable import constants, float32_arrays, sizes

if TYPE_CHECKING:
    from torch import Tensor, nn

Shape = tuple[int, ...]
#: A model by name, or with what of it trains.
Model = str | NetworkSpec
Builder = Callable[[Shape, int], "nn.Module"]

#: Shape of an example, by kind of input.
_SHAPES = {"images": "(C, H, W)", "tokens": "(L,)", "vectors": "(F,)"}
# Inputs of networks that flatten them.
_FLAT = ("images", "vectors")
_EITHER = ("logits", "number")


@dataclass(frozen=True)
class ModelInfo:
    """A network.

    Attributes:
        name: key of `MODELS`.
        title: its layers.
        source: paper that uses it.
        builder: builds the network from the shape of an example and the number of classes.
        takes: supported inputs: "images", "tokens" (as many distinct ones as classes) or "vectors".
        outputs: what it supports: "logits", or a "number" per example for data without classes.
    """

    name: str
    title: str
    source: str
    builder: Builder
    takes: tuple[str, ...] = ("images",)
    outputs: tuple[str, ...] = ("logits",)


def build(name: Model, input_shape: Sequence[int], num_classes: int) -> nn.Module:
    """Build a network from examples (n, *input_shape) to logits (n, num_classes), with torch's default initialisation.

    Args:
        name: a key of `MODELS`; or a custom `module:function` or an entry point of the group `coterie.models`, called
            with (input_shape, num_classes); or one of these with what of it trains.
        input_shape: (C, H, W) of images, (L,) of tokens, or (F,) of vectors.
        num_classes: number of logits; 0 for a network that outputs one real number per example, (n,).

    Raises:
        ModelError: the name is unknown; the network does not support the shape or the number of classes; or a custom
            function does not return a `torch.nn.Module`; or adapters do not fit it.
    """
    shape = tuple(int(size) for size in input_shape)
    if len(shape) not in (1, 3) or not min(shape) >= 1:
        raise ModelError(
            f"input_shape is {tuple(input_shape)}; it must be (C, H, W) for images, (L,) for tokens or (F,) for "
            "vectors, with positive sizes"
        )
    if not num_classes >= 0:
        raise ModelError(f"num_classes is {num_classes}; it must be at least 1, or 0 for regression")
    spec = NetworkSpec(name) if isinstance(name, str) else name
    return spec.build(lambda: _build(spec.model, shape, num_classes))


def _build(name: str, shape: Shape, num_classes: int) -> nn.Module:
    if name not in MODELS:
        if provided("model", name):
            return _build_own(name, shape, num_classes)
        raise ModelError(f"{unknown('model', name, MODELS)}, or a custom module:function")
    _check_fits(MODELS[name], shape, num_classes)
    return MODELS[name].builder(shape, num_classes)


def is_tested(name: Model) -> bool:
    """Whether a network is one of Coterie's own as it is, without constants, which needs no check."""
    return name in MODELS if isinstance(name, str) else name.model in MODELS and not name.freezes


def _check_fits(info: ModelInfo, shape: Shape, num_classes: int) -> None:
    fitting = {input_kind for input_kind in _SHAPES if (input_kind == "images") == (len(shape) == 3)}
    if not fitting & set(info.takes):
        takes = " or ".join(f"{input_kind} {_SHAPES[input_kind]}" for input_kind in info.takes)
        others = ", ".join(sorted(name for name, other in MODELS.items() if fitting & set(other.takes)))
        raise ModelError(
            f"model '{info.name}' expects {takes}, not examples of shape {shape}; use {others}, or other data"
        )
    needed = "logits" if num_classes else "number"
    if needed not in info.outputs:
        wanted = "at least 1" if num_classes == 0 else "0 (real targets)"
        others = ", ".join(sorted(name for name, other in MODELS.items() if needed in other.outputs))
        raise ModelError(
            f"model '{info.name}' outputs {'logits' if num_classes == 0 else 'one number'}: num_classes is "
            f"{num_classes}, but must be {wanted}; use {others}, or other data"
        )


def check_kind(name: str, kind: str) -> None:
    """Check that a network in `MODELS` supports a kind of examples; tokens and vectors have similar shapes.

    Raises:
        ModelError: the network does not support it.
    """
    if name in MODELS and kind not in MODELS[name].takes:
        others = ", ".join(sorted(other.name for other in MODELS.values() if kind in other.takes))
        raise ModelError(f"model '{name}' expects {' or '.join(MODELS[name].takes)}, not {kind}; use {others}")


def initialise(
    name: Model, input_shape: Sequence[int], num_classes: int, seed: int
) -> dict[str, npt.NDArray[np.float32]]:
    """Draw the initial parameters of a network from `build`; see `drawn`.

    Raises:
        ModelError: see `build`.
    """
    return drawn(lambda: build(name, input_shape, num_classes), seed)


def constants_of(name: Model, input_shape: Sequence[int], num_classes: int) -> dict[str, Tensor]:
    """Return the constants of a network from `build`; Coterie's own have none (models/trainable.py).

    Raises:
        ModelError: see `build`.
    """
    import torch

    if is_tested(name):
        return {}
    with torch.random.fork_rng(devices=()):
        return constants(build(name, input_shape, num_classes))


def sizes_of(name: Model, input_shape: Sequence[int], num_classes: int) -> tuple[int, int]:
    """Return :func:`~coterie.models.trainable.sizes` of a network from `build`.

    Raises:
        ModelError: see `build`.
    """
    import torch

    with torch.random.fork_rng(devices=()):
        return sizes(build(name, input_shape, num_classes))


def drawn(make: Callable[[], nn.Module], seed: int) -> dict[str, npt.NDArray[np.float32]]:
    """Return the trainable parameters of ``make()`` called after `torch.manual_seed(seed)`; see models/trainable.py.

    The state of torch's global generators is restored.
    """
    import torch

    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also reseed every GPU
        module = make()
    return float32_arrays(module)


def _chain(**layers: nn.Module) -> nn.Module:
    from torch import nn

    return nn.Sequential(OrderedDict(layers))


def _linear(shape: Shape, num_classes: int) -> nn.Module:
    from torch import nn

    return _chain(flatten=nn.Flatten(), **_output(int(np.prod(shape)), num_classes))


def _mlp(width: int) -> Builder:
    def builder(shape: Shape, num_classes: int) -> nn.Module:
        from torch import nn

        return _chain(
            flatten=nn.Flatten(),
            hidden=nn.Linear(int(np.prod(shape)), width),
            relu=nn.ReLU(),
            **_output(width, num_classes),
        )

    return builder


def _output(width: int, num_classes: int) -> dict[str, nn.Module]:
    """Return the last layers: logits of classes, or one number."""
    from torch import nn

    number = {} if num_classes else {"number": nn.Flatten(0)}
    return {"output": nn.Linear(width, max(num_classes, 1)), **number}


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


def _cnn_cells(shape: Shape, num_classes: int) -> nn.Module:
    from torch import nn

    channels, height, width = shape
    return _chain(
        conv=nn.Conv2d(channels, 16, 3, padding=1),
        relu=nn.ReLU(),
        flatten=nn.Flatten(),
        output=nn.Linear(16 * height * width, num_classes),
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


def _lstm_char(shape: Shape, num_classes: int) -> nn.Module:
    from coterie.models.lstm import CharLSTM

    return CharLSTM(num_classes, embedding=8, width=64)


def _resnet18_gn(shape: Shape, num_classes: int) -> nn.Module:
    from coterie.models.resnet import ResNet18

    return ResNet18(shape[0], num_classes)


def _regression(shape: Shape, num_classes: int) -> nn.Module:
    from torch import nn

    return _chain(output=nn.Linear(shape[0], 1), number=nn.Flatten(0))


def _at_least(name: str, shape: Shape, side: int) -> Shape:
    if min(shape[1:]) < side:
        raise ModelError(
            f"model '{name}' requires images of at least {side}×{side}, not {shape[1]}×{shape[2]}; use "
            "'linear', 'mlp-32', or features of higher resolution"
        )
    return shape


def _build_own(name: str, shape: Shape, num_classes: int) -> nn.Module:
    from torch import nn

    try:
        make = load_function("model", name, ["input_shape", "num_classes"])
    except PluginError as error:
        raise ModelError(str(error)) from error
    function = name.rpartition(":")[2]
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


#: All networks.
MODELS: dict[str, ModelInfo] = {
    info.name: info
    for info in (
        ModelInfo(
            "linear",
            "softmax regression, or linear regression of real targets",
            "convex case of IFCA and RR-Cluster",
            _linear,
            _FLAT,
            _EITHER,
        ),
        ModelInfo(
            "mlp-32",
            "one hidden layer of 32, ReLU",
            "our default; RR-Cluster's tables on pool2",
            _mlp(32),
            _FLAT,
            _EITHER,
        ),
        ModelInfo("mlp-200", "one hidden layer of 200, ReLU", "IFCA, Ghosh et al. 2020", _mlp(200), _FLAT, _EITHER),
        ModelInfo("cnn-tiny", "conv3×3 8, conv3×3 20, output", "RR-Cluster's tables", _cnn_tiny),
        ModelInfo("cnn-cells", "conv3×3 16 without pooling, output", "our own, for features = hog", _cnn_cells),
        ModelInfo("cnn-small", "conv5×5 16, conv5×5 32, fc 128, output", "RC-DPFL", _cnn_small),
        ModelInfo("lenet", "LeNet-5 with ReLU and max pooling", "LeCun et al. 1998", _lenet),
        ModelInfo("resnet18-gn", "ResNet-18 with GroupNorm, 11 million parameters", "RC-DPFL", _resnet18_gn),
        ModelInfo("lstm-char", "embedding 8, LSTM 64, output", "RR-Cluster's Shakespeare", _lstm_char, ("tokens",)),
        ModelInfo("regression", "one affine function", "RR-Cluster's lines", _regression, ("vectors",), ("number",)),
    )
}
