"""Error of the pooled AUC that a private histogram of scores gives: `python benchmarks/private_scores.py [--seeds 20]`.

Part ``runs`` trains on generated own data (20 % positives): 500 clients with 100 records each at client level, and 5
sites with 300 records each at record level, and compares the estimates with the exact metrics of the same model on the
same held-out records. Part ``scores`` draws calibrated scores of known AUC instead, 500 clients with 5 to 35 held-out
records, and 5 sites with 60, and also states the error without smoothing at 8, 16 and 32 bins. Part ``classes`` draws
scores of 3 and 10 classes, one histogram for each class against all others, and states the error of the macro AUC.
Seeds below 20 are for reports; methods were chosen on seeds from 100. Prints tables; ``--out`` writes a line per case
and seed.
"""

import argparse
import csv
import itertools
import json
import logging
import math
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import expit, ndtri, softmax

from coterie.datasets import facts, own_federation
from coterie.engine.in_process import SummingGrid
from coterie.inference import load
from coterie.privacy import Joint
from coterie.privacy.score_histograms import (
    BINS,
    CELLS,
    NORM,
    ScoreHistogram,
    UnitCounts,
    count_scores,
    deviation_of_counts,
    sum_of_clients,
)
from coterie.rounds.score_estimates import estimate
from coterie.server import RunConfig, RunFolder, run
from coterie.tasks import performance

EPSILON = 8.0
FEATURES = 8
COMMON: dict[str, Any] = {
    "strategy": "fedavg",
    "dataset": "own",
    "input-shape": str(FEATURES),
    "num-classes": 2,
    "model": "linear",
    "evaluate": "private",
    "epsilon": EPSILON,
}
METRICS = ("roc_auc", "sensitivity_at_90", "average_precision", "brier")


def write_data(folder: Path, clients: int, records: int, seed: int) -> None:
    """Write the records of clients: a logistic model of eight features, of which a fifth is positive."""
    rng = np.random.default_rng([seed, 45])
    direction = np.random.default_rng(0).normal(size=FEATURES)
    direction *= 1.4 / np.linalg.norm(direction)
    for client in range(clients):
        y = (rng.random(records) < 0.2).astype(np.int64)
        x = rng.normal(size=(records, FEATURES)) + y[:, None] * direction
        np.savez(folder / f"client-{client}.npz", x=x.astype(np.float32), y=y)


def trained(level: str, seed: int, rounds: int, clients: int) -> list[dict[str, float]]:
    """Train one run; return estimates, exact metrics of the same records, and the cost with and without histogram.

    At record level the run releases a histogram for half of epsilon, and further ones are drawn of the same records for
    three quarters and for all of it.
    """
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        records = 100 if level == "client" else 300
        write_data(home, clients, records, seed)
        own = {"data-dir": place, "clients": clients, "rounds": rounds, "seed": seed, "evaluate-every": rounds}
        if level == "record":
            own |= {"privacy-unit": "record", "samples-per-client": 240, "score-share": 0.5}
        folder = RunFolder.create(home / "run", RunConfig({**COMMON, **own}))
        try:
            outcome = run(folder, SummingGrid(clients))
            charges, plan = folder.ledger.charges, folder.plan
        finally:
            folder.close()
        known = facts("own", str(FEATURES), 2)
        tests = [own_federation(place, clients, known, None).shard(client).test for client in range(clients)]
        shares = performance.probabilities(load(home / "run").outputs(np.concatenate([test.x for test in tests]), 0))
    exact = performance.of_classes(np.concatenate([test.y for test in tests]), shares).to_json()
    trainings = [charge["epsilon"] for charge in charges if charge["for"] in ("training", "evaluation")]
    costs = {"epsilon without": trainings[-1], "epsilon": plan.cost()}
    estimates = [outcome["estimates"] or {}]
    if level == "record":
        logits = np.log(np.maximum(shares[:, 1], 1e-300)) - np.log(np.maximum(shares[:, 0], 1e-300))
        ends = np.cumsum([len(test.y) for test in tests])[:-1]
        parts = zip(np.split(logits, ends), (test.y for test in tests), strict=True)
        counts, rng = [count_scores(*part) for part in parts], np.random.default_rng([seed, 47])
        estimates += [_estimated(counts, share * EPSILON, rng) for share in (0.75, 1.0)]
    return [_found(each, exact) | costs for each in estimates]


def _found(estimates: dict[str, Any], exact: dict[str, Any]) -> dict[str, float]:
    found = {name: estimates.get(name, math.nan) for name in METRICS}
    found |= {f"exact {name}": exact[name] for name in METRICS}
    return found | {"stated error": estimates.get("errors", {}).get("roc_auc", math.nan)}


