"""Personalisation: a client fits a released model to its own records, on its own device, and sends nothing of it.

The released models have a privacy guarantee already, and what a client computes from them and from its own records
is seen by nobody else. So it costs no privacy as long as it stays at the client (the billboard lemma, docs/privacy.md).

==============  =======================================================================================================
``last-layer``  the last linear layer minimises sum of losses + c / 2 ||W - W_released||^2, a convex problem, to its
                optimum: a client with few records stays near the released model
``all``         all parameters take further epochs of the client's SGD, with a tenth of the step size of training
``prior``       the logits move by log (n_y + a) / (n + a K) + log K: by the client's smoothed shares of labels in place
                of equal ones (Saerens et al. 2002, Neural Computation 14(1))
==============  =======================================================================================================

The candidates for c and for the number of epochs are public. A client takes the one with the fewest errors on records
that it was not fitted to, in five folds of its own records, and keeps the released model unless one has fewer. The
candidates and a were chosen on validation clients (docs/methods.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.func import functional_call

from coterie.client.backend import train
from coterie.client.layers import Additive
from coterie.client.scores import accuracies, losses
from coterie.client.sgd import LocalTrainingConfig
from coterie.datasets import Shard
from coterie.models.errors import ModelError
from coterie.models.last_layer import check_personal, last_layer
from coterie.wire.messages import Layout

Vectors = npt.NDArray[np.float32]
_Matrix = npt.NDArray[np.float64]

#: c of ``last-layer``: candidates for the weight of the distance to the released layer, against a sum of losses.
HEAD_PENALTIES = (100.0, 10.0)
#: Candidates for the passes over a client's records of ``all``, and their step size, as a share of that of training.
EPOCHS, STEP_SHARE = (1, 5, 20), 0.1
#: a of ``prior``: records that are added to those of each class.
SMOOTHING = 2.0

# Parts of a client's records that judge the candidates in turn.
_FOLDS = 5
# Steps of the optimiser; it usually stops earlier.
_STEPS = 200
# Examples per forward pass; bounds memory.
_CHUNK = 2048


@dataclass(frozen=True)
class _Fit:
    """A model, the records to fit it to, and the strength of the fit."""

    released: Vectors
    shard: Shard
    candidate: float
    rng: np.random.Generator


def personalised(
    network: nn.Module,
    layout: Layout,
    released: Vectors,
    shards: Sequence[Shard],
    method: str,
    training: LocalTrainingConfig,
    rngs: Sequence[np.random.Generator],
) -> Vectors:
    """Return each client's own model.

    Args:
        network: the network; its parameters are not used.
        layout: of its parameters.
        released: (n, d) released model of each client, which is not changed.
        shards: the n clients' data. A client with fewer than two records keeps the released model.
        method: one of :data:`~coterie.fields.PERSONAL_METHODS`.
        training: hyper-parameters of the clients' training.
        rngs: n generators, for folds and for the order of examples.

    Returns:
        (n, d) float32 parameters.

    Raises:
        ModelError: the network or the targets do not support the method.
    """
    own = np.array(released, np.float32)
    some = [i for i, shard in enumerate(shards) if len(shard.y) > 1]
    if not some:
        return own
    classes = not np.issubdtype(shards[some[0]].y.dtype, np.floating)
    check_personal(network, method, classes=classes)
    if method == "prior":
        for i in some:
            parameters = layout.split(own[i])  # views
            head = _Head.of(network, parameters)
            _features(network, parameters, shards[i].x[:1], head.name)  # checks that its outputs are the network's
            head.bias[...] += prior_shift(shards[i].y, len(head.bias))
        return own
    fits = [_Fit(own[i], shards[i], 0, rngs[i]) for i in some]
    fitter = _fitted_heads if method == "last-layer" else _trained
    candidates: tuple[float, ...] = HEAD_PENALTIES if method == "last-layer" else EPOCHS

    def fit(chosen: Sequence[_Fit]) -> Vectors:
        return fitter(network, layout, chosen, training)

    def loss(models: Vectors, held_out: Sequence[Shard]) -> _Matrix:
        score = _share_of_errors if classes else losses
        pairs = zip(models, held_out, strict=True)
        return np.array([score(network, layout, one[None], [shard], training.device)[0, 0] for one, shard in pairs])

    best = _cross_validated(fits, candidates, fit, loss)
    moved = [(i, fit) for i, fit in zip(some, best, strict=True) if fit is not None]
    if moved:
        for (i, _), model in zip(moved, fit([chosen for _, chosen in moved]), strict=True):
            if np.isfinite(model).all():
                own[i] = model
    return own


def _share_of_errors(
    network: nn.Module, layout: Layout, models: Vectors, shards: Sequence[Shard], device: str
) -> _Matrix:
    return np.stack([1 - accuracies(network, layout, models, shard.x, shard.y, device) for shard in shards])


def _cross_validated(
    fits: Sequence[_Fit],
    candidates: Sequence[float],
    fit: Callable[[Sequence[_Fit]], Vectors],
    loss: Callable[[Vectors, Sequence[Shard]], _Matrix],
) -> list[_Fit | None]:
    """Return each client's fit with the candidate of least loss on records that it was not fitted to.

    None: no candidate is better than the released model.
    """
    parts = [(i, rest, apart) for i, one in enumerate(fits) for rest, apart in _folds(one)]
    owner = np.array([i for i, _, _ in parts])
    held_out = [apart for _, _, apart in parts]
    sizes = np.array([len(shard.y) for shard in held_out])

    def total(models: Vectors) -> _Matrix:
        sums = np.bincount(owner, weights=loss(models, held_out) * sizes, minlength=len(fits))
        return np.asarray(np.round(sums, 6))  # equal numbers of errors are equal

    least = total(np.stack([fits[i].released for i in owner]))
    best: list[_Fit | None] = [None] * len(fits)
    for candidate in candidates:
        found = total(fit([replace(fits[i], shard=rest, candidate=candidate) for i, rest, _ in parts]))
        for i in np.flatnonzero(found < least).tolist():
            best[i] = replace(fits[i], candidate=candidate)
        least = np.minimum(least, found)
    return best


def _folds(fit: _Fit) -> list[tuple[Shard, Shard]]:
    """Return pairs of other records and records held out, each record being held out once."""
    shard = fit.shard
    fold = fit.rng.permutation(len(shard.y)) % min(_FOLDS, len(shard.y))

    def part(rows: npt.NDArray[np.bool_]) -> Shard:
        return replace(shard, x=shard.x[rows], y=shard.y[rows])

    return [(part(fold != number), part(fold == number)) for number in range(fold.max() + 1)]


def _trained(network: nn.Module, layout: Layout, fits: Sequence[_Fit], training: LocalTrainingConfig) -> Vectors:
    """Return models whose parameters have all been trained for as many epochs as the candidates, which are equal."""
    result = np.stack([fit.released for fit in fits])
    for epochs in {fit.candidate for fit in fits}:
        rows = [i for i, fit in enumerate(fits) if fit.candidate == epochs]
        config = replace(training, local_epochs=int(epochs), lr=STEP_SHARE * training.lr)
        shards, rngs = [fits[i].shard for i in rows], [fits[i].rng for i in rows]
        result[rows] += train(network, layout, result[rows], shards, rngs, config)
    return result


def _fitted_heads(network: nn.Module, layout: Layout, fits: Sequence[_Fit], training: LocalTrainingConfig) -> Vectors:
    """Return models whose last layers minimise the penalised loss."""
    result = np.stack([fit.released for fit in fits])
    for vector, fit in zip(result, fits, strict=True):
        parameters = layout.split(vector)  # views
        head = _Head.of(network, parameters)
        features, offset = _features(network, parameters, fit.shard.x, head.name)
        fit_head(head, features, offset, fit.shard.y, fit.candidate)
    return result


def prior_shift(y: npt.NDArray[Any], num_classes: int, smoothing: float = SMOOTHING) -> _Matrix:
    """Return (K,) numbers to add to logits: log of the smoothed share of each class, minus that of equal shares.

    Args:
        y: (n,) labels of a client.
        num_classes: K.
        smoothing: a, records that are added to those of each class.
    """
    counts = np.bincount(y, minlength=num_classes) + smoothing
    return np.asarray(np.log(counts / counts.sum()) + np.log(num_classes))


@dataclass(frozen=True)
class _Head:
    """The last linear layer of one model: its name, and views of its (K, F) weight and (K,) bias."""

    name: str
    weight: Vectors
    bias: Vectors

    @classmethod
    def of(cls, network: nn.Module, parameters: dict[str, Any]) -> _Head:
        """The layer among these parameters; a layer without bias has an empty one."""
        name = last_layer(network)
        bias = parameters.get(f"{name}.bias".lstrip("."), np.zeros(0, np.float32))
        return cls(name, parameters[f"{name}.weight".lstrip(".")], bias)


@torch.no_grad()
def _features(
    network: nn.Module, parameters: dict[str, Any], x: npt.NDArray[Any], head: str
) -> tuple[_Matrix, _Matrix | float]:
    """Return the (n, F) inputs of the last layer, and (n, K) outputs that do not depend on it, or 0.

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
            totals.append(functional_call(network, values, (torch.as_tensor(x[begin : begin + _CHUNK]),)))
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


