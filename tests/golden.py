"""Released models of every strategy, unit and mechanism: two rounds in the local engine with one seed.

``python -m tests.golden --digests FILE`` writes the SHA-256 of each run's models, to compare two versions of the code
on one machine, bit by bit. ``--write`` renews ``golden.json``: numbers that differ between processors by rounding only.
"""

import argparse
import hashlib
import json
import logging
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np

NUMBERS = Path(__file__).with_name("golden.json")
CLIENTS = 12

_COMMON = {
    "clients": CLIENTS,
    "clusters": 2,
    "groups": "2",
    "rounds": 2,
    "local-epochs": 1,
    "samples-per-client": 20,
    "evaluate-every": 1,
    "reseed-every": 0,
    "seed": 7,
}
_QUICK = {
    "ppfc-gan": {"rounds": 1, "pretrain-epochs": 1, "joint-epochs": 1, "local-epochs": 2},
    "kfed": {"rounds": 1},
    "ffcm": {"rounds": 1},
    "cfl": {"first-split": 0},
}
_ONE_MODEL = ("fedavg", "fedprox", "fedper", "local", "cfl")
# The step size and no averaging are fixed, whatever their defaults.
_UNDER_CLIENT = {"sampling-rate": 0.6, "delta": 1e-3, "epsilon": 50.0, "server-lr": 1.5, "average-last": 0.0}
_UNDER_NONE = {"sampling-rate": 0.6}

#: Settings beside the plain runs: every other way in which a request, a charge or a release differs.
VARIANTS = {
    "ifca rebalanced": {"privacy-unit": "client", "rebalance-min": 2.0, **_UNDER_CLIENT},
    "ifca rebalanced, assigned": {
        "privacy-unit": "client",
        "rebalance-min": 2.0,
        "rebalance-train": "assigned",
        **_UNDER_CLIENT,
    },
    "ifca rebalanced by slots": {
        "privacy-unit": "client",
        "rebalance-min": 2.0,
        "mechanism": "rr-slot",
        **_UNDER_CLIENT,
    },
    "ifca by exponential identifiers": {
        "privacy-unit": "client",
        "identifiers": "exponential",
        "mechanism": "rr-slot",
        **_UNDER_CLIENT,
    },
    "ifca re-seeded, averaged, evaluated privately": {
        "privacy-unit": "client",
        "reseed-every": 1,
        "evaluate": "private",
        **_UNDER_CLIENT,
    },
    "ifca without privacy, rebalanced": {"privacy-unit": "none", "sampling-rate": 1.0, "rebalance-min": 2.0},
    "ifca, released divisors": {"privacy-unit": "client", "divisor": "released", **_UNDER_CLIENT},
    "ifca, convolutional, lr decays": {"privacy-unit": "none", "model": "cnn-small", "lr-decay": 0.5},
    "fesem rebalanced": {"privacy-unit": "client", "rebalance-min": 2.0, **_UNDER_CLIENT},
    "rr-cluster on fesem": {"privacy-unit": "client", "base": "fesem", **_UNDER_CLIENT},
    "rr-cluster on fedcam": {"privacy-unit": "none", "base": "fedcam"},
    "fedavg averaged": {"privacy-unit": "client", **_UNDER_CLIENT, "average-last": 1.0},
    "fedavg by profiles": {"privacy-unit": "record", "profiles": "epsilon=2 batch-size=10; epsilon=10"},
    "rc-dpfl finds clusters": {"privacy-unit": "record", "clusters": 0},
    "rc-dpfl, exact choices": {"privacy-unit": "record", "selection": "exact"},
    "rc-dpfl, first batches and noise": {
        "privacy-unit": "record",
        "first-batch-size": 10,
        "first-round-noise-ratio": 2.0,
    },
    "rc-dpfl, clients alike": {"privacy-unit": "record", "weights": "equal"},
    "lcfl, landmarks": {"privacy-unit": "record", "landmarks": 3, "models-per-message": 2},
    "lcfl, warm-up": {"privacy-unit": "none", "warm-up-rounds": 1},
    "lcfl, parameters": {"privacy-unit": "none", "metric": "params"},
    "lcfl, directions": {"privacy-unit": "none", "metric": "gradcos"},
    "ppfc-gan, simple, failing": {"privacy-unit": "none", "device-failures": 0.2, "ema-decay": 0.0},
}


