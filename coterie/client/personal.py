"""Personalisation: a client fits a released model to its own records, on its own device, and sends nothing of it.

The released models already have a privacy guarantee. What a client computes from them and its own records costs no
further privacy as long as it stays on its device (the billboard lemma, docs/privacy.md).

==============  =======================================================================================================
``last-layer``  the last linear layer minimises sum of losses + c / 2 ||W - W_released||^2, a convex problem, to its
                optimum: a client with few records stays near the released model
``all``         all parameters take further epochs of the client's SGD, with a tenth of the step size of training
``prior``       the logits move by log (n_y + a) / (n + a K) + log K: by the client's smoothed shares of labels in place
                of equal ones (Saerens et al. 2002, Neural Computation 14(1))
``mixture``     w times the logits of the released model, or of that with a fitted last layer, plus 1 - w times those of
                a model that the client trains alone
==============  =======================================================================================================

The candidates for c, w and the number of epochs are public. A client takes the one with the fewest errors on records
that it was not fitted to, in five folds of its own records, and keeps the released model unless one has fewer; for
``mixture`` with the least squared error of probabilities (Brier's), which tells more about close candidates. The
candidates and a were chosen on validation clients (docs/methods.md).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from coterie.client.backend import train
from coterie.client.layers import Additive
from coterie.client.scores import accuracies, losses, outputs
from coterie.client.sgd import LocalTrainingConfig
from coterie.datasets import Shard
from coterie.models import ModelError, call, check_personal, trainable
from coterie.models.personalization import SMALL_STEP, last_layer, small_steps
from coterie.tasks import AUTO, Task, is_real
from coterie.wire.messages import Layout

Vectors = npt.NDArray[np.float32]
Matrix = npt.NDArray[np.float64]

#: c of ``last-layer``: candidates for the weight of the distance to the released layer, against a sum of losses.
HEAD_PENALTIES = (100.0, 10.0)
#: Candidates for the passes over a client's records of ``all``, whose step size is small.
EPOCHS = (1, 5, 20)
#: Passes over its records of a client that trains a model alone; the step size of the last ones is small.
EPOCHS_ALONE = 40
#: w of ``mixture``: candidates for the weight of the released model. Of equal ones, the first is taken.
WEIGHTS = (1.0, 0.75, 0.5, 0.25, 0.0)
#: a of ``prior``: records that are added to those of each class.
SMOOTHING = 2.0

# Parts of a client's records that judge the candidates in turn.
_FOLDS = 5
# Steps of the optimiser of a last layer; it usually stops earlier.
_STEPS = 200
# Examples per forward pass; bounds memory.
_CHUNK = 2048


@dataclass(frozen=True)
class OwnModels:
    """Models of clients' own.

    Attributes:
        network: the released network, or of ``mixture`` the sum of two of it.
        layout: of its parameters.
        models: (n, D) float32 parameters.
    """

    network: nn.Module
    layout: Layout
    models: Vectors


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
    initial: Callable[[], Vectors],
) -> OwnModels:
    """Return each client's own model.

    Args:
        network: the network; its parameters are not used.
        layout: of its parameters.
        released: (n, d) released model of each client, which is not changed.
        shards: the n clients' data. A client with fewer than two records keeps the released model.
        method: one of :data:`~coterie.fields.PERSONAL_METHODS`.
        training: hyper-parameters of the clients' training.
        rngs: n generators, for folds and for the order of examples.
        initial: returns the (d,) public parameters from which a client trains alone.

    Raises:
        ModelError: the network or the targets do not support the method.
    """
    if method == "mixture":
        return _mixtures(network, layout, released, shards, training, rngs, initial())
    own = np.array(released, np.float32)
    result = OwnModels(network, layout, own)
    some = _with_records(shards)
    if not some:
        return result
    task = training.task.resolved(real=is_real(shards[some[0]].y))
    check_personal(network, method, task)
    fits = [_Fit(own[i], shards[i], 0, rngs[i]) for i in some]
    fitter, candidates = _FITTERS[method]

    def fit(chosen: Sequence[_Fit]) -> Vectors:
        return fitter(network, layout, chosen, training)

    def loss(model: Vectors, shard: Shard) -> float:
        models, device = model[None], training.device
        if task.has_classes:
            return float(1 - accuracies(network, layout, models, shard.x, shard.y, device, task)[0])
        return float(losses(network, layout, models, [shard], device, task)[0, 0])

    best = _cross_validated(fits, candidates, fit, loss)
    moved = [(i, fit) for i, fit in zip(some, best, strict=True) if fit is not None]
    if moved:
        for (i, _), model in zip(moved, fit([chosen for _, chosen in moved]), strict=True):
            if np.isfinite(model).all():
                own[i] = model
    return result


def _with_records(shards: Sequence[Shard]) -> list[int]:
    """Return the clients that have records to fit a model to, and others to judge it by."""
    return [i for i, shard in enumerate(shards) if len(shard.y) > 1]


def _checked_head(network: nn.Module, layout: Layout, model: Vectors, shard: Shard) -> Head:
    """Return views of the last layer of a (d,) model, whose outputs are those of the network."""
    parameters = layout.split(model)
    head = Head.of(network, parameters)
    features_of(network, parameters, shard.x[:1], head.name)
    return head


def _cross_validated(
    fits: Sequence[_Fit],
    candidates: Sequence[float],
    fit: Callable[[Sequence[_Fit]], Vectors],
    loss: Callable[[Vectors, Shard], float],
) -> list[_Fit | None]:
    """Return each client's fit with the candidate of least loss on records that it was not fitted to.

    None: no candidate is better than the released model.
    """
    folds = _Folds.of(fits)

    def total(models: Vectors) -> Matrix:
        pairs = zip(models, folds.held_out, strict=True)
        return folds.totals(np.array([loss(model, shard) for model, shard in pairs]))

    least = total(np.stack([part.released for part in folds.parts]))
    best: list[_Fit | None] = [None] * len(fits)
    for candidate in candidates:
        found = total(fit([replace(part, candidate=candidate) for part in folds.parts]))
        for i in np.flatnonzero(found < least).tolist():
            best[i] = replace(fits[i], candidate=candidate)
        least = np.minimum(least, found)
    return best


@dataclass(frozen=True)
class _Folds:
    """Parts of clients' records: the client of each, fits to the other records, and the records held out."""

    owner: npt.NDArray[np.int64]
    parts: list[_Fit]
    held_out: list[Shard]

    @classmethod
    def of(cls, fits: Sequence[_Fit]) -> _Folds:
        """The parts of all clients, each record being held out once."""
        owner, parts, held_out = [], [], []
        for i, fit in enumerate(fits):
            x, y = fit.shard.x, fit.shard.y
            fold = fit.rng.permutation(len(y)) % min(_FOLDS, len(y))
            for number in range(fold.max() + 1):
                apart = fold == number
                owner.append(i)
                parts.append(replace(fit, shard=replace(fit.shard, x=x[~apart], y=y[~apart])))
                held_out.append(replace(fit.shard, x=x[apart], y=y[apart]))
        return cls(np.array(owner), parts, held_out)

    def totals(self, losses: Matrix) -> Matrix:
        """Return each client's sum of the mean losses of its parts, times their records."""
        sizes = np.array([len(shard.y) for shard in self.held_out])
        return np.asarray(np.round(np.bincount(self.owner, weights=losses * sizes), 6))  # equal numbers are equal


