"""Training with record-level privacy: charge the client's budget, choose a model, and run DP-SGD.

The result of a client does not depend on other clients, and the server may process it in any way.
"""

from __future__ import annotations

import numpy as np
from torch import nn

from coterie.client.backend import Examples
from coterie.client.budget import charge
from coterie.client.cohort import Cohort, Labels
from coterie.client.dpsgd import DPSGD
from coterie.client.dpsgd import train_privately as by_dpsgd
from coterie.client.identity import Client
from coterie.client.layers import Vectors
from coterie.client.records_apart import apart
from coterie.client.scores import example_losses, outputs
from coterie.client.state import ClientError
from coterie.datasets import OwnFederation, Shard
from coterie.fields import UNIT_SHARES
from coterie.privacy import PerUnit, PrivacyError, Streams, noisy_argmin, noisy_losses
from coterie.privacy.score_histograms import CELLS, UnitCounts, count_scores
from coterie.wire.messages import EVALUATE, LOSSES, TRAIN, Layout


def charge_clients(cohort: Cohort) -> dict[int, ClientError]:
    """Charge every client for its reply, before data are read, and keep the keys of their random streams.

    Returns:
        errors of the clients whose plan or budget does not allow the reply, by client id.
    """
    errors: dict[int, ClientError] = {}
    request = cohort.request
    for client, folder in zip(cohort.clients, cohort.folders, strict=True):
        plan, number = cohort.plan(client.client_id), client.client_id
        try:
            _check_covered(cohort, client)
            charged = charge(client, folder, plan, request.round, request, cohort.config.strategy)
            cohort.keys[number] = request.round, number, charged
        except ClientError as refusal:
            errors[number] = refusal
        except PrivacyError as unpaid:
            errors[number] = ClientError(f"client {number} rejects the request: {unpaid}")
    return errors


def train_privately(cohort: Cohort) -> tuple[Labels, Vectors, list[float | None]]:
    """Train every client for one round.

    Returns:
        (n,) index of the model that each client trained, (n, d) updates, and noisy shares of short gradients where the
        plan releases them.
    """
    request, streams = cohort.train_request, Streams(cohort.config.seed)
    keys = [cohort.keys[client.client_id] for client in cohort.clients]
    chosen = np.zeros(len(keys), np.int64)
    if request.choice:
        chosen = np.array([_choose(cohort, i, streams.stream("choice", *key)) for i, key in enumerate(keys)])
    coins, noises = ([streams.stream(name, *key) for key in keys] for name in ("batches", "gradients"))
    settings = [
        DPSGD.of(cohort.plan(client.client_id), cohort.local_training, request.first_batch) for client in cohort.clients
    ]
    shares = np.zeros(len(keys))
    updates = by_dpsgd(
        cohort.network,
        cohort.layers.whole,
        cohort.models[chosen],
        cohort.shards,
        coins,
        noises,
        settings,
        batched=True,
        below=shares,
    )
    if cohort.config.training.optimizer != "sgd":
        # Scale updates that are longer than the server accepts, which is as good as impossible by SGD.
        training, first = cohort.config.training, cohort.train_request.first_batch
        for client, update in zip(cohort.clients, updates, strict=True):
            plan, norm = cohort.plan(client.client_id), float(np.linalg.norm(update.astype(np.float64)))
            limit = plan.max_update_norm(update.size, training.lr, first=first, optimizer=training.optimizer)
            if norm > limit:
                update *= np.float32(0.9999 * limit / norm)
    released = [dpsgd.noise_of_norms is not None for dpsgd in settings]
    return chosen, updates, [share if known else None for share, known in zip(shares.tolist(), released, strict=True)]


def noisy_model_losses(cohort: Cohort) -> Vectors:
    """Return (n, m) noisy losses of all models on each client's records."""
    bound, released = cohort.config.loss_bound, np.zeros((len(cohort.clients), len(cohort.models)), np.float32)
    assert bound is not None  # see _check_covered
    for i, client in enumerate(cohort.clients):
        plan = cohort.plan(client.client_id)
        rng = Streams(cohort.config.seed).stream("losses", *cohort.keys[client.client_id])
        released[i] = noisy_losses(_losses(cohort, i), bound, plan.loss_deviation, plan.num_examples, rng)
    return released


