"""Check the network of a user before a run starts: what the built-in networks are known to satisfy."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from coterie.models.errors import ModelError
from coterie.models.networks import MODELS, Shape, build
from coterie.models.rows import DRAWN, Rows, batch, find_mixing

if TYPE_CHECKING:
    from torch import nn


def check_network(name: str, input_shape: Sequence[int], num_classes: int, kind: str) -> None:
    """Build a network given as ``module:function`` or by an entry point, and try it on random examples.

    It must have parameters and no batch normalisation, return (n, num_classes) finite logits, or (n,) numbers without
    classes, be deterministic, and treat every example by itself, whatever the other examples of a batch are. The last
    is tested on random and extreme examples, which proves nothing.

    Args:
        name: the model; built-in ones are not checked.
        input_shape: shape of an example, after the features.
        num_classes: 0 for real targets.
        kind: "images", "vectors" or "tokens".

    Raises:
        ModelError: it does not; the message names the layer or the shape, and what to do.
    """
    if name in MODELS:
        return
    import torch

    shape = tuple(input_shape)
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(0)
        network = build(name, shape, num_classes)
        _check_layers(name, network)
        fresh = copy.deepcopy(network)
        tokens = kind == "tokens"
        drawn = torch.randint(num_classes, (DRAWN, *shape)) if tokens else torch.randn(DRAWN, *shape)
        x = batch(drawn.numpy())
        outputs = _outputs(name, network, x, num_classes)
        _outputs(name, fresh, x[1::2], num_classes)
        for again in (network, fresh):
            if not np.array_equal(outputs, _outputs(name, again, x, num_classes)):
                raise ModelError(
                    f"model '{name}': two calls with the same examples differ; remove dropout and other randomness, "
                    "which would stay active in evaluation, and any state between calls"
                )
        _check_rows(name, network, x, num_classes, kind)


def _check_rows(name: str, network: nn.Module, x: Rows, num_classes: int, input_kind: str) -> None:
    """Check that the network treats every example by itself, in float32 and if possible in float64."""
    import torch

    largest = 1.0 if input_kind == "images" else 1e3
    levels = [0, num_classes - 1] if input_kind == "tokens" else [0, largest, -largest]
    others = np.stack([np.full(x.shape[1:], level, x.dtype) for level in levels])
    with torch.no_grad():
        for parameter in network.parameters():
            if (parameter == parameter.flatten()[0]).all():  # a last layer of zeros would hide what precedes it
                parameter.add_(0.1 * torch.randn_like(parameter))
    double = copy.deepcopy(network).double()
    wide = x if input_kind == "tokens" else x.astype(np.float64)
    try:
        exact = _outputs(name, double, wide, num_classes, finite=False).dtype == np.float64
    except ModelError:  # a network of float32 only
        exact = False
    for module, inputs in [(network, x), (double, wide)] if exact else [(network, x)]:

        def evaluate(changed: Rows, shake: float, module: nn.Module = module) -> Rows:
            return _outputs(name, _shaken(module, shake), changed, num_classes, finite=False)

        mixing = find_mixing(evaluate, inputs, others.astype(inputs.dtype), "example")
        if mixing:
            raise ModelError(
                f"model '{name}': output {mixing[0]} of an example changes with {mixing[1]}; replace batch "
                "normalisation and other statistics of a batch, for example by GroupNorm"
            )


def _shaken(network: nn.Module, shake: float) -> nn.Module:
    """Return the network with parameters changed by a relative amount, with random signs, the same in each call."""
    import torch

    if not shake:
        return network
    network = copy.deepcopy(network)
    torch.default_generator.manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            signs = 2 * torch.randint(2, parameter.shape, dtype=parameter.dtype) - 1
            parameter.mul_(1 + shake * signs)
    return network


def _check_layers(name: str, network: nn.Module) -> None:
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.nn.parameter import is_lazy

    if not list(network.parameters()):
        raise ModelError(f"model '{name}' has no parameters to train")
    for layer, module in network.named_modules():
        if isinstance(module, _BatchNorm):
            raise ModelError(
                f"model '{name}': layer '{layer}' ({type(module).__name__}) mixes the examples of a batch, and its "
                "statistics are no parameters; use GroupNorm"
            )
        if any(is_lazy(parameter) for parameter in module.parameters(recurse=False)):
            raise ModelError(
                f"model '{name}': layer '{layer}' ({type(module).__name__}) has no shape before its first call; give "
                "its input size"
            )


def _outputs(name: str, network: nn.Module, x: Rows, num_classes: int, finite: bool = True) -> Rows:
    """Return the outputs, of the expected shape."""
    import torch

    try:
        with torch.no_grad():
            outputs = network(torch.tensor(x))
    except Exception as error:  # a user's code
        raise ModelError(
            f"model '{name}' fails on examples of shape {_sizes(x.shape[1:])}: {type(error).__name__}: "
            f"{' '.join(str(error).split())}"
        ) from error
    wanted: Shape = (len(x), num_classes) if num_classes else (len(x),)
    actual_shape = tuple(outputs.shape) if isinstance(outputs, torch.Tensor) else type(outputs).__name__
    if actual_shape != wanted:
        what = f"one logit for each of {num_classes} classes" if num_classes else "one number for each example"
        raise ModelError(f"model '{name}' returns {actual_shape} for {len(x)} examples; expected {wanted}, {what}")
    if finite and not torch.isfinite(outputs).all():
        raise ModelError(f"model '{name}': its initial outputs are not finite; check the initialisation")
    return np.asarray(outputs.to(torch.promote_types(outputs.dtype, torch.float32)))


def _sizes(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