def _trained(network: nn.Module, layout: Layout, fits: Sequence[_Fit], training: LocalTrainingConfig) -> Vectors:
    """Return models whose parameters have all been trained for as many epochs as the candidates, which are equal."""
    result = np.stack([fit.released for fit in fits])
    for epochs in {fit.candidate for fit in fits}:
        rows = [i for i, fit in enumerate(fits) if fit.candidate == epochs]
        config = replace(training, local_epochs=int(epochs), lr=SMALL_STEP * training.lr)
        shards, rngs = [fits[i].shard for i in rows], [fits[i].rng for i in rows]
        result[rows] += train(network, layout, result[rows], shards, rngs, config)
    return result


def _fitted_heads(network: nn.Module, layout: Layout, fits: Sequence[_Fit], training: LocalTrainingConfig) -> Vectors:
    """Return models whose last layers minimise the penalised loss."""
    result = np.stack([fit.released for fit in fits])
    for vector, fit in zip(result, fits, strict=True):
        parameters = layout.split(vector)  # views
        head = Head.of(network, parameters)
        features, offset = features_of(network, parameters, fit.shard.x, head.name)
        fit_head(head, features, offset, fit.shard.y, fit.candidate, training.task)
    return result


def _shifted(network: nn.Module, layout: Layout, fits: Sequence[_Fit], training: LocalTrainingConfig) -> Vectors:
    """Return models whose logits move by the clients' shares of labels."""
    result = np.stack([fit.released for fit in fits])
    for vector, fit in zip(result, fits, strict=True):
        head = _checked_head(network, layout, vector, fit.shard)
        head.bias[...] += prior_shift(fit.shard.y, len(head.bias))
    return result


_Fitter: TypeAlias = Callable[[nn.Module, Layout, Sequence[_Fit], LocalTrainingConfig], Vectors]
# How clients fit a model by each method, and its candidates.
_FITTERS: dict[str, tuple[_Fitter, tuple[float, ...]]] = {
    "last-layer": (_fitted_heads, HEAD_PENALTIES),
    "all": (_trained, EPOCHS),
    "prior": (_shifted, (1.0,)),
}