def noisy_histograms(cohort: Cohort) -> list[list[float]]:
    """Return each client's noisy counts of the scores of its held-out records, for the one received model."""
    histograms = []
    for client in cohort.clients:
        shard, device = cohort.shard(client), cohort.local_training.device
        units = cohort.federation.has_units
        counts = held_out_counts(cohort.network, cohort.layers.whole, cohort.models, shard, units=units, device=device)
        rng = Streams(cohort.config.seed).stream("histogram", *cohort.keys[client.client_id])
        histograms.append(counts.noisy(cohort.plan(client.client_id).held_out_epsilon, rng).tolist())
    return histograms


def held_out_counts(
    network: nn.Module, layout: Layout, models: Vectors, shard: Shard, *, units: bool = False, device: str = "cpu"
) -> UnitCounts:
    """Return the counts of the scores of a client's held-out records for the first of (k, d) models.

    Of records that belong to units, the shares are counted. Where nothing is held out, all counts are zero: no training
    record is ever counted.
    """
    counts, shares = np.zeros(CELLS), shard.test_shares
    if shard.test.x is not shard.x and len(shard.test.y):
        logits = outputs(_apart(network, shard, device), layout, models[:1], shard.test, device)[0]
        counts = count_scores(logits[:, 1] - logits[:, 0], shard.test.y, shares)
    return UnitCounts(counts, UNIT_SHARES if units else 1)


def _check_covered(cohort: Cohort, client: Client) -> None:
    """Check that the client's plan covers what the request releases.

    Raises:
        PrivacyError: the request has a choice, losses or a histogram that the plan does not cover, or the run of a
            client with a budget has a seed.
    """
    message_type, choice = cohort.request.message_type, cohort.train_request.choice
    plan = cohort.plan(client.client_id)
    if message_type not in (TRAIN, LOSSES, EVALUATE) and cohort.federation.has_units:
        raise PrivacyError(
            "a method that clusters records protects single records, not the units that the schema declares"
        )
    if message_type == EVALUATE and (len(cohort.models) != 1 or cohort.federation.num_classes != 2):
        raise PrivacyError("a histogram of scores is of one model, for two classes")
    if message_type == EVALUATE and not isinstance(cohort.federation, OwnFederation):
        raise PrivacyError("only clients' own data have held-out records of which no other client holds a copy")
    if (message_type == LOSSES or choice) and cohort.config.loss_bound is None:
        raise PrivacyError("loss-bound is required for losses of records")
    if choice and (plan.selection == "none" or (plan.selection == "exact" and client.budget)):
        raise PrivacyError("its plan does not cover the choice of a cluster by loss; use selection = gumbel")
    if cohort.config.seed is not None and client.budget:
        raise PrivacyError("a seed reveals the noise; run without a seed (seed = none)")


def _choose(cohort: Cohort, i: int, rng: np.random.Generator) -> int:
    """Return the model of least loss: by the exponential mechanism, or exactly, which is never certified."""
    plan = cohort.plan(cohort.clients[i].client_id)
    if plan.selection == "exact":
        return int(cohort.losses[i].argmin())
    assert cohort.config.loss_bound is not None  # see _check_covered
    return noisy_argmin(_losses(cohort, i), cohort.config.loss_bound, plan.selection_epsilon, rng)


def _losses(cohort: Cohort, i: int) -> PerUnit:
    """Return the losses of all models on a client's records, or their means on its units."""
    shard, device = cohort.shard(cohort.clients[i]), cohort.local_training.device
    network = _apart(cohort.network, shard, device)
    losses = example_losses(network, cohort.layers.whole, cohort.models, shard, device, cohort.task)
    return losses.per_unit(None if shard.units is None else shard.units.of_record)


def _apart(network: nn.Module, shard: Shard, device: str) -> nn.Module:
    """Return a network that treats records apart: a record must not move the released numbers of another."""
    return apart(network, Examples.of(shard.x[:0], shard.y[:0], device))
