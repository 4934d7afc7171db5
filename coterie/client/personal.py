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
from torch import nn

from coterie.client.backend import train
from coterie.client.heads import Head, Matrix, Vectors, features_of, fit_head
from coterie.client.layers import Additive
from coterie.client.scores import accuracies, losses, outputs
from coterie.client.sgd import LocalTrainingConfig
from coterie.datasets import Shard
from coterie.models import check_personal, trainable
from coterie.models.personalization import SMALL_STEP, small_steps
from coterie.tasks import Task, is_real
from coterie.wire.messages import Layout

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

    def loss(models: Vectors, held_out: Sequence[Shard]) -> Matrix:
        score: Callable[..., Matrix] = _share_of_errors if task.has_classes else losses
        pairs = zip(models, held_out, strict=True)
        return np.array(
            [score(network, layout, one[None], [shard], training.device, task)[0, 0] for one, shard in pairs]
        )

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


def _share_of_errors(
    network: nn.Module, layout: Layout, models: Vectors, shards: Sequence[Shard], device: str, task: Task
) -> Matrix:
    return np.stack([1 - accuracies(network, layout, models, shard.x, shard.y, device, task) for shard in shards])


def _cross_validated(
    fits: Sequence[_Fit],
    candidates: Sequence[float],
    fit: Callable[[Sequence[_Fit]], Vectors],
    loss: Callable[[Vectors, Sequence[Shard]], Matrix],
) -> list[_Fit | None]:
    """Return each client's fit with the candidate of least loss on records that it was not fitted to.

    None: no candidate is better than the released model.
    """
    folds = _Folds.of(fits)

    def total(models: Vectors) -> Matrix:
        return folds.totals(loss(models, folds.held_out))

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
        parts = [(i, rest, apart) for i, fit in enumerate(fits) for rest, apart in _folds(fit)]
        owner = np.array([i for i, _, _ in parts])
        return cls(owner, [replace(fits[i], shard=rest) for i, rest, _ in parts], [apart for _, _, apart in parts])

    def totals(self, losses: Matrix) -> Matrix:
        """Return each client's sum of the mean losses of its parts, times their records."""
        sizes = np.array([len(shard.y) for shard in self.held_out])
        return np.asarray(np.round(np.bincount(self.owner, weights=losses * sizes), 6))  # equal numbers are equal


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
            pairs = zip(outputs_shared, outputs_alone, folds.held_out, strict=True)
            found = folds.totals(np.array([_error(task, _weighted(a, b, weight), s.y) for a, b, s in pairs]))
            for i in np.flatnonzero(found < least).tolist():
                best[i] = _mixed(network, layout, shared[i - clients], alone[i - clients], weight)
            least = np.minimum(least, found)
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


def _weighted(first: Matrix, second: Matrix, weight: float) -> Matrix:
    """Return a weighted mean; a term of weight 0 need not be finite."""
    if weight in (0, 1):
        return first if weight else second
    return weight * first + (1 - weight) * second


def _error(task: Task, out: Matrix, y: npt.NDArray[Any]) -> float:
    """Return the squared error of a task; inf for outputs that are not finite."""
    return task.squared_error(out, y) if np.isfinite(out).all() else np.inf


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
