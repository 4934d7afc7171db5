"""What dishonest clients do to each method under each aggregator: mean accuracy of the honest clients.

    python benchmarks/robustness.py [--quick] [--seeds 3] [--jobs 2] [--strategy NAME ...] [--out FILE.csv]
    python benchmarks/robustness.py --page

Digits, 80 clients in four rotations, 20 rounds of all clients (10 at record level). An attacker keeps the protocol: it
flips its training labels (y becomes 9 - y), or sends five times its update with the sign flipped. Attackers are drawn
at random; robust aggregators assume a share of 0.3 in every column, also where there are fewer attackers or none.

Writes a line for every run, and skips runs that the file already holds. ``--page`` fills the tables of
docs/robustness.md from benchmarks/results/robustness.csv. ``--quick``: one seed, three methods, 30 % attackers.
"""

import argparse
import csv
import itertools
import logging
import os
import re
import statistics
import tempfile
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
from flwr.app import Array, ArrayRecord, Message

from coterie.datasets import Federation
from coterie.engine.in_process import LocalGrid
from coterie.wire.messages import EVALUATE, TRAIN, UPDATE

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "robustness.csv"
PAGE = HERE.parent / "docs" / "robustness.md"

ROBUST = ("trimmed-mean", "median", "krum", "multi-krum")
#: Shares of attackers by unit of privacy.
SHARES = {"none": (0.1, 0.2, 0.3), "record": (0.3,)}
SCALE = 5.0
BASE = {"clients": 80, "rounds": 20, "evaluate-every": 20, "batch-size": 14, "samples-per-client": 56, "device": "cpu"}
#: Share of dishonest clients that an aggregator assumes.
BYZANTINE = {name: {"aggregator": f"{name}:0.3"} for name in ("trimmed-mean", "krum", "multi-krum")}
RECORD = {"rounds": 10, "evaluate-every": 10, "epsilon": 8.0, "clip-norm": 1.0}
#: Methods by unit of privacy, and whether they take other aggregators than the mean.
METHODS = {
    "none": {
        **dict.fromkeys(("fedavg", "ifca", "fesem", "fedcam", "lcfl", "rc-dpfl"), True),
        **dict.fromkeys(("cfl", "km-cdpfl", "local"), False),
    },
    "record": {"rc-dpfl": True},
}


class Cell(NamedTuple):
    """One run."""

    unit: str
    strategy: str
    aggregator: str
    attack: str
    share: float
    seed: int


FIELDS = (*Cell._fields, "accuracy")


def cells(seeds: int, strategies: Iterable[str] = (), quick: bool = False) -> Iterator[Cell]:
    """All runs of one seed before those of the next."""
    for seed, (unit, methods) in itertools.product(range(1 if quick else seeds), METHODS.items()):
        for name, robust in methods.items():
            rules = ("mean", *ROBUST) if robust else ("mean",)
            for aggregator, (attack, share) in itertools.product(rules, attacks(unit)):
                if strategies and name not in strategies:
                    continue
                if quick and (unit, name) not in (("none", "fedavg"), ("none", "ifca"), ("record", "rc-dpfl")):
                    continue
                if not quick or share in (0.0, 0.3):
                    yield Cell(unit, name, aggregator, attack, share, seed)


def attacks(unit: str) -> list[tuple[str, float]]:
    """(attack, share of attackers) of the columns."""
    return [("none", 0.0), *itertools.product(("label-flip", "sign-flip"), SHARES[unit])]


def choose_attackers(clients: int, share: float, seed: int) -> frozenset[int]:
    """Draw the ids of ``round(share * clients)`` clients at random, independently of their groups."""
    rng = np.random.default_rng([seed, clients])
    return frozenset(rng.permutation(clients)[: round(share * clients)].tolist())


@contextmanager
def flipped_labels(federation: Federation, attackers: Collection[int]) -> Iterator[None]:
    """Within the context, replace training label y of the attackers by C - 1 - y; test data are unchanged."""

    def flip() -> None:
        for client in attackers:
            labels = federation.shard(client).y
            labels[:] = federation.num_classes - 1 - labels

    flip()
    try:
        yield
    finally:
        flip()


class HostileGrid(LocalGrid):
    """A local engine in which attackers send their update times ``-scale``; only honest clients are evaluated.

    Args:
        clients: number of clients, M.
        attackers: ids of the attackers.
        scale: c; 0 leaves updates unchanged.
    """

    def __init__(self, clients: int, attackers: Collection[int], scale: float = 0.0) -> None:
        super().__init__(clients)
        self._attackers = frozenset(client + 1 for client in attackers)  # node ids
        self._scale = np.float32(scale)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        """Return the replies; evaluation requests are not sent to attackers."""
        questions = [message for message in messages if not self._spared(message)]
        yield from map(self._flipped, super().send_and_receive(questions, timeout=timeout))

    def _spared(self, question: Message) -> bool:
        return question.metadata.message_type == EVALUATE and question.metadata.dst_node_id in self._attackers

    def _flipped(self, reply: Message) -> Message:
        hostile = self._scale and reply.metadata.src_node_id in self._attackers and reply.has_content()
        if hostile and reply.metadata.message_type == TRAIN:
            update = reply.content.array_records[UPDATE]
            reply.content[UPDATE] = ArrayRecord(
                {name: Array(-self._scale * array.numpy()) for name, array in update.items()}
            )
        return reply


