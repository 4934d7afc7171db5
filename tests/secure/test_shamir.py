"""Shares: any threshold of them give the secret, fewer say nothing about it."""

import itertools
import secrets
from contextlib import suppress

import pytest
from kit.tables import for_rows

from coterie.privacy.secure_aggregation import SecureError
from coterie.privacy.secure_aggregation.shamir import SECRET_BYTES, combine, split, weights


@for_rows(("t", "n"), [(1, 1), (1, 3), (2, 2), (2, 4), (3, 5), (5, 5), (40, 60)])
def test_every_choice_of_enough_shares_gives_the_secret(t, n):
    secret = secrets.token_bytes(SECRET_BYTES)
    shares = dict(enumerate(split(secret, t, n), 1))
    for persons in itertools.islice(itertools.combinations(shares, t), 30):
        assert combine({person: shares[person] for person in persons}) == secret


def test_one_share_too_few_fits_every_secret():
    """For two of three shares and any other secret there is a third share that gives it."""
    shares = split(bytes(SECRET_BYTES), 3, 3)
    prime = 2**255 - 19
    one, two, three = weights([1, 2, 3])
    wanted = int.from_bytes(b"\x07" * SECRET_BYTES, "big")
    known = one * int.from_bytes(shares[0], "big") + two * int.from_bytes(shares[1], "big")
    third = (wanted - known) * pow(three, -1, prime) % prime
    assert combine({1: shares[0], 2: shares[1], 3: third.to_bytes(32, "big")}) == b"\x07" * SECRET_BYTES


def test_too_few_shares_give_an_error_or_another_secret():
    outcomes = set()
    for _ in range(300):  # one in 128 has the length of a secret
        secret = secrets.token_bytes(SECRET_BYTES)
        shares = split(secret, 3, 5)
        with suppress(SecureError):
            outcomes.add(combine({1: shares[0], 2: shares[1]}) == secret)
    assert True not in outcomes


@pytest.mark.parametrize("persons", [[1, 1], [0, 1], [-1, 2]])
def test_persons_must_differ_and_start_at_1(persons):
    with pytest.raises(SecureError):
        weights(persons)


@for_rows(("length", "t", "n"), [(30, 1, 1), (32, 1, 1), (31, 0, 3), (31, 4, 3)])
def test_other_lengths_and_thresholds_are_refused(length, t, n):
    with pytest.raises(ValueError, match="a secret has 31 bytes"):
        split(bytes(length), t, n)


@for_rows("share", [b"", bytes(31), bytes(33), b"\xff" * 32])
def test_malformed_shares_are_refused(share):
    with pytest.raises(SecureError, match="malformed"):
        combine({1: share})
