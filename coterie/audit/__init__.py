"""Privacy audit: attacks on the shipped code that test its privacy claims; see docs/privacy.md, "Audit".

The attacks target mechanisms, samplers and noise, whole runs of a server, clients at record level, and their ledgers.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import coterie.audit.printed  # noqa: F401 - adds the mechanism that attacks must break
from coterie.audit.findings import LOSSES, Finding
from coterie.privacy import MECHANISMS, Streams

#: Parts of the audit, with one-line descriptions.
PARTS = {
    "mechanisms": "one release of a mechanism",
    "randomness": "samplers, keys and resolution of the noise",
    "runs": "whole runs of the server and of real clients",
    "records": "clients at record level, by a hostile server",
    "views": "masked rounds, by servers that show clients different views",
    "ledgers": "ledgers of clients, by servers that choose each request by earlier replies",
}
#: Default number of draws per world.
DRAWS = 100_000
# Tasks of the parts, which run at the same time; the longest ones first.
_TASKS = {
    "runs": "runs",
    "mechanisms": "mechanisms",
    "records": "records",
    "client app": "records",
    "views": "views",
    "ledgers": "ledgers",
    "randomness": "randomness",
}


def audit(
    mechanisms: Sequence[str] = tuple(MECHANISMS),
    draws: int = DRAWS,
    seed: int = 0,
    parts: Sequence[str] = tuple(PARTS),
) -> list[Finding]:
    """Run the attacks of ``parts`` in several processes, in about 50 seconds on two cores by default.

    Args:
        mechanisms: mechanisms to attack in the parts "mechanisms" and "randomness".
        draws: runs of a mechanism in each world; clients, servers and whole runs use proportionally fewer.
        seed: seed of the attacks and their targets, except for keys and the ClientApp, whose randomness is secret.
        parts: keys of :data:`PARTS`.
    """
    attack = partial(_attack, mechanisms=mechanisms, draws=draws, seed=seed)
    tasks = [task for task, part in _TASKS.items() if part in parts]
    if len(parts) == 1:
        return [finding for task in tasks for finding in attack(task)]
    workers = max(1, min(len(tasks), os.cpu_count() or 1))
    with ProcessPoolExecutor(workers, get_context("spawn"), _use_one_thread) as pool:
        by_task = {task: pool.submit(attack, task) for task in tasks}
        return [
            finding for part in parts for task in tasks if _TASKS[task] == part for finding in by_task[task].result()
        ]


def _use_one_thread() -> None:
    """Let PyTorch use one thread, since there is a process for each core."""
    os.environ["OMP_NUM_THREADS"] = "1"


def _attack(task: str, mechanisms: Sequence[str], draws: int, seed: int) -> list[Finding]:
    """Run the attacks of one task; modules are imported where they are used, because torch and Flower are slow."""
    streams = Streams(seed)
    if task == "mechanisms":
        from coterie.audit.mechanisms import audit_mechanisms

        return audit_mechanisms(mechanisms, draws, streams)
    if task == "randomness":
        from coterie.audit.randomness import audit_randomness

        return audit_randomness(mechanisms, streams)
    if task == "runs":
        from coterie.audit.runs import audit_runs

        return audit_runs(seed, draws // 250)
    if task == "records":
        from coterie.audit.records import audit_records

        return audit_records(streams, draws // 5)
    if task == "client app":
        from coterie.audit.clientapp import audit_client_app

        return audit_client_app(draws // 400)
    if task == "views":
        from coterie.audit.views import audit_views

        return audit_views(streams, draws // 500)
    from coterie.audit.adaptive import audit_adaptive_servers

    return audit_adaptive_servers(streams, draws // 10_000)


__all__ = ["DRAWS", "LOSSES", "PARTS", "Finding", "audit"]
