"""The box keys of a client: each is for one round, announced before it, and removed once its boxes are open."""

import stat

import pytest
from kit.tables import for_rows

from coterie.client.box_keys import SimulatedBoxKeys, StoredBoxKeys
from coterie.privacy.secure_aggregation import SecureError


def public(key):
    return key.public_key().public_bytes_raw()


@pytest.fixture
def keys(tmp_path):
    return StoredBoxKeys(tmp_path / "state" / "client-3.box-keys")


def test_a_key_is_announced_until_a_round_uses_it(keys):
    first = public(keys.announced())
    assert public(keys.announced()) == first
    assert public(keys.use(first)) == first
    assert public(keys.announced()) != first


def test_a_key_is_used_again_if_the_reply_was_lost_and_never_once_its_boxes_are_open(keys):
    first = public(keys.announced())
    keys.use(first)
    following = public(keys.announced())
    assert public(keys.use(first)) == first
    assert public(keys.announced()) == following
    keys.forget(first)
    with pytest.raises(SecureError, match="ask for its identity again"):
        keys.use(first)
    assert public(keys.use(following)) == following


def test_a_later_key_ends_the_earlier_ones(keys):
    first = public(keys.announced())
    keys.use(first)
    following = public(keys.announced())
    keys.use(following)
    with pytest.raises(SecureError):
        keys.use(first)
    assert len(keys.path.read_bytes()) == 64


@for_rows("content", [None, b"", b"short", bytes(40)])
def test_keys_that_are_lost_are_replaced(keys, content):
    used = public(keys.announced())
    if content is None:
        keys.path.unlink()
    else:
        keys.path.write_bytes(content)
    with pytest.raises(SecureError):
        keys.use(used)
    announced = public(keys.announced())
    assert public(keys.use(announced)) == announced
    assert stat.S_IMODE(keys.path.stat().st_mode) == 0o600


def test_keys_are_not_printed(keys):
    secret = keys.announced().private_bytes_raw()
    simulated = SimulatedBoxKeys(secret)
    assert repr(secret) not in repr(keys) + repr(simulated)
    assert public(simulated.use(b"any")) == public(simulated.announced())
