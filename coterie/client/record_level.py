"""Training with record-level privacy: charge the client's budget, choose a model, and run DP-SGD.

The result of a client does not depend on other clients, and the server may process it in any way.
"""

from __future__ import annotations

import numpy as np

from coterie.client.budget import charge
from coterie.client.dpsgd import DPSGD, check_supported
from coterie.client.dpsgd import train_privately as by_dpsgd
from coterie.client.identity import Client
from coterie.client.layers import Vectors
from coterie.client.scores import example_losses
from coterie.client.state import ClientError
from coterie.client.task import Cohort, Labels, Task
from coterie.privacy import PrivacyError, RecordPlan, Streams, noisy_argmin, noisy_losses
from coterie.wire import RequestError
from coterie.wire.messages import Layout


def train_privately(cohort: Cohort) -> tuple[Labels, Vectors, list[float | None], list[ClientError | None]]:
    """Train every client for one round.

    Returns:
        (n,) index of the model that each client trained, (n, d) updates, noisy shares of short gradients where the plan
        releases them, and errors: None for clients that trained.
    """
    task, clients = cohort.task, cohort.clients
    layout = _whole_layout(cohort)  # first: a network that cannot be built or trained fails before the charge
    check_supported(task.network, task.federation)
    streams = Streams(task.seed)
    chosen = np.zeros(len(clients), np.int64)
    refusals: list[ClientError | None] = [None] * len(clients)
    coins, noises, settings = [], [], []
    for i, (client, folder) in enumerate(zip(clients, cohort.folders, strict=True)):
        plan = task.plan(client.client_id)
        key: tuple[int, ...] = (task.round, client.client_id)
        try:
            check_covered(client, task, plan)
            key = (*key, charge(client, folder, plan, task.round, cohort.request))  # before data are read
        except ClientError as refusal:
            refusals[i] = refusal
            continue
        if task.choose:
            chosen[i] = _choose(cohort, i, plan, streams.stream("choice", *key))
        coins.append(streams.stream("batches", *key))
        noises.append(streams.stream("gradients", *key))
        settings.append(
            DPSGD(
                num_examples=plan.num_examples,
                batch_size=plan.batch(task.first),
                epochs=plan.local_epochs,
                lr=task.training.lr,
                clip_norm=plan.clip_norm,
                noise_multiplier=plan.noise_of_gradients(task.first),
                norm_threshold=plan.norm_threshold,
                noise_of_norms=plan.noise_of_norms(task.first),
                device=task.training.device,
                penalty=task.training.penalty,
            )
        )
    willing = [i for i, refusal in enumerate(refusals) if refusal is None]
    updates = np.zeros((len(clients), layout.size), np.float32)
    below: list[float | None] = [None] * len(clients)
    if willing:
        start = cohort.models[chosen[willing]]
        shards = [cohort.shard(i) for i in willing]
        shares = np.zeros(len(willing))
        updates[willing] = by_dpsgd(
            task.network, layout, start, shards, coins, noises, settings, batched=task.batched, below=shares
        )
        for i, own, share in zip(willing, settings, shares.tolist(), strict=True):
            below[i] = None if own.noise_of_norms is None else share
    return chosen, updates, below, refusals


def noisy_model_losses(cohort: Cohort) -> tuple[Vectors, list[ClientError | None]]:
    """Return (n, m) noisy losses of all models on each client's records, and errors: None for clients that reply."""
    task, clients, models, layout = cohort.task, cohort.clients, cohort.models, _whole_layout(cohort)
    released = np.zeros((len(clients), len(models)), np.float32)
    refusals: list[ClientError | None] = [None] * len(clients)
    for i, (client, folder) in enumerate(zip(clients, cohort.folders, strict=True)):
        plan = task.plan(client.client_id)
        try:
            check_covered(client, task, plan, releases_losses=True)
            number = charge(client, folder, plan, task.round, cohort.request)  # before data are read
        except ClientError as refusal:
            refusals[i] = refusal
            continue
        except PrivacyError as unplanned:
            refusals[i] = ClientError(f"client {client.client_id} rejects the request: {unplanned}")
            continue
        rng = Streams(task.seed).stream("losses", task.round, client.client_id, number)
        each = example_losses(task.network, layout, models, cohort.shard(i), task.training.device)
        assert task.loss_bound is not None  # see check_covered
        released[i] = noisy_losses(each, task.loss_bound, plan.loss_deviation, plan.num_examples, rng)
    return released, refusals


def _whole_layout(cohort: Cohort) -> Layout:
    """Return the layout of the network.

    Raises:
        RequestError: the message lacks parameters; without record-level privacy they would be personal.
    """
    if missing := cohort.layers.own.names:
        raise RequestError(f"the models lack {', '.join(missing)}, which record-level privacy does not support")
    return cohort.layers.whole


def check_covered(client: Client, task: Task, plan: RecordPlan, *, releases_losses: bool = False) -> None:
    """Check that the plan covers what a task releases.

    Raises:
        ClientError: the task has a choice or losses that the plan does not cover, or a seed at a client with a budget.
    """
    if (releases_losses or task.choose) and task.loss_bound is None:
        raise ClientError(
            f"client {client.client_id} rejects the request: loss-bound is required for losses of records"
        )
    if task.choose and (plan.selection == "none" or (plan.selection == "exact" and client.budget)):
        raise ClientError(
            f"client {client.client_id} rejects the request: its plan does not cover the choice of a cluster by loss; "
            "use selection = gumbel"
        )
    if task.seed is not None and client.budget:
        raise ClientError(
            f"client {client.client_id} rejects the request: a seed reveals the noise; run without a seed (seed = none)"
        )


def _choose(cohort: Cohort, i: int, plan: RecordPlan, rng: np.random.Generator) -> int:
    """Return the model of least loss: by the exponential mechanism, or exactly, which is never certified."""
    if plan.selection == "exact":
        return int(cohort.losses[i].argmin())
    task = cohort.task
    each = example_losses(task.network, cohort.layers.whole, cohort.models, cohort.shard(i), task.training.device)
    assert task.loss_bound is not None  # see check_covered
    return noisy_argmin(each, task.loss_bound, plan.selection_epsilon, rng)
