"""Check the network of a user before a run starts: what the built-in networks are known to satisfy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from coterie.models.errors import ModelError
from coterie.models.networks import MODELS, Shape, build

if TYPE_CHECKING:
    from torch import Tensor, nn

# Relative difference of outputs that rounding explains: kernels depend on the size of a batch.
_ROUNDING = 1e-3


def check_network(name: str, input_shape: Sequence[int], num_classes: int, kind: str) -> None:
    """Build a network given as ``module:function`` or by an entry point, and try it on random examples.

    It must have parameters and no batch normalisation, return (n, num_classes) finite logits, or (n,) numbers without
    classes, be deterministic, and treat every example by itself, whatever the other examples of a batch are.

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
        x = torch.randint(num_classes, (2, *shape)) if kind == "tokens" else torch.randn(2, *shape)
        outputs = _outputs(name, network, x, num_classes)
        if not torch.equal(outputs, _outputs(name, network, x, num_classes)):
            raise ModelError(
                f"model '{name}': two calls with the same examples differ; remove dropout and other randomness, which "
                "would stay active in evaluation"
            )
        alone = torch.cat([_outputs(name, network, one, num_classes) for one in (x[:1], x[1:])])
    scale = max(float(outputs.abs().max()), 1e-6)
    if not float((alone - outputs).abs().max()) <= _ROUNDING * scale:
        raise ModelError(
            f"model '{name}': its output for an example depends on the other examples of the batch; replace batch "
            "normalisation and other statistics of a batch, for example by GroupNorm"
        )


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


def _outputs(name: str, network: nn.Module, x: Tensor, num_classes: int) -> Tensor:
    """Return the outputs, of the expected shape."""
    import torch

    try:
        with torch.no_grad():
            outputs = network(x)
    except Exception as error:  # a user's code
        raise ModelError(
            f"model '{name}' fails on examples of shape {_sizes(x.shape[1:])}: {type(error).__name__}: "
            f"{' '.join(str(error).split())}"
        ) from error
    wanted: Shape = (len(x), num_classes) if num_classes else (len(x),)
    found = tuple(outputs.shape) if isinstance(outputs, torch.Tensor) else type(outputs).__name__
    if found != wanted:
        what = f"one logit for each of {num_classes} classes" if num_classes else "one number for each example"
        raise ModelError(f"model '{name}' returns {found} for {len(x)} examples; expected {wanted}, {what}")
    if not torch.isfinite(outputs).all():
        raise ModelError(f"model '{name}': its initial outputs are not finite; check the initialisation")
    return torch.as_tensor(outputs)


def _sizes(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
