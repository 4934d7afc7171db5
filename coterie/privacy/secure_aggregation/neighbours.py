"""Pairs of clients that share a mask: all pairs in a small cohort, neighbours on a ring in a large one.

J. Bell et al.: Secure Single-Server Aggregation with (Poly)Logarithmic Overhead (CCS 2020), with a public ring in place
of a random graph: every client checks the survivors that it signs, so that privacy does not rest on chance.

     1  the clients stand on a ring, in the order of a hash; i masks with those at most r places away, who hold shares
        of its secrets
     2  i signs a list of survivors only if the (c + 1)-th next one of each of them is at most r places away

If any c of these survivors work with the server, two of the others with none of the others between them are at most r
places apart. So the honest survivors are connected by masks that the server does not know, and it learns the sum over
all of them, not over a part.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

#: Largest cohort in which everybody masks with everybody.
COMPLETE = 200
# Probability that clients who drop out independently, each with a probability of 1/3, spoil a round.
_SPOILED = 2.0**-30


def reach(clients: int, corrupt: int) -> int:
    """Return r, so that survivors fulfil line 2 but for a negligible probability if a third drops out at random.

    Args:
        clients: n; half of it, if it is at most :data:`COMPLETE`.
        corrupt: c.

    Examples:
        >>> [reach(clients, 1) for clients in (200, 201, 1000, 10_000)]
        [100, 28, 29, 32]
    """
    places = corrupt + 1
    while clients > COMPLETE and places < clients // 2:
        if clients * _at_most(corrupt, places) < _SPOILED:
            return places
        places += 1
    return clients // 2


def _at_most(corrupt: int, places: int) -> float:
    """Probability that of so many clients at most `corrupt` stay."""
    return float(sum(math.comb(places, stay) * 2**stay for stay in range(corrupt + 1)) / 3**places)


def ring(digest: bytes, clients: Sequence[int]) -> list[int]:
    """Return the clients in the order of a hash."""
    return sorted(clients, key=lambda client: hashlib.sha256(digest + str(client).encode()).digest())


def connected(places: Sequence[int], clients: int, reach: int, corrupt: int) -> bool:
    """Whether survivors fulfil line 2.

    Args:
        places: theirs on the ring, from 0, in any order; more than `corrupt`.
        clients: n.
        reach: r; survivors are connected in any case if it reaches everybody.
        corrupt: c.

    Examples:
        >>> connected([0, 2, 4, 6, 8], 10, 4, 1), connected([0, 2, 4, 8, 9], 10, 4, 1)
        (True, False)
    """
    if reach >= clients // 2:
        return True
    order = sorted(places)
    following = [*order, *(place + clients for place in order)]
    return all(following[i + corrupt + 1] - place <= reach for i, place in enumerate(order))
