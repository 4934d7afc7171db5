"""Shamir's secret sharing over the integers modulo 2^255 - 19: any `threshold` shares give the secret, fewer nothing.

A. Shamir: How to share a secret, CACM 22, 1979. The secret is the constant term of a random polynomial of degree
threshold - 1; the share of person x is its value at x.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from coterie.privacy.secure_aggregation.errors import SecureError

#: Bytes of a secret, which is below the modulus, and of a share.
SECRET_BYTES, SHARE_BYTES = 31, 32
_PRIME = 2**255 - 19


def split(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Return the shares of persons 1 to `count`.

    Raises:
        ValueError: the secret has another length, or the threshold is not in [1, count].

    Examples:
        >>> shares = split(bytes(31), threshold=2, count=3)
        >>> combine({1: shares[0], 3: shares[2]}) == bytes(31)
        True
    """
    if len(secret) != SECRET_BYTES or not 1 <= threshold <= count:
        raise ValueError(f"a secret has {SECRET_BYTES} bytes, and the threshold lies in [1, {count}]")
    terms = [int.from_bytes(secret, "big"), *(secrets.randbelow(_PRIME) for _ in range(threshold - 1))]
    return [_value_at(person, terms).to_bytes(SHARE_BYTES, "big") for person in range(1, count + 1)]


def _value_at(x: int, terms: Sequence[int]) -> int:
    value = 0
    for term in reversed(terms):
        value = (value * x + term) % _PRIME
    return value


def weights(persons: Sequence[int]) -> list[int]:
    """Return Lagrange's weights at 0, with which the shares of these persons, different and from 1, add to a secret.

    Raises:
        SecureError: a person is named twice, or below 1.
    """
    if len(set(persons)) != len(persons) or any(person < 1 for person in persons):
        raise SecureError("the shares are not of different persons")
    products = []
    for one in persons:
        above = below = 1
        for other in persons:
            if other != one:
                above, below = above * other % _PRIME, below * (other - one) % _PRIME
        products.append(above * pow(below, -1, _PRIME) % _PRIME)
    return products


def combine(shares: Mapping[int, bytes], factors: Sequence[int] | None = None) -> bytes:
    """Return the secret of the shares, by person; all of them are used, and `threshold` of them suffice.

    Args:
        shares: by person, from 1.
        factors: :func:`weights` of the same persons in the same order, computed once for many secrets.

    Raises:
        SecureError: a share is malformed, or they do not belong together.
    """
    values = [int.from_bytes(share, "big") for share in shares.values()]
    if any(len(share) != SHARE_BYTES for share in shares.values()) or any(value >= _PRIME for value in values):
        raise SecureError("a share is malformed")
    factors = weights(list(shares)) if factors is None else factors
    secret = sum(factor * value for factor, value in zip(factors, values, strict=True)) % _PRIME
    if secret >> (8 * SECRET_BYTES):
        raise SecureError("the shares do not belong to one secret")
    return secret.to_bytes(SECRET_BYTES, "big")
