"""Check the network of a user before a run starts: what the built-in networks are known to satisfy."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from coterie.models.errors import ModelError, few
from coterie.models.networks import Model, Shape, build, is_tested
from coterie.models.rows import DRAWN, Rows, batch, find_mixing
from coterie.models.trainable import (
    CONSTANT,
    constants,
    differing,
    float32_arrays,
    set_trainable,
    sharing_memory,
    trainable,
)
from coterie.tasks import task_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


_SEVERAL_INPUTS = (
    "; an example is one array: for a network of several inputs, return coterie.models.with_inputs(network, ...)"
)


def check_network(name: Model, input_shape: Sequence[int], num_classes: int, kind: str) -> list[str]:
    """Build a network of a user, or with adapters, and try it on random examples.

    It must have trainable parameters, and constants that are the same at every build and after a step of training
    (models/trainable.py); compute the same after its trainable part is saved, and loaded into another build; return (n,
    num_classes) finite logits, or (n,) numbers without classes; be deterministic; and treat every example by itself,
    whatever the other examples of a batch are. The last is tested on random and extreme examples, which proves nothing.

    Args:
        name: the model; built-in ones are not checked, unless parts of them are frozen.
        input_shape: shape of an example, after the features.
        num_classes: 0 for real targets.
        kind: "images", "vectors" or "tokens".

    Returns:
        the trainable parameters on which its outputs do not depend.

    Raises:
        ModelError: it does not; the message names the layer or the shape, and what to do.
    """
    if is_tested(name):
        return []
    import torch

    shape = tuple(input_shape)
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(0)
        network = build(name, shape, num_classes)
        _check_layers(name, network)
        torch.default_generator.manual_seed(1)
        other = build(name, shape, num_classes)
        _check_builds(name, network, other)
        torch.default_generator.manual_seed(0)
        fresh = _copied(name, network)
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
        unused = _check_step(name, network, x, num_classes)
        _check_loaded(name, network, other, x, num_classes)
        _check_rows(name, network, x, num_classes, kind)
        return unused


def _copied(name: Model, network: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(network)
    except Exception as error:  # a user's code
        raise ModelError(
            f"model '{name}' cannot be copied: {' '.join(str(error).split())[:200]}; hold no locks, files and computed "
            "tensors, and use torch.nn.utils.parametrizations in place of torch.nn.utils.weight_norm or prune"
        ) from error


def _check_builds(name: Model, one: nn.Module, other: nn.Module) -> None:
    """Check that two builds have the same constants, and trainable parts of the same names and shapes."""
    if one is other or set(map(id, one.parameters())) & set(map(id, other.parameters())):
        raise ModelError(f"model '{name}' returns parameters that it returned before; build a new network at each call")
    shapes = [{name: tuple(value.shape) for name, value in trainable(network).items()} for network in (one, other)]
    if shapes[0] != shapes[1]:
        where = next(name for name in {**shapes[0], **shapes[1]} if shapes[0].get(name) != shapes[1].get(name))
        raise ModelError(f"model '{name}': parameter '{where}' has another name or shape at the next build")
    if found := differing(constants(one), constants(other)):
        raise ModelError(f"model '{name}': {_kind(one, found[0])} '{found[0]}' differs between two builds; {CONSTANT}")


def _kind(network: nn.Module, name: str) -> str:
    return "buffer" if name in dict(network.named_buffers()) else "frozen parameter"


def _check_step(name: Model, network: nn.Module, x: Rows, num_classes: int) -> list[str]:
    """Check that a step of training changes no constant, and has a gradient; return parameters without one."""
    network = copy.deepcopy(network)
    before = {key: value.clone() for key, value in constants(network).items()}
    gradients = _gradients(name, network, x, num_classes)
    unused = [key for key, gradient in gradients.items() if gradient is None]
    if len(unused) == len(gradients):
        raise ModelError(f"model '{name}': its outputs depend on none of its trainable parameters: {few(gradients)}")
    if changed := differing(before, constants(network)):
        raise ModelError(
            f"model '{name}': {_kind(network, changed[0])} '{changed[0]}' changes in a step of training; {CONSTANT}"
        )
    return unused


def _gradients(name: Model, network: nn.Module, x: Rows, num_classes: int) -> dict[str, Tensor | None]:
    """Return the gradients of a loss, by parameter; None where it does not depend on one."""
    import torch

    parameters = trainable(network)
    try:
        outputs = network(torch.tensor(x)).float()
        task = task_of(num_classes)
        loss = task(outputs, torch.as_tensor(task.examples(len(x)))).mean()
        if not loss.requires_grad:
            return dict.fromkeys(parameters)
        found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    except Exception as error:  # a user's code
        raise ModelError(
            f"model '{name}' cannot be trained: {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
    return dict(zip(parameters, found, strict=True))


def _check_loaded(name: Model, network: nn.Module, other: nn.Module, x: Rows, num_classes: int) -> None:
    """Check that the trainable part, loaded into another build in evaluation mode, gives the same outputs."""
    wanted = _outputs(name, network, x, num_classes)
    set_trainable(other, float32_arrays(network))
    for module, why in (
        (copy.deepcopy(other), "another build of the same parameters computes other outputs; hold every tensor as "),
        (other.eval(), "in evaluation mode it computes other outputs than in training; "),
    ):
        found = _outputs(name, module, x, num_classes)
        if not np.allclose(found, wanted, rtol=1e-3, atol=1e-3 * np.abs(wanted).max()):
            way_out = f"a parameter or buffer; {CONSTANT}" if "hold" in why else "let both compute the same"
            raise ModelError(f"model '{name}': {why}{way_out}")


def _check_rows(name: Model, network: nn.Module, x: Rows, num_classes: int, input_kind: str) -> None:
    """Check that the network treats every example by itself, in float32 and if possible in float64."""
    import torch

    largest = 1.0 if input_kind == "images" else 1e3
    levels = [0, num_classes - 1] if input_kind == "tokens" else [0, largest, -largest]
    others = np.stack([np.full(x.shape[1:], level, x.dtype) for level in levels])
    with torch.no_grad():
        for parameter in _real(network):
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


def _real(network: nn.Module) -> list[nn.Parameter]:
    """Return parameters that hold real numbers, frozen ones too."""
    return [value for value in network.parameters() if value.numel() and value.dtype in _types()]


def _types() -> tuple[torch.dtype, ...]:
    """Return the types of parameters that train."""
    import torch

    return torch.float16, torch.bfloat16, torch.float32, torch.float64


def _shaken(network: nn.Module, shake: float) -> nn.Module:
    """Return the network with parameters changed by a relative amount, with random signs, the same in each call."""
    import torch

    if not shake:
        return network
    network = copy.deepcopy(network)
    torch.default_generator.manual_seed(0)
    with torch.no_grad():
        for parameter in _real(network):
            signs = 2 * torch.randint(2, parameter.shape, dtype=parameter.dtype) - 1
            parameter.mul_(1 + shake * signs)
    return network


def _check_layers(name: Model, network: nn.Module) -> None:
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.nn.parameter import is_lazy

    _check_wrappers(name, network)
    if not list(network.parameters()):
        raise ModelError(f"model '{name}' has no parameters to train")
    for layer, module in network.named_modules():
        if isinstance(module, _BatchNorm) and (module.training or not module.track_running_stats):
            raise ModelError(
                f"model '{name}': layer '{layer}' ({type(module).__name__}) mixes the examples of a batch, and its "
                "statistics are no parameters; use GroupNorm: return coterie.models.without_batch_norm(network), or "
                "freeze the layer with its statistics: eval() and requires_grad_(False)"
            )
        if any(is_lazy(parameter) for parameter in module.parameters(recurse=False)):
            raise ModelError(
                f"model '{name}': layer '{layer}' ({type(module).__name__}) has no shape before its first call; give "
                "its input size"
            )
    _check_parameters(name, network)


def _check_wrappers(name: Model, network: nn.Module) -> None:
    import torch
    from torch import nn

    for module in network.modules():
        if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            raise ModelError(
                f"model '{name}' returns {type(module).__name__}; return its module: a client trains on one device"
            )
        if isinstance(module, torch.jit.ScriptModule) or type(module).__name__ == "OptimizedModule":
            kind = "TorchScript" if isinstance(module, torch.jit.ScriptModule) else "a network of torch.compile"
            raise ModelError(f"model '{name}' returns {kind}; return the torch.nn.Module of which it was made")


def _check_parameters(name: Model, network: nn.Module) -> None:
    """Check the types of the trainable parameters, and where they and the constants are."""
    import torch

    parameters = trainable(network)
    for key, value in {**parameters, **constants(network)}.items():
        if value.is_meta:
            raise ModelError(f"model '{name}': '{key}' has no values (device 'meta'); build it on the CPU")
        dense = value.layout == torch.strided
        repeats = dense and any(step == 0 and size > 1 for step, size in zip(value.stride(), value.shape, strict=True))
        trains = key in parameters
        if not dense or (trains and (value.is_inference() or repeats)):
            raise ModelError(
                f"model '{name}': '{key}' is sparse, expanded, or of inference mode; make it a dense tensor of its own "
                "(to_dense, clone)"
            )
    if not parameters:
        raise ModelError(f"model '{name}' has no parameters to train: all are frozen (requires_grad=False)")
    for key, value in parameters.items():
        if value.dtype not in _types():
            kind = str(value.dtype).removeprefix("torch.")
            raise ModelError(f"model '{name}': parameter '{key}' is {kind}; messages hold real numbers: use float32")
    if shared := sharing_memory(parameters):
        raise ModelError(
            f"model '{name}': parameters '{shared[0]}' and '{shared[1]}' share memory; assign one parameter to both "
            "layers (second.weight = first.weight), or copy its values"
        )


def _outputs(name: Model, network: nn.Module, x: Rows, num_classes: int, finite: bool = True) -> Rows:
    """Return the outputs, of the expected shape."""
    import torch

    try:
        with torch.no_grad():
            outputs = network(torch.tensor(x))
    except Exception as error:  # a user's code
        several = isinstance(error, TypeError) and "required positional argument" in str(error)
        raise ModelError(
            f"model '{name}' fails on examples of shape {'x'.join(map(str, x.shape[1:]))}: {type(error).__name__}: "
            f"{' '.join(str(error).split())}{_SEVERAL_INPUTS if several else ''}"
        ) from error
    wanted: Shape = (len(x), num_classes) if num_classes else (len(x),)
    actual_shape = tuple(outputs.shape) if isinstance(outputs, torch.Tensor) else type(outputs).__name__
    if actual_shape != wanted:
        what = f"one logit for each of {num_classes} classes" if num_classes else "one number for each example"
        raise ModelError(f"model '{name}' returns {actual_shape} for {len(x)} examples; expected {wanted}, {what}")
    if finite and not torch.isfinite(outputs).all():
        raise ModelError(f"model '{name}': its initial outputs are not finite; check the initialisation")
    return np.asarray(outputs.to(torch.promote_types(outputs.dtype, torch.float32)))
