"""The last linear layer of a network as a model of its own: its inputs, and its fit to a client's records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from coterie.client.layers import Additive
from coterie.models import ModelError, call
from coterie.models.personalization import last_layer
from coterie.tasks import AUTO, Task

Vectors = npt.NDArray[np.float32]
Matrix = npt.NDArray[np.float64]

# Steps of the optimiser; it usually stops earlier.
_STEPS = 200
# Examples per forward pass; bounds memory.
_CHUNK = 2048


@dataclass(frozen=True)
class Head:
    """The last linear layer of one model: its name, and views of its (K, F) weight and (K,) bias."""

    name: str
    weight: Vectors
    bias: Vectors

    @classmethod
    def of(cls, network: nn.Module, parameters: dict[str, Any]) -> Head:
        """The layer among these parameters; a layer without bias has an empty one."""
        name = last_layer(network)
        bias = parameters.get(f"{name}.bias".lstrip("."), np.zeros(0, np.float32))
        return cls(name, parameters[f"{name}.weight".lstrip(".")], bias)


@torch.no_grad()
def features_of(
    network: nn.Module, parameters: dict[str, Any], x: npt.NDArray[Any], head: str
) -> tuple[Matrix, Matrix | float]:
    """Return the (n, F) inputs of the last layer, and (n, K) outputs that do not depend on it, or 0.

    Args:
        network: the network; its own parameters are not used.
        parameters: of the network, by name.
        x: (n, ...) examples.
        head: name of the last layer.

    Raises:
        ModelError: the outputs of the network are not those of its last layer.
    """
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    totals: list[Tensor] = []

    def keep(module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        inputs.append(given[0])
        outputs.append(output)

    values = {name: torch.as_tensor(value) for name, value in parameters.items()}
    with_hook = network.get_submodule(head).register_forward_hook(keep)
    try:
        for begin in range(0, len(x), _CHUNK):
            totals.append(call(network, values, torch.as_tensor(x[begin : begin + _CHUNK])))
    finally:
        with_hook.remove()
    features, logits, total = (torch.cat(parts).double() for parts in (inputs, outputs, totals))
    offset = total.reshape(len(x), -1) - logits if logits.shape[0] == len(x) and logits.dim() == 2 else None
    if offset is None or (not isinstance(network, Additive) and offset.abs().max() > 1e-4 * (1 + logits.abs().max())):
        raise ModelError(
            f"this personalize requires a network that outputs what its last layer computes, but "
            f"{type(network).__name__} processes it further; set personalize to all or none"
        )
    return features.numpy(), offset.numpy() if isinstance(network, Additive) else 0.0


def fit_head(  # what is minimised, and where
    head: Head, features: Matrix, offset: Matrix | float, y: npt.NDArray[Any], penalty: float, task: Task = AUTO
) -> None:
    """Fit a last layer to a client's records, in place.

    Args:
        head: the released layer.
        features: (n, F) inputs of the layer.
        offset: (n, K) numbers that are added to its outputs, or 0.
        y: (n,) targets.
        penalty: c, the weight of the squared distance to the released layer.
        task: whose losses are minimised.
    """
    from scipy.optimize import minimize

    shape, biased = head.weight.shape, len(head.bias) > 0
    start = np.concatenate([head.weight.ravel(), head.bias]).astype(np.float64)
    targets = torch.as_tensor(y)
    targets = targets.double() if targets.is_floating_point() else targets

    def objective(vector: Matrix) -> tuple[float, Matrix]:
        weight, bias = vector[: head.weight.size].reshape(shape), vector[head.weight.size :]
        outputs = torch.as_tensor(features @ weight.T + (bias if biased else 0) + offset).requires_grad_()
        total = task(outputs[:, 0] if targets.is_floating_point() else outputs, targets).sum()
        loss, slope = float(total.detach()), torch.autograd.grad(total, outputs)[0].numpy()
        moved = vector - start
        gradient = np.concatenate([(slope.T @ features).ravel(), slope.sum(axis=0) if biased else np.zeros(0)])
        return loss + penalty / 2 * float(moved @ moved), gradient + penalty * moved

    found = minimize(objective, start, jac=True, method="L-BFGS-B", options={"maxiter": _STEPS}).x
    head.weight[...] = found[: head.weight.size].reshape(shape)
    head.bias[...] = found[head.weight.size :]
