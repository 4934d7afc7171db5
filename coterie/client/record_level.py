"""Training with record-level privacy: charge the client's budget, choose a model, and run DP-SGD.

The result of a client does not depend on other clients, and the server may process it in any way.
"""

from __future__ import annotations

import numpy as np

from coterie.client.budget import charge
from coterie.client.cohort import Cohort, Labels
from coterie.client.dpsgd import DPSGD, check_supported
from coterie.client.dpsgd import train_privately as by_dpsgd
from coterie.client.identity import Client
from coterie.client.layers import Vectors
from coterie.client.scores import example_losses
from coterie.client.state import ClientError
from coterie.privacy import PrivacyError, RecordPlan, Streams, noisy_argmin, noisy_losses
from coterie.wire import RequestError
from coterie.wire.messages import Layout


def train_privately(cohort: Cohort) -> tuple[Labels, Vectors, list[float | None], list[ClientError | None]]:
    """Train every client for one round.

    Returns:
        (n,) index of the model that each client trained, (n, d) updates, noisy shares of short gradients where the plan
        releases them, and errors: None for clients that trained.
    """
    clients, request, training = cohort.clients, cohort.train_request, cohort.local_training
    layout = _whole_layout(cohort)  # first: a network that cannot be built or trained fails before the charge
    check_supported(cohort.network, cohort.federation)
    streams = Streams(cohort.config.seed)
    chosen = np.zeros(len(clients), np.int64)
    refusals: list[ClientError | None] = [None] * len(clients)
    coins, noises, settings = [], [], []
    for i, client in enumerate(clients):
        key = charge_reply(cohort, i)  # before data are read
        if isinstance(key, ClientError):
            refusals[i] = key
            continue
        plan = cohort.plan(client.client_id)
        if request.choose:
            chosen[i] = _choose(cohort, i, plan, streams.stream("choice", *key))
        coins.append(streams.stream("batches", *key))
        noises.append(streams.stream("gradients", *key))
        settings.append(
            DPSGD(
                num_examples=plan.num_examples,
                batch_size=plan.batch(request.first_batch),
                epochs=plan.local_epochs,
                lr=training.lr,
                clip_norm=plan.clip_norm,
                noise_multiplier=plan.noise_of_gradients(request.first_batch),
                norm_threshold=plan.norm_threshold,
                noise_of_norms=plan.noise_of_norms(request.first_batch),
                device=training.device,
                penalty=training.penalty,
            )
        )
    willing = [i for i, refusal in enumerate(refusals) if refusal is None]
    updates = np.zeros((len(clients), layout.size), np.float32)
    below: list[float | None] = [None] * len(clients)
    if willing:
        start = cohort.models[chosen[willing]]
        shards = [cohort.shard(clients[i]) for i in willing]
        shares = np.zeros(len(willing))
        updates[willing] = by_dpsgd(
            cohort.network, layout, start, shards, coins, noises, settings, batched=True, below=shares
        )
        for i, dpsgd, share in zip(willing, settings, shares.tolist(), strict=True):
            below[i] = None if dpsgd.noise_of_norms is None else share
    return chosen, updates, below, refusals


def noisy_model_losses(cohort: Cohort) -> tuple[Vectors, list[ClientError | None]]:
    """Return (n, m) noisy losses of all models on each client's records, and errors: None for clients that reply."""
    models, layout, bound = cohort.models, _whole_layout(cohort), cohort.config.loss_bound
    released = np.zeros((len(cohort.clients), len(models)), np.float32)
    refusals: list[ClientError | None] = [None] * len(cohort.clients)
    for i, client in enumerate(cohort.clients):
        key = charge_reply(cohort, i, releases_losses=True)  # before data are read
        if isinstance(key, ClientError):
            refusals[i] = key
            continue
        plan, rng = cohort.plan(client.client_id), Streams(cohort.config.seed).stream("losses", *key)
        losses = example_losses(cohort.network, layout, models, cohort.shard(client), cohort.local_training.device)
        assert bound is not None  # see _check_covered
        released[i] = noisy_losses(losses, bound, plan.loss_deviation, plan.num_examples, rng)
    return released, refusals


def _whole_layout(cohort: Cohort) -> Layout:
    """Return the layout of the network.

    Raises:
        RequestError: the message lacks parameters; without record-level privacy they would be personal.
    """
    if missing := cohort.layers.own.names:
        raise RequestError(f"the models lack {', '.join(missing)}, which record-level privacy does not support")
    return cohort.layers.whole


def charge_reply(cohort: Cohort, i: int, *, releases_losses: bool = False) -> tuple[int, int, int] | ClientError:
    """Charge a client for its reply.

    Returns:
        the key of its random streams: round, client id and number of the charge; or why it rejects the request.
    """
    client, request = cohort.clients[i], cohort.request
    plan = cohort.plan(client.client_id)
    try:
        _check_covered(cohort, client, releases_losses)
        number = charge(client, cohort.folders[i], plan, request.round, request, cohort.config.strategy)
    except ClientError as refusal:
        return refusal
    except PrivacyError as unplanned:
        return ClientError(f"client {client.client_id} rejects the request: {unplanned}")
    return request.round, client.client_id, number


def _check_covered(cohort: Cohort, client: Client, releases_losses: bool) -> None:
    """Check that the client's plan covers what the request releases.

    Raises:
        ClientError: the request has a choice or losses that the plan does not cover, or the run of a client with a
            budget has a seed.
    """
    plan, choose = cohort.plan(client.client_id), cohort.train_request.choose
    if (releases_losses or choose) and cohort.config.loss_bound is None:
        raise ClientError(
            f"client {client.client_id} rejects the request: loss-bound is required for losses of records"
        )
    if choose and (plan.selection == "none" or (plan.selection == "exact" and client.budget)):
        raise ClientError(
            f"client {client.client_id} rejects the request: its plan does not cover the choice of a cluster by loss; "
            "use selection = gumbel"
        )
    if cohort.config.seed is not None and client.budget:
        raise ClientError(
            f"client {client.client_id} rejects the request: a seed reveals the noise; run without a seed (seed = none)"
        )


def _choose(cohort: Cohort, i: int, plan: RecordPlan, rng: np.random.Generator) -> int:
    """Return the model of least loss: by the exponential mechanism, or exactly, which is never certified."""
    if plan.selection == "exact":
        return int(cohort.losses[i].argmin())
    shard, device = cohort.shard(cohort.clients[i]), cohort.local_training.device
    losses = example_losses(cohort.network, cohort.layers.whole, cohort.models, shard, device)
    assert cohort.config.loss_bound is not None  # see _check_covered
    return noisy_argmin(losses, cohort.config.loss_bound, plan.selection_epsilon, rng)