def measured(cell: Cell) -> float | None:
    """Mean accuracy of the honest clients' models on their test data; None where the method cannot go on."""
    import torch

    from coterie.client.cohort import federation
    from coterie.server import RunConfig, RunError, RunFolder, run

    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    settings = {
        **BASE,
        **BYZANTINE.get(cell.aggregator, {}),
        **(RECORD if cell.unit == "record" else {}),
        "sampling-rate": 1.0,
        "seed": cell.seed,
    }
    config = RunConfig(
        {**settings, "strategy": cell.strategy, "privacy-unit": cell.unit, "aggregator": cell.aggregator}
    )
    attackers = choose_attackers(config["clients"], cell.share, cell.seed)
    data = federation(config.for_clients())
    assert isinstance(data, Federation)
    poisoned = flipped_labels(data, attackers) if cell.attack == "label-flip" else nullcontext()
    grid = HostileGrid(config["clients"], attackers, SCALE if cell.attack == "sign-flip" else 0.0)
    with tempfile.TemporaryDirectory() as place, poisoned:
        folder = RunFolder.create(Path(place) / "run", config)
        try:
            return float(run(folder, grid)["diagnostics"]["accuracy"])
        except RunError:
            return None
        finally:
            folder.close()
            grid.close()


def read(path: Path) -> dict[Cell, float | None]:
    """Accuracy by run."""
    if not path.is_file():
        return {}
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if None not in row.values()]
    return {
        Cell(row["unit"], row["strategy"], row["aggregator"], row["attack"], float(row["share"]), int(row["seed"])): (
            float(row["accuracy"]) if row["accuracy"] else None
        )
        for row in rows
    }


def write(path: Path, cell: Cell, accuracy: float | None) -> None:
    """One line more."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        if new:
            lines.writerow(FIELDS)
        lines.writerow([*cell, "" if accuracy is None else f"{accuracy:.6f}"])


def table(found: dict[Cell, float | None], unit: str) -> str:
    """A row for each method and aggregator, a column for each attack: percent, over the seeds that all rows have."""
    columns = attacks(unit)
    rows = dict.fromkeys((cell.strategy, cell.aggregator) for cell in found if cell.unit == unit)
    order = list(METHODS[unit])
    lines = [
        "| method | aggregator | honest | " + " | ".join(f"{a} {100 * s:.0f} %" for a, s in columns[1:]) + " |",
        "| --- | --- |" + " ---: |" * len(columns),
    ]
    for strategy, aggregator in sorted(rows, key=lambda row: (order.index(row[0]), ("mean", *ROBUST).index(row[1]))):
        shown = []
        for attack, share in columns:
            values = [value for cell, value in found.items() if cell[:5] == (unit, strategy, aggregator, attack, share)]
            known = [100 * value for value in values if value is not None]
            ended = len(values) - len(known)
            text = f"{statistics.mean(known):.1f}" if known else "-"
            text += f" ± {statistics.stdev(known):.1f}" if len(known) > 1 else ""
            shown.append(text + (f" ({ended} ended)" if ended else ""))
        lines.append(f"| {strategy} | {aggregator} | " + " | ".join(shown) + " |")
    return "\n".join(lines) + "\n"


def filled(text: str) -> str:
    """The page with the tables that the results hold."""
    found = read(RESULTS)
    return re.sub(
        r"<!-- (\w+) -->\n.*?<!-- end -->",
        lambda match: f"<!-- {match[1]} -->\n\n{table(found, match[1])}\n<!-- end -->",
        text,
        flags=re.DOTALL,
    )


def main() -> None:
    """Run what is missing, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--strategy", action="append", default=[])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--page", action="store_true")
    chosen = parser.parse_args()
    if chosen.page:
        PAGE.write_text(filled(PAGE.read_text()))
        return
    out = chosen.out or Path("robustness-quick.csv" if chosen.quick else "robustness.csv")
    done = read(out)
    wanted = [cell for cell in cells(chosen.seeds, chosen.strategy, chosen.quick) if cell not in done]
    with ProcessPoolExecutor(chosen.jobs) as pool:
        for number, (cell, accuracy) in enumerate(zip(wanted, pool.map(measured, wanted), strict=True), 1):
            write(out, cell, accuracy)
            print(f"{number}/{len(wanted)}", *cell, accuracy, flush=True)
    for unit in METHODS:
        print(f"\nprivacy-unit = {unit}\n\n{table(read(out), unit)}")


if __name__ == "__main__":
    main()