def cases():
    """Settings of every run by its name."""
    import coterie.audit.printed  # noqa: F401 - adds the mechanisms of the paper
    from coterie.privacy import MECHANISMS
    from coterie.strategies.registry import STRATEGIES

    found = {}
    for name, method in STRATEGIES.items():
        clusters = {"clusters": 1} if name in _ONE_MODEL else {}
        own = {**_COMMON, **clusters, **_QUICK.get(name, {}), "strategy": name}
        for unit in method.units:
            rate = _UNDER_NONE if unit == "none" and "client" in method.units else {}
            settings = {**own, **rate, "privacy-unit": unit}
            if unit != "client":
                found[f"{name}, {unit}"] = settings
                continue
            for mechanism in [name for name in MECHANISMS if name != "paper-uncharged"]:
                found[f"{name}, {unit}, {mechanism}"] = {**settings, **_UNDER_CLIENT, "mechanism": mechanism}
    for label, settings in VARIANTS.items():
        name = label.split()[0].rstrip(",")
        clusters = {"clusters": 1} if name in _ONE_MODEL else {}
        found[label] = {**_COMMON, **clusters, **_QUICK.get(name, {}), "strategy": name, **settings}
    return found


def released(settings):
    """Every array of a run's models, and what it was charged; the reason where the settings are refused."""
    from safetensors.numpy import load_file

    from coterie.engine.in_process import LocalGrid
    from coterie.server import ConfigError, RunConfig, RunFolder, run

    try:
        config = RunConfig(settings)
    except ConfigError as error:
        return {"refused": str(error)}, {}
    with tempfile.TemporaryDirectory() as room, closing(RunFolder.create(Path(room) / "run", config)) as folder:
        outcome = run(folder, LocalGrid(CLIENTS))
        arrays = {
            f"{file.stem}/{key}": values
            for file in sorted((folder.path / "models").glob("*.safetensors"))
            for key, values in sorted(load_file(file).items())
        }
        accuracy = (outcome["diagnostics"] or outcome).get("accuracy")
        return {"epsilon": outcome["epsilon"], "charges": outcome["charges"], "accuracy": accuracy}, arrays


def digest(facts, arrays):
    """SHA-256 of all bits."""
    said = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name, values in arrays.items():
        said.update(f"{name} {values.dtype} {values.shape}".encode() + values.tobytes())
    return said.hexdigest()


def summary(facts, arrays):
    """Numbers that change when a model does: for each cluster its norm and its product with a fixed vector."""
    models = {}
    for name, values in arrays.items():
        flat = values.astype(np.float64).ravel()
        model = models.setdefault(name.partition("/")[0], [0.0, 0.0])
        model[0] += float(flat @ flat)
        model[1] += float(flat @ np.cos(np.arange(flat.size) + len(name)))
    return {**facts, "models": models}


def _one(case):
    import torch

    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    name, settings = case
    facts, arrays = released(settings)
    return name, digest(facts, arrays), summary(facts, arrays)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--digests", type=Path, help="write the SHA-256 of every run")
    parser.add_argument("--write", action="store_true", help=f"renew {NUMBERS.name}")
    words = parser.parse_args()
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        done = list(pool.map(_one, cases().items()))
    if words.digests:
        words.digests.write_text(json.dumps({name: sha for name, sha, _ in done}, indent=1) + "\n")
    if words.write:
        NUMBERS.write_text(json.dumps({name: numbers for name, _, numbers in done}, indent=1) + "\n")
    refused = sum("refused" in numbers for *_, numbers in done)
    print(f"{len(done)} runs, {refused} of them refused")


if __name__ == "__main__":
    sys.exit(main())
