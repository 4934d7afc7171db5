"""How much faster a cohort trains as one batched program than client after client: a ratio, in one run.

    python benchmarks/speed.py [--device cpu|cuda] [--model mlp-32] [--clients 100] [--repeat 5] [--private]

With --private they train by DP-SGD, the plain way by Opacus.

Prints one JSON document: median seconds of both ways, their ratio, and the largest difference of an update.
"""

import argparse
import json
import os
import statistics
import time

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch

from coterie import models as networks
from coterie.client import LocalTrainingConfig, train
from coterie.client.dpsgd import DPSGD, train_privately
from coterie.datasets import Shard, TestSet
from coterie.messages import Layout

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


def main() -> None:
    """Measure, alternating the two ways so that both meet the same machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="mlp-32")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--private", action="store_true")
    chosen = parser.parse_args()
    network = networks.build(chosen.model, SHAPE, CLASSES)
    first = networks.initialise(chosen.model, SHAPE, CLASSES, 0)
    layout = Layout.of(first)
    shards = cohort(chosen.clients)
    start = np.repeat(layout.flatten(first)[None], chosen.clients, axis=0)
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
        coins, noises = ([np.random.default_rng([i, j]) for i in range(chosen.clients)] for j in (0, 1))
        began = time.perf_counter()
        if chosen.private:
            terms = [private] * chosen.clients
            updates = train_privately(network, layout, start, shards, coins, noises, terms, batched=batched)
        else:
            updates = train(network, layout, start, shards, coins, hyper, batched=batched)
        return time.perf_counter() - began, updates

    _, plain = once(False)
    _, fast = once(True)
    seconds = {False: [], True: []}
    for _ in range(chosen.repeat):
        for batched in (False, True):
            seconds[batched].append(once(batched)[0])
    sequential, batched = statistics.median(seconds[False]), statistics.median(seconds[True])
    result = {
        "model": chosen.model,
        "private": chosen.private,
        "device": torch.cuda.get_device_name() if chosen.device == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "clients": chosen.clients,
        "seconds_sequential": sequential,
        "seconds_batched": batched,
        "times_faster": sequential / batched,
        "largest_difference": float(np.abs(plain - fast).max()),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