def _mixtures(
    network: nn.Module,
    layout: Layout,
    released: Vectors,
    shards: Sequence[Shard],
    training: LocalTrainingConfig,
    rngs: Sequence[np.random.Generator],
    initial: Vectors,
) -> OwnModels:
    """Return sums of a released model and one that the client trained alone, with weights in their last layers."""
    check_personal(network, "mixture", training.task, additive=isinstance(network, Additive))
    mixed = [_mixed(network, layout, one, initial, 1.0) for one in released]
    some = _with_records(shards)
    if some:
        _checked_head(network, layout, released[some[0]].copy(), shards[some[0]])
        fits = [_Fit(released[i], shards[i], 0, rngs[i]) for i in some]
        for i, model in zip(some, _best_mixtures(network, layout, fits, training, initial), strict=True):
            mixed[i] = model
    both = sum_of_two(network)
    return OwnModels(both, Layout.of(trainable(both)), np.stack(mixed))


def _best_mixtures(
    network: nn.Module, layout: Layout, fits: Sequence[_Fit], training: LocalTrainingConfig, initial: Vectors
) -> list[Vectors]:
    """Return each client's mixture with the least squared error on records that neither of its models was fitted to."""
    folds, clients = _Folds.of(fits), len(fits)
    everything = [*folds.parts, *fits]
    shards, rngs = [fit.shard for fit in everything], [fit.rng for fit in everything]
    alone = trained_alone(network, layout, initial, shards, rngs, training)
    released = np.stack([fit.released for fit in everything])

    def held_out(models: Vectors) -> list[Matrix]:
        pairs = zip(models, folds.held_out, strict=False)  # models of all records follow those of parts
        return [outputs(network, layout, one[None], shard, training.device)[0] for one, shard in pairs]

    outputs_alone = held_out(alone)
    best = [_mixed(network, layout, fit.released, initial, 1.0) for fit in fits]
    task = training.task.resolved(real=is_real(shards[0].y))
    least = np.full(clients, np.inf)
    for penalty in (None, *HEAD_PENALTIES):
        shared = released
        if penalty is not None:
            shared = _fitted_heads(network, layout, [replace(fit, candidate=penalty) for fit in everything], training)
        outputs_shared = held_out(shared)
        for weight in WEIGHTS:
            errors = []
            for first, second, shard in zip(outputs_shared, outputs_alone, folds.held_out, strict=True):
                # A term of weight 0 need not be finite.
                terms = [share * values for share, values in ((weight, first), (1 - weight, second)) if share]
                out = np.sum(terms, axis=0)
                errors.append(task.squared_error(out, shard.y) if np.isfinite(out).all() else np.inf)
            totals = folds.totals(np.array(errors))
            for i in np.flatnonzero(totals < least).tolist():
                best[i] = _mixed(network, layout, shared[i - clients], alone[i - clients], weight)
            least = np.minimum(least, totals)
    return best


def trained_alone(
    network: nn.Module,
    layout: Layout,
    initial: Vectors,
    shards: Sequence[Shard],
    rngs: Sequence[np.random.Generator],
    training: LocalTrainingConfig,
) -> Vectors:
    """Return (n, d) models that n clients train from public parameters, each on its own records, with small last steps.

    Args:
        network: the network; its parameters are not used.
        layout: of its parameters.
        initial: (d,) parameters.
        shards: the clients' data.
        rngs: n generators, for the order of examples.
        training: hyper-parameters of the clients' training, but for epochs.
    """
    models = np.tile(initial, (len(shards), 1))
    last = small_steps(EPOCHS_ALONE)
    for epochs, share in ((EPOCHS_ALONE - last, 1.0), (last, SMALL_STEP)):
        config = replace(training, local_epochs=epochs, lr=share * training.lr)
        models += train(network, layout, models, shards, rngs, config)
    return models


def _mixed(network: nn.Module, layout: Layout, released: Vectors, alone: Vectors, weight: float) -> Vectors:
    """Return the (2 d,) parameters of :func:`sum_of_two`, whose output is weight times one, 1 - weight the other."""
    both = np.stack([released, alone])
    for model, share in zip(both, (weight, 1 - weight), strict=True):
        if not share:
            model[...] = 0
        head = Head.of(network, layout.split(model))  # views
        head.weight[...] *= share
        head.bias[...] *= share
    return both.reshape(-1)


@lru_cache(maxsize=4)
def sum_of_two(network: nn.Module) -> Additive:
    """Return a network that adds the outputs of two copies of a network."""
    return Additive(copy.deepcopy(network), copy.deepcopy(network))


def prior_shift(y: npt.NDArray[Any], num_classes: int, smoothing: float = SMOOTHING) -> Matrix:
    """Return (K,) numbers to add to logits: log of the smoothed share of each class, minus that of equal shares.

    Args:
        y: (n,) labels of a client.
        num_classes: K.
        smoothing: a, records that are added to those of each class.
    """
    counts = np.bincount(y, minlength=num_classes) + smoothing
    return np.asarray(np.log(counts / counts.sum()) + np.log(num_classes))


# ---- the last linear layer of a network as a model of its own ------------------------------------------------------


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
