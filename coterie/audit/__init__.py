"""Privacy audit: attacks on the shipped code that test its privacy claims; see docs/privacy.md, "Audit".

The attacks target mechanisms, samplers and noise, whole runs of a server, clients at record level, and their ledgers.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def audit(
    mechanisms: Sequence[str] = tuple(MECHANISMS),
    draws: int = DRAWS,
    seed: int = 0,
    parts: Sequence[str] = tuple(PARTS),
) -> list[Finding]:
    """Run the attacks of ``parts``, in a minute on two cores at the default number of draws.

    Args:
        mechanisms: mechanisms to attack in the parts "mechanisms" and "randomness".
        draws: runs of a mechanism in each world; clients, servers and whole runs use proportionally fewer.
        seed: seed of the attacks and their targets, except for keys and the ClientApp, whose randomness is secret.
        parts: keys of :data:`PARTS`.
    """
    from coterie.audit.mechanisms import audit_mechanisms
    from coterie.audit.randomness import audit_randomness

    streams, findings = Streams(seed), []
    if "mechanisms" in parts:
        findings += audit_mechanisms(mechanisms, draws, streams)
    if "randomness" in parts:
        findings += audit_randomness(mechanisms, streams)
    if "runs" in parts:
        from coterie.audit.runs import audit_runs  # torch and Flower

        findings += audit_runs(seed, draws // 250)
    if "records" in parts:
        from coterie.audit.clientapp import audit_client_app
        from coterie.audit.records import audit_records

        findings += [*audit_records(streams, draws // 5), *audit_client_app(draws // 400)]
    if "ledgers" in parts:
        from coterie.audit.adaptive import audit_adaptive_servers

        findings += audit_adaptive_servers(streams, draws // 10_000)
    return findings


__all__ = ["DRAWS", "LOSSES", "PARTS", "Finding", "audit"]
