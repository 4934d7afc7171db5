"""Sealed boxes of shares: a key seals any number of them, each under a nonce of its own."""

import pytest
from kit.tables import for_rows

from coterie.privacy.secure_aggregation import SecureError
from coterie.privacy.secure_aggregation.keys import seal, unseal

KEY, CONTEXT = bytes(range(32)), b"1 to 2"


def test_two_boxes_of_one_key_have_two_nonces():
    """Under one nonce, two boxes reveal the difference of their contents."""
    boxes = [seal(KEY, content, CONTEXT) for content in (bytes(64), bytes(64), b"\x01" * 64)]
    assert len({box[:12] for box in boxes}) == 3
    assert len({bytes(a ^ b for a, b in zip(boxes[0], box, strict=True))[12:76] for box in boxes[1:]}) == 2
    assert [unseal(KEY, box, CONTEXT) for box in boxes] == [bytes(64), bytes(64), b"\x01" * 64]


@for_rows("place", [0, 12, 40, -1])
def test_a_changed_box_is_not_opened(place):
    box = bytearray(seal(KEY, bytes(64), CONTEXT))
    box[place] ^= 1
    with pytest.raises(SecureError, match="cannot be opened"):
        unseal(KEY, bytes(box), CONTEXT)
