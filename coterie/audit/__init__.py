"""Privacy audit: attacks on the shipped code that test its privacy claims; see docs/privacy.md, "Audit".

The attacks target mechanisms, samplers and noise, whole runs of a server, clients at record level, and their ledgers.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

from coterie.audit.findings import LOSSES, Finding
from coterie.privacy import MECHANISMS, Streams

#: Parts of the audit, with one-line descriptions.
PARTS = {
    "mechanisms": "one release of a mechanism",
    "randomness": "samplers, keys and resolution of the noise",
    "runs": "whole runs of the server and of real clients",
    "records": "clients at record level, by a hostile server",
    "ledgers": "ledgers of clients, by servers that choose each request by earlier replies",
}
#: Default number of draws per world.
DRAWS = 100_000
_LONGEST_FIRST = ("ledgers", "runs", "records", "mechanisms", "randomness")


def audit(
    mechanisms: Sequence[str] = tuple(MECHANISMS),
    draws: int = DRAWS,
    seed: int = 0,
    parts: Sequence[str] = tuple(PARTS),
) -> list[Finding]:
    """Run the attacks of ``parts``, each in a process of its own, in 90 seconds on two cores by default.

    Args:
        mechanisms: mechanisms to attack in the parts "mechanisms" and "randomness".
        draws: runs of a mechanism in each world; clients, servers and whole runs use proportionally fewer.
        seed: seed of the attacks and their targets, except for keys and the ClientApp, whose randomness is secret.
        parts: keys of :data:`PARTS`.
    """
    attack = partial(_attack, mechanisms=mechanisms, draws=draws, seed=seed)
    if len(parts) == 1:
        return attack(parts[0])
    workers = max(1, min(len(parts), os.cpu_count() or 1))
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        by_part = {part: pool.submit(attack, part) for part in sorted(parts, key=_LONGEST_FIRST.index)}
        return [finding for part in parts for finding in by_part[part].result()]


def _attack(part: str, mechanisms: Sequence[str], draws: int, seed: int) -> list[Finding]:
    """Run the attacks of one part; modules are imported where they are used, because torch and Flower are slow."""
    streams = Streams(seed)
    if part == "mechanisms":
        from coterie.audit.mechanisms import audit_mechanisms

        return audit_mechanisms(mechanisms, draws, streams)
    if part == "randomness":
        from coterie.audit.randomness import audit_randomness

        return audit_randomness(mechanisms, streams)
    if part == "runs":
        from coterie.audit.runs import audit_runs

        return audit_runs(seed, draws // 250)
    if part == "records":
        from coterie.audit.clientapp import audit_client_app
        from coterie.audit.records import audit_records

        return [*audit_records(streams, draws // 5), *audit_client_app(draws // 400)]
    from coterie.audit.adaptive import audit_adaptive_servers

    return audit_adaptive_servers(streams, draws // 10_000)


__all__ = ["DRAWS", "LOSSES", "PARTS", "Finding", "audit"]