def _estimated(counts: list[Any], epsilon: float, rng: np.random.Generator) -> dict[str, Any]:
    """Estimates of counts to which each site adds noise."""
    noisy = np.sum([UnitCounts(each).noisy(epsilon, rng) for each in counts], axis=0).reshape(2, BINS)
    found = estimate(ScoreHistogram(noisy, np.full(2, deviation_of_counts([epsilon] * len(counts)))))
    return {} if found is None else found.to_json()


def drawn(seed: int, level: str, area: float, share: float) -> dict[str, float]:
    """Draw calibrated scores; return the errors of the AUC of the estimate, and without smoothing by number of bins."""
    rng = np.random.default_rng([seed, 46])
    sizes = rng.integers(5, 36, size=500) if level == "client" else np.full(5, 60)
    number, shift = int(sizes.sum()), math.sqrt(2) * float(ndtri(area))
    labels = np.zeros(number, np.int64)
    labels[rng.permutation(number)[: round(share * number)]] = 1
    logits = shift * (rng.normal(size=number) + shift * labels) - shift**2 / 2 + math.log(share / (1 - share))
    exact = performance.of_classes(labels, np.stack([1 - expit(logits), expit(logits)], axis=1)).roc_auc or math.nan
    parts = np.split(np.arange(number), np.cumsum(sizes)[:-1])
    counts = [count_scores(logits[some], labels[some]) for some in parts]
    if level == "client":
        noise = _plan().histogram_noise
        histogram = ScoreHistogram.of_units(sum_of_clients(counts) + noise * rng.standard_normal(CELLS), noise)
        whole = ScoreHistogram.of_units(sum_of_clients(counts), noise)
    else:
        half = EPSILON / 2
        noisy, deviation = sum(UnitCounts(each).noisy(half, rng) for each in counts), deviation_of_counts([half] * 5)
        histogram = ScoreHistogram(np.reshape(noisy, (2, BINS)), np.full(2, deviation))
        whole = ScoreHistogram(np.reshape(sum(counts), (2, BINS)), np.full(2, deviation))
    estimated = estimate(histogram)
    errors = {"smoothed, 32 bins": (math.nan if estimated is None else estimated.roc_auc) - exact}
    for bins in (8, 16, 32):
        merged = whole.counts.reshape(2, bins, -1).sum(axis=2)
        noisy_bins = merged + rng.standard_normal(merged.shape) * whole.deviations[:, None]
        errors[f"raw, {bins} bins"] = _area(noisy_bins) - exact
    return errors


def several_classes(seed: int, level: str, classes: int, apart: float, factor: float = 1.0) -> dict[str, float]:
    """Draw calibrated scores of several classes; return the exact macro AUC and the error of its estimate.

    A record adds to one cell in each of k histograms of one class against the others. At client level the counts of a
    client, as one vector, are clipped to the norm factor * sqrt(k) * NORM; at record level a record moves them by k.

    Args:
        seed: of the records and the noise.
        level: "client": 500 clients with 5 to 35 held-out records at 5 % of epsilon; "record": 5 with 60 at a half.
        classes: k, equally frequent.
        apart: distance of the means of two classes, in standard deviations.
        factor: see above.
    """
    rng = np.random.default_rng([seed, 48])
    sizes = rng.integers(5, 36, size=500) if level == "client" else np.full(5, 60)
    number = int(sizes.sum())
    labels = rng.integers(classes, size=number)
    x = rng.normal(size=(number, classes)) + apart / math.sqrt(2) * np.eye(classes)[labels]
    shares = softmax(apart / math.sqrt(2) * x, axis=1)
    logits = np.log(shares) - np.log1p(-np.minimum(shares, 1 - 1e-12))
    exact = [_exact(labels == c, shares[:, c]) for c in range(classes)]
    parts = np.split(np.arange(number), np.cumsum(sizes)[:-1])
    counts = np.array([[count_scores(logits[some, c], labels[some] == c) for c in range(classes)] for some in parts])
    if level == "client":
        norm, weights = factor * math.sqrt(classes) * NORM, np.repeat([1.0, 2.0], BINS)
        noise = _plan().histogram_noise * norm
        vectors = counts * weights
        norms = np.linalg.norm(vectors.reshape(len(vectors), -1), axis=1)
        total = (vectors * np.minimum(1.0, norm / np.maximum(norms, 1e-9))[:, None, None]).sum(axis=0)
        noisy = (total + noise * rng.standard_normal(total.shape)) / weights
        deviations = noise / weights[[0, -1]]
    else:
        cost = EPSILON / 2 / classes
        noisy = np.sum([UnitCounts(each.ravel()).noisy(cost, rng).reshape(each.shape) for each in counts], axis=0)
        deviations = np.full(2, deviation_of_counts([cost] * len(counts)))
    estimates = [estimate(ScoreHistogram(row.reshape(2, BINS), deviations)) for row in noisy]
    areas = [math.nan if one is None else one.roc_auc for one in estimates]
    return {"exact": float(np.mean(exact)), "macro AUC": float(np.mean(areas) - np.mean(exact))} | {
        "worst class": max((area - of for area, of in zip(areas, exact, strict=True)), key=abs)
    }


