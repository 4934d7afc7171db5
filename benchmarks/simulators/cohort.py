"""How much faster a cohort trains as one batched program than client after client: a ratio, in one run.

    python benchmarks/speed.py --workload cohort [--device cpu|cuda] [--model mlp-32] [--clients 100] [--private]

With --private they train by DP-SGD, the plain way by Opacus. Both ways alternate. The result holds median seconds of
both ways, their ratio, and the largest difference of an update.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import torch

from coterie import models as networks
from coterie.client.backend import train
from coterie.client.dpsgd import DPSGD, train_privately
from coterie.client.sgd import LocalTrainingConfig
from coterie.datasets import Shard, TestSet
from coterie.wire.messages import Layout

SHAPE, CLASSES, EXAMPLES = (1, 28, 28), 10, 60


def cohort(clients: int) -> list[Shard]:
    """Made-up clients with as many images as Fashion-MNIST gives to each of a thousand."""
    rng = np.random.default_rng(0)
    shards = []
    for client in range(clients):
        x = rng.standard_normal((EXAMPLES, *SHAPE)).astype(np.float32)
        y = rng.integers(CLASSES, size=EXAMPLES)
        shards.append(Shard(client, 0, x, y, TestSet(x, y)))
    return shards


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this workload."""
    parser.add_argument("--model", default="mlp-32", help="cohort: the network")
    parser.add_argument("--private", action="store_true", help="cohort: DP-SGD, against Opacus")


def compare(chosen: argparse.Namespace) -> dict[str, Any]:
    """Measure, alternating the two ways so that both meet the same machine."""
    clients = chosen.clients or 100
    network = networks.build(chosen.model, SHAPE, CLASSES)
    first = networks.initialise(chosen.model, SHAPE, CLASSES, 0)
    layout = Layout.of(first)
    shards = cohort(clients)
    start = np.repeat(layout.flatten(first)[None], clients, axis=0)
    hyper = LocalTrainingConfig(local_epochs=2, batch_size=20, lr=0.1, device=chosen.device)
    private = DPSGD(
        num_examples=EXAMPLES,
        batch_size=20,
        epochs=2,
        lr=0.1,
        clip_norm=1.0,
        noise_multiplier=1.0,
        device=chosen.device,
    )

    def once(batched: bool) -> tuple[float, np.ndarray]:
        coins, noises = ([np.random.default_rng([i, j]) for i in range(clients)] for j in (0, 1))
        began = time.perf_counter()
        if chosen.private:
            terms = [private] * clients
            updates = train_privately(network, layout, start, shards, coins, noises, terms, batched=batched)
        else:
            updates = train(network, layout, start, shards, coins, hyper, batched=batched)
        return time.perf_counter() - began, updates

    _, plain = once(False)
    _, fast = once(True)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(chosen.repeat):
        for batched in (False, True):
            seconds[batched].append(once(batched)[0])
    sequential, together = statistics.median(seconds[False]), statistics.median(seconds[True])
    return {
        "workload": "cohort",
        "model": chosen.model,
        "private": chosen.private,
        "device": torch.cuda.get_device_name() if chosen.device == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "clients": clients,
        "seconds_sequential": sequential,
        "seconds_batched": together,
        "times_faster": sequential / together,
        "largest_difference": float(np.abs(plain - fast).max()),
    }