def fit_head(head: _Head, features: _Matrix, offset: _Matrix | float, y: npt.NDArray[Any], penalty: float) -> None:
    """Fit a last layer to a client's records, in place.

    Args:
        head: the released layer.
        features: (n, F) inputs of the layer.
        offset: (n, K) numbers that are added to its outputs, or 0.
        y: (n,) labels, or real targets.
        penalty: c, the weight of the squared distance to the released layer.
    """
    from scipy.optimize import minimize

    shape, biased = head.weight.shape, len(head.bias) > 0
    start = np.concatenate([head.weight.ravel(), head.bias]).astype(np.float64)
    rows = np.arange(len(y))

    def objective(vector: _Matrix) -> tuple[float, _Matrix]:
        weight, bias = vector[: head.weight.size].reshape(shape), vector[head.weight.size :]
        outputs = features @ weight.T + (bias if biased else 0) + offset
        if np.issubdtype(y.dtype, np.floating):
            slope = outputs - y[:, None]
            loss = float((slope**2).sum())
            slope = 2 * slope
        else:
            outputs -= outputs.max(axis=1, keepdims=True)
            slope = np.exp(outputs)
            sums = slope.sum(axis=1, keepdims=True)
            loss = float(np.log(sums).sum() - outputs[rows, y].sum())
            slope /= sums
            slope[rows, y] -= 1
        moved = vector - start
        gradient = np.concatenate([(slope.T @ features).ravel(), slope.sum(axis=0) if biased else np.zeros(0)])
        return loss + penalty / 2 * float(moved @ moved), gradient + penalty * moved

    found = minimize(objective, start, jac=True, method="L-BFGS-B", options={"maxiter": _STEPS}).x
    head.weight[...] = found[: head.weight.size].reshape(shape)
    head.bias[...] = found[head.weight.size :]
