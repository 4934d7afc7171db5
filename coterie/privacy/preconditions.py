"""The preconditions of the theorems in docs/privacy.md, and what enforces each.

A certificate lists under ``outside`` what neither this code nor the configuration of the clients enforces.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Precondition:
    """One precondition of a theorem. Either something enforces it, or it is outside the guarantee.

    Attributes:
        theorem: Number of the theorem.
        number: Number of the condition in the theorem. 0 for the setting that the theorem describes before them.
        enforced: What enforces the condition; empty if nothing does.
        outside: What a certificate says if nothing enforces the condition.
        later: Whether certificates of version 0.2.0 do not say it.
    """

    theorem: int
    number: int
    enforced: str = ""
    outside: str = ""
    later: bool = False


_PARTICIPATION = "who takes part: the amplification by sampling holds against those who cannot see it"
_ATTENDANCE = "whether a client replies, which must not depend on its data"
_SERVER = (
    "the server, its operator and whoever reads its memory: clients that declare guarantee = trusted-server send it "
    "their updates and labels without noise"
)
_CODE = (
    "code that the operator sends to clients: they run the app that they trust only if they pin it (fab-hash or "
    "trusted-entities)"
)

_TRUSTED_SERVER = Precondition(1, 0, outside=_SERVER, later=True)
# Those that Theorems 1 and 4 share.
_ROUNDS = (
    Precondition(1, 1, enforced="bounds of the plan"),
    Precondition(1, 2, enforced="the server's registry of clients"),
    Precondition(1, 3, enforced="the ClientApp, whose reply follows from its own data and the request"),
    Precondition(1, 4, enforced="the server's exchange, which charges a round before it asks"),
)

#: Joint: Theorem 1.
JOINT = (*_ROUNDS, Precondition(1, 5, outside=_PARTICIPATION), _TRUSTED_SERVER)

#: RR-Slot: Theorem 2.
SLOTS = (
    Precondition(2, 0, outside=_PARTICIPATION),
    Precondition(2, 1, enforced="the sampler of the plan"),
    Precondition(2, 2, enforced="the mechanism"),
    Precondition(2, 3, enforced="the mechanism"),
    Precondition(2, 4, enforced="the mechanism"),
    _TRUSTED_SERVER,
)

#: DP-SGD at record level: Theorem 3.
RECORDS = (
    Precondition(
        3,
        0,
        outside="which records are in a batch: the amplification by sampling holds against those who cannot see it",
    ),
    Precondition(
        3,
        0,
        outside="clients whose node configuration sets another budget than their profile: their ledgers count by that "
        "one",
    ),
    Precondition(
        3,
        0,
        outside="clients whose node configuration does not declare guarantee = record-level with epsilon and delta: "
        "they trust the server to ask for nothing beyond the plan",
        later=True,
    ),
    Precondition(3, 1, enforced="the ClientApp, which parses requests into types with bounds"),
    Precondition(3, 2, enforced="the node configuration, in which epsilon requires shape and classes, or a schema"),
    Precondition(3, 3, enforced="the client's ledger"),
    Precondition(
        3,
        4,
        outside="copies of a client's records: each copy with a budget file of its own spends a budget of its own",
        later=True,
    ),
    Precondition(3, 5, enforced="the ClientApp, whose errors follow from the request and the configuration"),
    Precondition(3, 6, outside=_CODE, later=True),
    Precondition(3, 7, enforced="the ClientApp, which takes gradients of a batch of one unless a trace is the same"),
)


def of_banded(*, secret: bool) -> tuple[Precondition, ...]:
    """Return the preconditions of Theorem 4.

    Args:
        secret: Whether the clients of a slot that take part are secret.
    """
    attendance = f"{_PARTICIPATION}; {_ATTENDANCE}" if secret else _ATTENDANCE
    return (
        *_ROUNDS,
        Precondition(4, 0, outside=attendance),
        Precondition(4, 5, enforced="the schedule of the plan"),
        Precondition(4, 6, enforced="the ledger, in which a round is charged once"),
        _TRUSTED_SERVER,
    )


def of_secure(*, corrupt: int, clients: str) -> tuple[Precondition, ...]:
    """Return the preconditions of Theorem 9.

    Args:
        corrupt: Number of clients that may work with the server.
        clients: The clients of which these are, in words.
    """
    return (
        Precondition(1, 1, enforced="the ClientApp, which checks the plan of a masked round"),
        Precondition(1, 2, enforced="the ClientApp, which verifies the keys of a cohort by its roster"),
        Precondition(1, 3, enforced="the ClientApp, whose vector follows from its own data and the request"),
        Precondition(1, 4, enforced="the protocol, in which a missing vector adds nothing"),
        Precondition(9, 5, outside=_ATTENDANCE),
        Precondition(
            9,
            6,
            outside=f"that at most {corrupt} {clients} work with the server: it assumes that all others of the roster "
            "are honest, and different, parties (min-corrupt bounds the noise, not their number)",
        ),
        Precondition(
            9,
            7,
            outside="clients whose node configuration does not declare guarantee = masked-sums: they answer requests "
            "for unmasked updates",
        ),
        Precondition(
            9,
            7,
            outside="computers that break X25519, AES or SHA-256: the guarantee against the server is computational",
        ),
        Precondition(9, 0, outside=_CODE),
    )
