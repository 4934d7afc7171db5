"""A run without torch, killed and resumed in a child process until 200 kills are done. Prints a JSON summary.

One parent imports everything once and forks a child for every attempt. A child kills itself with SIGKILL at the n-th
system call that matters (before or after it, or as if the power failed), or the parent kills it after a random time.
"""

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np

from coterie.privacy import Event, Joint, PrivacyError, Streams, epsilon, read_ledger

ROUNDS = 12
# Everybody takes part and Renyi keeps the budget: calibrating anew then takes a millisecond.
NUMBERS = {"clients": 20, "num_clusters": 2, "sampling_rate": 1.0, "rounds": ROUNDS, "clip_norm": 1.0}
PLAN = Joint.calibrated(**NUMBERS, epsilon=6.0, delta=1e-3, accountant="rdp")
FINISHED, SPENT = 0, 3


class Death:
    """Counts calls of os.fsync and os.replace, and dies at one of them, before or after it.

    A cut of power comes before it, and takes some of what the ledger holds beyond its last sync.
    """

    def __init__(self, at: int, kind: str, ledger: Path) -> None:
        self.left, self.kind, self.ledger = at, kind, ledger
        self.synced = ledger.stat().st_size if ledger.exists() else 0
        os.fsync = self.wrap(os.fsync)
        os.replace = self.wrap(os.replace)

    def wrap(self, call):
        def dangerous(*args):
            self.left -= 1
            if self.left == 0 and self.kind != "after":
                self.die()
            call(*args)
            if self.left == 0:
                self.die()
            if call.__name__ == "fsync" and os.path.samestat(os.fstat(*args), self.ledger.stat()):
                self.synced = self.ledger.stat().st_size

        return dangerous

    def die(self):
        if self.kind == "power" and self.ledger.exists() and (size := self.ledger.stat().st_size) > self.synced:
            os.truncate(self.ledger, random.Random(size).randint(self.synced, size))
        os.kill(os.getpid(), signal.SIGKILL)


def done(folder: Path) -> int:
    try:
        return int((folder / "checkpoint").read_text())
    except FileNotFoundError:
        return 0


def attempt(folder: Path) -> int:
    """One process: resume, calibrate anew if need be, and go on."""
    plan, ledger = PLAN, PLAN.ledger(folder / "ledger.jsonl")
    first = done(folder) + 1
    remaining = ROUNDS - first + 1
    planned = Counter(ledger.events) + Counter({plan.event(): remaining})
    if epsilon(planned, plan.delta, plan.accountant) > plan.epsilon:
        try:
            plan = plan.recalibrated(plan.noise_for(remaining, Counter(ledger.events)))
        except PrivacyError:
            return SPENT
    for number in range(first, ROUNDS + 1):
        contributions = plan.contributions(3)
        contributions.add(0, 0, 0, np.ones(3))
        trial = len(ledger.charges) + 1
        permit = ledger.charge_round(number, plan.event())
        released = plan.release(permit, contributions, Streams(), trial)
        line = [trial, plan.event().sampling_rate, plan.event().noise_multiplier, *released.sums[0]]
        with (folder / "released").open("a") as file:  # what the world has seen
            file.write(json.dumps(line) + "\n")
        (folder / "checkpoint.new").write_text(str(number))
        os.replace(folder / "checkpoint.new", folder / "checkpoint")
    return FINISHED


def child(folder: Path, rng: random.Random) -> tuple[int | None, bool]:
    """Exit status of one attempt (None if it was killed)."""
    kind = rng.choice(["before", "after", "power", "time"])
    at, delay = rng.randrange(1, 14), rng.uniform(0.0, 0.15)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            if kind != "time":
                Death(at, kind, folder / "ledger.jsonl")
            status = attempt(folder)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(status)
    if kind == "time":
        time.sleep(delay)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return None if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def check(folder: Path) -> None:
    """What was released is covered by what is charged on disk."""
    path = folder / "released"
    seen = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    released = [Event(rate, noise) for _, rate, noise, *_ in seen]
    try:
        _, charges = read_ledger(folder / "ledger.jsonl")
    except Exception:
        charges = []  # killed before anything was written
    charged = [Event(c["sampling_rate"], c["noise_multiplier"]) for c in charges]
    assert not Counter(released) - Counter(charged), "released without a charge"
    assert len({trial for trial, *_ in seen}) == len(seen), "a charge paid twice"
    assert (
        epsilon(released, PLAN.delta, PLAN.accountant)
        <= epsilon(charged, PLAN.delta, PLAN.accountant)
        <= PLAN.epsilon * (1 + 1e-9)
    )


def main(root: Path, kills: int) -> None:
    assert not {"torch", "flwr"} & set(sys.modules)
    PLAN.ledger().charge_round(1, PLAN.event())  # warm what every child needs
    rng = random.Random(7)
    summary = {"kills": 0, "runs": 0, "finished": 0, "spent": 0, "wasted": 0}
    while summary["kills"] < kills:
        folder = root / str(summary["runs"])
        folder.mkdir()
        summary["runs"] += 1
        status = None
        while status is None:
            status = child(folder, rng)
            check(folder)
            if status is None:
                summary["kills"] += 1
        assert status in (FINISHED, SPENT), f"exit status {status}"
        charges = len(read_ledger(folder / "ledger.jsonl")[1])
        summary["wasted"] += charges - done(folder)
        if status == FINISHED:
            assert done(folder) == ROUNDS
            summary["finished"] += 1
        else:
            summary["spent"] += 1
    print(json.dumps(summary))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
