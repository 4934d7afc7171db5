"""Accuracy of the demo if clients are absent: `python benchmarks/absence.py [--seeds 3] [--rounds 80]`.

In every round, each client that is asked is absent with the same probability, independently of its data; its
contribution is zero. Divisors are public numbers and do not change. Prints a table; ``--out`` writes a line per run.
"""

import argparse
import csv
import logging
import statistics
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Message

from coterie.engine.in_process import SummingGrid
from coterie.server import RunConfig, RunFolder, run
from coterie.wire.messages import TRAIN

SHARES = (0.0, 0.1, 0.2, 0.3)
MECHANISMS: dict[str, dict[str, Any]] = {
    "joint, all clients": {},
    "joint, q = 0.2, secret participation": {"sampling-rate": 0.2},
    "banded, a fifth of the clients in turn": {"mechanism": "banded", "sampling-rate": 0.2},
}


class Absent(SummingGrid):
    """A local engine in which a share of the clients does not reply to a request for training."""

    def __init__(self, clients: int, share: float, seed: int) -> None:
        super().__init__(clients)
        self._share, self._coins = share, np.random.default_rng(seed)

    def send_and_sum(self, messages: Iterable[Message], new_sums: Any) -> Iterator[Any]:
        """Leave out the requests to absent clients."""
        messages = list(messages)
        present = self._coins.random(len(messages)) >= self._share
        trained = [m for m, here in zip(messages, present, strict=True) if here or m.metadata.message_type != TRAIN]
        return super().send_and_sum(trained, new_sums)


def accuracy(settings: dict[str, Any], share: float, seed: int, rounds: int = 80) -> float:
    """Mean accuracy of the demo's clients at the end."""
    with tempfile.TemporaryDirectory() as place:
        config = RunConfig({**settings, "seed": seed, "rounds": rounds, "evaluate-every": rounds})
        folder = RunFolder.create(Path(place) / "run", config)
        try:
            return float(run(folder, Absent(folder.config["clients"], share, seed))["diagnostics"]["accuracy"])
        finally:
            folder.close()


def main() -> None:
    """Run all settings, and print means and deviations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=80)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    lines = []
    print("| mechanism | " + " | ".join(f"{share:.0%} absent" for share in SHARES) + " |")
    print("| --- |" + " ---: |" * len(SHARES))
    for name, settings in MECHANISMS.items():
        row = []
        for share in SHARES:
            found = [accuracy(settings, share, seed, options.rounds) for seed in range(options.seeds)]
            lines += [(name, share, seed, round(value, 6)) for seed, value in enumerate(found)]
            spread = f" ± {100 * statistics.stdev(found):.2f}" if len(found) > 1 else ""
            row.append(f"{100 * statistics.mean(found):.2f}{spread}")
        print(f"| {name} | " + " | ".join(row) + " |", flush=True)
    if options.out:
        with options.out.open("w", newline="") as file:
            csv.writer(file).writerows([("mechanism", "absent", "seed", "accuracy"), *lines])


if __name__ == "__main__":
    main()