def _exact(labels: Any, shares: Any) -> float:
    area = performance.of_classes(labels.astype(np.int64), np.stack([1 - shares, shares], axis=1)).roc_auc
    return math.nan if area is None else area


@cache
def _plan() -> Joint:
    numbers: dict[str, Any] = {"clients": 500, "num_clusters": 1, "sampling_rate": 1.0, "clip_norm": 1.0}
    return Joint.calibrated_with_histogram(0.05, **numbers, rounds=80, epsilon=EPSILON, delta=2e-5)


def _area(counts: Any) -> float:
    negative, positive = counts
    below = (np.cumsum(negative) - negative / 2) / negative.sum()
    return float(np.clip(below @ positive / positive.sum(), 0.0, 1.0))


def cases(part: str, options: argparse.Namespace) -> Iterator[tuple[str, list[dict[str, float]]]]:
    """Yield the name of each case and its numbers by seed."""
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    if part == "runs":
        names = {
            "client": [f"{options.clients} clients, client level"],
            "record": [f"5 sites, record level, held-out records at ε = {e}" for e in (4, 6, 8)],
        }
        for level in [options.level] if options.level else names:
            runs = [trained(level, seed, options.rounds, options.clients if level == "client" else 5) for seed in seeds]
            for index, name in enumerate(names[level]):
                yield name, [found[index] for found in runs]
        return
    if part == "classes":
        for level, classes, apart in itertools.product(("client", "record"), (3, 10), (1.0, 2.0)):
            name = f"{level} level, {classes} classes, {apart:g} deviations apart"
            yield name, [several_classes(seed, level, classes, apart) for seed in seeds]
        return
    for level in ("client", "record"):
        for area, share in ((0.7, 0.2), (0.85, 0.05), (0.85, 0.2), (0.85, 0.5), (0.98, 0.2)):
            name = f"{level} level, AUC {area:g}, {share:.0%} positive"
            yield name, [drawn(seed, level, area, share) for seed in seeds]


def summary(part: str, found: list[dict[str, float]]) -> list[str]:
    """The cells of a row: root mean square and largest error."""
    if part == "classes":
        errors = {name: np.array([each[name] for each in found]) for name in ("macro AUC", "worst class")}
        cells = [f"{math.sqrt(np.mean(values**2)):.4f}, {np.abs(values).max():.4f}" for values in errors.values()]
        return [f"{np.mean([each['exact'] for each in found]):.3f}", *cells]
    if part == "scores":
        columns = {name: np.array([each[name] for each in found]) for name in found[0]}
    else:
        columns = {name: np.array([each[name] - each[f"exact {name}"] for each in found]) for name in METRICS}
    cells = [f"{math.sqrt(np.mean(errors**2)):.4f}, {np.abs(errors).max():.4f}" for errors in columns.values()]
    if part == "scores":
        return cells
    means = [float(np.mean([each[name] for each in found])) for name in ("exact roc_auc", "stated error")]
    costs = [max(each[name] for each in found) for name in ("epsilon without", "epsilon")]
    within = sum(abs(each["roc_auc"] - each["exact roc_auc"]) <= 0.02 for each in found)
    cells[0] += f"; {within} of {len(found)}"
    return [f"{means[0]:.3f}", *cells, f"{means[1]:.4f}", " → ".join(f"{cost:.3f}" for cost in costs)]


def main() -> None:
    """Run all cases, and print root mean square and largest error of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("runs", "scores", "classes"))
    parser.add_argument("--level", choices=("client", "record"))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    lines = []
    for part in [options.part] if options.part else ["runs", "scores"]:
        heads = ["exact AUC", *METRICS, "stated error of AUC", "ε without → with"] if part == "runs" else []
        heads = ["exact macro AUC", "macro AUC", "worst class"] if part == "classes" else heads
        heads = heads or ["smoothed, 32 bins", *(f"raw, {bins} bins" for bins in (8, 16, 32))]
        print(f"\n| case | {' | '.join(heads)} |\n| --- |{' ---: |' * len(heads)}")
        for name, found in cases(part, options):
            print(f"| {name} | {' | '.join(summary(part, found))} |", flush=True)
            lines += [
                (part, name, seed, json.dumps({key: round(value, 5) for key, value in each.items()}))
                for seed, each in enumerate(found, options.first_seed)
            ]
    if options.out:
        with options.out.open("w", newline="") as file:
            csv.writer(file).writerows([("part", "case", "seed", "values"), *lines])


if __name__ == "__main__":
    main()
