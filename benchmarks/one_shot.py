"""How settings of PPFC-GAN were chosen: by quantities that clients and server see, never by labels.

    python benchmarks/one_shot.py gans [--dataset pendigits] [--epochs 200] [--clients 2]
    python benchmarks/one_shot.py dcn [--level 0 | --run FOLDER]
    python benchmarks/one_shot.py speed [--device cuda] [--gan gan-mnist-gn]

``gans``: energy distance of each GAN's samples to the records that it was trained on, and their density among them, at
p = 0 and 1, of the last generator and of its averages; two halves of the records have those of "records". ``dcn``: over
noise and code, how far two seeds agree on clusters of equal samples (adjusted Rand and NMI), and the mean silhouette of
their codes; with a run folder, over epochs and noise, on 2000 samples of each client's that the run has kept.
``speed``: how much faster ten GANs train as one batched program than one after the other: a ratio, in one run.

Prints a line of JSON for every measurement. COTERIE_DATA names the folder of the data.
"""

import argparse
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from scipy.spatial.distance import cdist
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score, silhouette_score
from sklearn.metrics.pairwise import euclidean_distances

from coterie.client.gan_training import GANTraining, train_gans
from coterie.clustering.dcn import DCN
from coterie.datasets import Partition, federate
from coterie.logs import set_progress_sink
from coterie.models import GANS, build_gan, drawn, gan_for
from coterie.wire.messages import Layout

# Records of which distances are taken.
MOST = 1000
# How much generators keep of their average at a step.
AVERAGES = (0.0, 0.99, 0.995, 0.998)


def samples(name: str, records: list[np.ndarray], epochs: int, batched: bool = False, **how: Any) -> list[np.ndarray]:
    """Of a GAN of every client."""
    shape = records[0].shape[1:]
    network = build_gan(name, shape, 10)
    start = drawn(lambda: build_gan(name, shape, 10), 0)
    layout = Layout.of(start)
    training = GANTraining(GANS[name], 10, epochs, 64, **how)
    rngs = [np.random.default_rng([0, i]) for i in range(len(records))]
    everyone = range(len(records))
    return train_gans(
        network, layout, layout.flatten(start), records, rngs, training, clients=everyone, batched=batched
    )


def energy(a: np.ndarray, b: np.ndarray) -> float:
    """Energy distance of two samples (Szekely and Rizzo 2013)."""
    a, b = a[:MOST].reshape(len(a[:MOST]), -1), b[:MOST].reshape(len(b[:MOST]), -1)
    return float(2 * cdist(a, b).mean() - cdist(a, a).mean() - cdist(b, b).mean())


def density(records: np.ndarray, made: np.ndarray, k: int = 5) -> float:
    """How many balls around a record, out to its k-th neighbour, hold a sample, over k (Naeem et al. 2020); of other
    records 1, of samples between clusters less."""
    x, y = records.reshape(len(records), -1), made.reshape(len(made), -1)
    reach = np.partition(euclidean_distances(x), k, axis=1)[:, k]  # a record is its own nearest
    return float((euclidean_distances(y, x) < reach).sum(axis=1).mean() / k)


def both(records: list[np.ndarray], others: list[np.ndarray]) -> dict[str, float]:
    """Means over clients."""
    pairs = list(zip(records, others, strict=True))
    return {of.__name__: round(float(np.mean([of(*pair) for pair in pairs])), 4) for of in (energy, density)}


def tell(**measured: object) -> None:
    print(json.dumps(measured), flush=True)


def clients(dataset: str, level: float, count: int = 10) -> list[np.ndarray]:
    data = federate(dataset, Partition(clients=10, groups="1", shift="none", label_skew=f"non-iid:{level}"))
    return [data.shard(i).x for i in range(count)]


def gans(dataset: str, epochs: int, count: int) -> None:
    for level in (0.0, 1.0):
        records = clients(dataset, level, count)
        halves = [x[: len(x) // 2] for x in records], [x[len(x) // 2 :] for x in records]
        tell(dataset=dataset, p=level, of="records", **both(*halves))
        shape = records[0].shape[1:]
        fits = [n for n, info in GANS.items() if info.shape == shape or (info.shape is None and len(shape) == 1)]
        for name in fits:
            for average in AVERAGES:
                started = time.perf_counter()
                made = samples(name, records, epochs, average=average)
                seconds = round(time.perf_counter() - started)
                found = {"epochs": epochs, "average": average, **both(records, made)}
                tell(dataset=dataset, p=level, of=name, **found, seconds=seconds)


def dcn(level: float, run: Path | None) -> None:
    usual = DCN(10, restarts=1)
    if run:
        kept = sorted((run / "evidence").glob("points-*.npz"))
        points = np.concatenate([np.load(file)["points"][:2000] for file in kept])
        images = replace(usual, joint_epochs=60, precision="bfloat16")
        tried = [replace(images, pretrain_epochs=e, noise=z) for e, z in ((40, 0.4), (150, 0.4), (40, 0.8))]
    else:
        records = clients("pendigits", level)
        points = np.concatenate(samples(gan_for(records[0].shape[1:]), records, 200))
        tried = [replace(usual, noise=noise) for noise in (0.0, 0.2, 0.4, 0.7)] + [replace(usual, encoder="sae-relu")]
    for how in tried:
        found = [replace(how, seed=seed).fit(points) for seed in (0, 1)]
        with torch.no_grad():
            labels = [one(torch.as_tensor(points)).argmax(dim=1).numpy() for one in found]
            codes = [one.encoder(torch.as_tensor(points[:MOST])).numpy() for one in found]
        tell(
            of=str(run or level),
            epochs=how.pretrain_epochs,
            noise=how.noise,
            encoder=how.encoder,
            agreement=[round(float(of(*labels)), 3) for of in (adjusted_rand_score, normalized_mutual_info_score)],
            silhouette=[round(float(silhouette_score(c, own[:MOST])), 3) for c, own in zip(codes, labels, strict=True)],
        )


def speed(device: str, name: str, epochs: int = 2) -> None:
    rng = np.random.default_rng(0)
    records = [rng.uniform(-1, 1, (640, *(GANS[name].shape or (16,)))).astype(np.float32) for _ in range(10)]
    seconds = []
    for batched in (False, True):
        samples(name, records, 1, batched, device=device)  # warm
        started = time.perf_counter()
        samples(name, records, epochs, batched, device=device)
        seconds.append(time.perf_counter() - started)
    tell(gan=name, device=device, one_after_the_other=seconds[0], all_at_once=seconds[1], ratio=seconds[0] / seconds[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("gans", "dcn", "speed"))
    parser.add_argument("--dataset", default="pendigits")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--level", type=float, default=0.0)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--gan", default="gan-pendigits-gn")
    asked = parser.parse_args()
    set_progress_sink(lambda text: None)
    if asked.what == "gans":
        gans(asked.dataset, asked.epochs, asked.clients)
    elif asked.what == "dcn":
        dcn(asked.level, asked.run)
    else:
        speed(asked.device, asked.gan)


if __name__ == "__main__":
    main()
