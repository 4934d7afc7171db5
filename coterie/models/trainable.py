"""The trainable part of a network, and its constants.

Messages, model files, clipping, noise and counts of parameters concern the *trainable part*: the parameters with
``requires_grad``, in the order of ``named_parameters``, which lists a parameter with several names once, under its
first name. They travel as float32 whatever their type, are clipped and averaged in float32 or better, and enter the
network in their own type.

The *constants*, frozen parameters and buffers, never change and never travel: every machine builds them by the same
function, and compares :func:`fingerprint` with that of the run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor, nn

#: What to do where frozen parameters or buffers are not constant.
CONSTANT = (
    "frozen parameters and buffers must be constants, the same at every build and after training: load them from a "
    "file, draw them by torch.Generator().manual_seed(0), or remove them (docs/networks.md)"
)


def trainable(network: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that train, by name; one with several names has its first."""
    return {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}


def num_parameters(network: nn.Module) -> int:
    """Return the number of trainable numbers of a network."""
    return sum(parameter.numel() for parameter in trainable(network).values())


def sizes(network: nn.Module) -> tuple[int, int]:
    """Return how many numbers of a network's parameters train, and how many there are."""
    return num_parameters(network), sum(parameter.numel() for parameter in network.parameters())


def float32_arrays(network: nn.Module) -> dict[str, npt.NDArray[np.float32]]:
    """Return copies of the parameters that train, by name."""
    return {name: value.detach().cpu().float().numpy().copy() for name, value in trainable(network).items()}


def set_trainable(network: nn.Module, values: Mapping[str, Any]) -> None:
    """Copy arrays or tensors of these shapes into parameters, in the parameters' types."""
    import torch

    with torch.no_grad():
        for name, value in values.items():
            network.get_parameter(name).copy_(torch.as_tensor(value))


def sharing_memory(parameters: Mapping[str, Tensor]) -> tuple[str, str] | None:
    """Return the names of two parameters of which one is a view of the other; None without such."""
    owners: dict[int, str] = {}
    for name, value in parameters.items():
        place = value.untyped_storage().data_ptr()
        if value.numel() and owners.setdefault(place, name) != name:
            return owners[place], name
    return None


def constants(network: nn.Module) -> dict[str, Tensor]:
    """Return the frozen parameters and all buffers, by name, also those that ``state_dict`` leaves out."""
    frozen = {name: value.detach() for name, value in network.named_parameters() if not value.requires_grad}
    return frozen | dict(network.named_buffers())


def fingerprint(values: Mapping[str, Tensor]) -> str | None:
    """Return the SHA-256 of the names, types, shapes and bits of constants; None if there are none."""
    if not values:
        return None
    digest = hashlib.sha256()
    for name in sorted(values):
        value = values[name]
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode() + _bits(value))
    return digest.hexdigest()


def differing(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """Return the names of constants that one of two networks lacks, or whose types, shapes or bits differ."""
    common = one.keys() & other.keys()
    same = {name for name in common if fingerprint({name: one[name]}) == fingerprint({name: other[name]})}
    return [name for name in {**one, **other} if name not in same]


def _bits(value: Tensor) -> bytes:
    import torch

    bits: bytes = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return bits


def is_plain(network: nn.Module) -> bool:
    """Whether all parameters train, are float32 and have one name each, and there are no buffers and no hooks."""
    import torch

    named = dict(network.named_parameters(remove_duplicate=False))
    return (
        named.keys() == trainable(network).keys()
        and all(value.dtype == torch.float32 for value in named.values())
        and not any(True for _ in network.buffers())
        and not any(module._forward_pre_hooks or module._forward_hooks for module in network.modules())
    )


def call(network: nn.Module, values: Mapping[str, Tensor], x: Tensor) -> Any:
    """Return the outputs of a network with these values of its trainable part, which may be of other types."""
    from torch.func import functional_call

    types = {name: parameter.dtype for name, parameter in network.named_parameters()}
    typed = {name: value.to(types[name]) for name, value in values.items()}
    return functional_call(network, typed, (x,))


def set_training(network: nn.Module) -> None:
    """Set the modules that have trainable parameters of their own to training mode; leave all others as built."""
    for module in network.modules():
        if any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
            module.training = True


def without_batch_norm(network: nn.Module) -> nn.Module:
    """Return a copy of a network with GroupNorm instead of batch normalisation.

    A layer of images or sequences has up to 32 groups of two or more channels, one of vectors has one group. Factors
    and summands are kept; instance normalisation loses its running statistics.
    """
    import copy

    from torch import nn
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.nn.modules.instancenorm import _InstanceNorm

    network = copy.deepcopy(network)
    for path, module in list(network.named_modules()):
        if isinstance(module, _InstanceNorm):
            module.track_running_stats = False
            module.running_mean = module.running_var = module.num_batches_tracked = None
        if not isinstance(module, _BatchNorm):
            continue
        most = 1 if isinstance(module, nn.BatchNorm1d) else min(32, module.num_features // 2)
        groups = max(count for count in range(1, max(most, 1) + 1) if module.num_features % count == 0)
        norm = nn.GroupNorm(groups, module.num_features, eps=module.eps, affine=module.affine)
        if module.affine:
            norm.weight, norm.bias = module.weight, module.bias
        parent, _, name = path.rpartition(".")
        if not path:
            return norm
        setattr(network.get_submodule(parent), name, norm)
    return network
