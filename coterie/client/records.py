"""Training at record level: a client charges itself, chooses a model, and runs DP-SGD on it.

The server may process the result in any way; nothing here depends on other clients.
"""

from __future__ import annotations

import numpy as np

from coterie.client.budget import charge
from coterie.client.dpsgd import DPSGD
from coterie.client.dpsgd import train_privately as by_dpsgd
from coterie.client.layers import Vectors
from coterie.client.memory import ClientError
from coterie.client.task import Client, Cohort, Labels, Task
from coterie.client.training import example_losses
from coterie.privacy import PrivacyError, RecordPlan, Streams, noisy_argmin, noisy_losses


def train_privately(cohort: Cohort) -> tuple[Labels, Vectors, list[ClientError | None]]:
    """One round of every client.

    Returns:
        (n,) index of the model that each client trained, (n, d) updates, and the errors of clients that refuse.
    """
    task, clients, layout = (
        cohort.task,
        cohort.clients,
        cohort.layers.whole,
    )  # a network that cannot be built fails before the charge
    streams = Streams(task.seed)
    chosen = np.zeros(len(clients), np.int64)
    refusals: list[ClientError | None] = [None] * len(clients)
    coins, noises, settings = [], [], []
    for i, (client, folder) in enumerate(zip(clients, cohort.folders, strict=True)):
        plan = task.plan(client.client_id)
        key = (task.round, client.client_id)
        try:
            check_paid(client, task, plan)
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
                lr=task.hyper.lr,
                clip_norm=plan.clip_norm,
                noise_multiplier=plan.noise(task.first),
                device=task.hyper.device,
            )
        )
    willing = [i for i, refusal in enumerate(refusals) if refusal is None]
    updates = np.zeros((len(clients), layout.size), np.float32)
    if willing:
        start = cohort.models[chosen[willing]]
        shards = [cohort.shard(i) for i in willing]
        updates[willing] = by_dpsgd(task.network, layout, start, shards, coins, noises, settings, batched=task.batched)
    return chosen, updates, refusals


def tell_losses(cohort: Cohort) -> tuple[Vectors, list[ClientError | None]]:
    """(n, m) noisy losses of all models on each client's records, and the errors of clients that refuse."""
    task, clients, models, layout = cohort.task, cohort.clients, cohort.models, cohort.layers.whole
    told = np.zeros((len(clients), len(models)), np.float32)
    refusals: list[ClientError | None] = [None] * len(clients)
    for i, (client, folder) in enumerate(zip(clients, cohort.folders, strict=True)):
        plan = task.plan(client.client_id)
        try:
            check_paid(client, task, plan, releases_losses=True)
            number = charge(client, folder, plan, task.round, cohort.request)  # before data are read
        except ClientError as refusal:
            refusals[i] = refusal
            continue
        except PrivacyError as unplanned:
            refusals[i] = ClientError(f"client {client.client_id} refuses: {unplanned}")
            continue
        rng = Streams(task.seed).stream("losses", task.round, client.client_id, number)
        each = example_losses(task.network, layout, models, cohort.shard(i), task.hyper.device)
        assert task.loss_bound is not None  # check_paid
        told[i] = noisy_losses(each, task.loss_bound, plan.loss_deviation, plan.num_examples, rng)
    return told, refusals


def check_paid(client: Client, task: Task, plan: RecordPlan, *, releases_losses: bool = False) -> None:
    """Check that the budget covers a task.

    Raises:
        ClientError: it has a choice or losses without terms for them, or a seed.
    """
    if (releases_losses or task.choose) and task.loss_bound is None:
        raise ClientError(f"client {client.client_id} refuses: loss-bound is missing; losses of records need a bound")
    if task.choose and (plan.selection == "none" or (plan.selection == "exact" and client.budget)):
        raise ClientError(
            f"client {client.client_id} refuses: it was asked to choose a cluster by loss, and its plan pays for no "
            "such choice; use selection = gumbel"
        )
    if task.seed is not None and client.budget:
        raise ClientError(
            f"client {client.client_id} refuses: whoever sends a seed knows the noise; run without one (seed = none)"
        )


def _choose(cohort: Cohort, i: int, plan: RecordPlan, rng: np.random.Generator) -> int:
    """The model of least loss: by the exponential mechanism, or exactly, which is never certified."""
    if plan.selection == "exact":
        return int(cohort.losses[i].argmin())
    task = cohort.task
    each = example_losses(task.network, cohort.layers.whole, cohort.models, cohort.shard(i), task.hyper.device)
    assert task.loss_bound is not None  # check_paid
    return noisy_argmin(each, task.loss_bound, plan.selection_epsilon, rng)
