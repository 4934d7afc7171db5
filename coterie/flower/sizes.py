"""Replies of a fixed size: bytes and number of Flower's objects follow from the request and the configuration alone.

TLS hides the contents of a message, but not its size. Three things depend on the contents: an integer takes 1 to 10
bytes, and Flower sends equal arrays, and equal chunks of long arrays, once.
"""

from __future__ import annotations

from itertools import count
from typing import Any

from flwr.app import Array, ArrayRecord, RecordDict
from flwr.app.message.arraychunk import ArrayChunk

from coterie.flower import SUPPORTED
from coterie.site.errors import DeployError

#: Key of the zeros that complete the integers of a record to their largest size.
PADDING = "padding"
_LARGEST_INTEGER = 10
# Bytes of an array above which Flower sends it in chunks.
_CHUNK = 5 * 2**20
# Bytes of NumPy's format before its header.
_PREFIX = 10


def fix_size(reply: RecordDict) -> None:
    """Pad the integers of a reply, and make its arrays and their chunks distinct; no value changes.

    Lists of integers are not padded: they are exact diagnostics, outside the guarantee.
    """
    number, shortening = count(), count()
    for record in reply.values():
        if isinstance(record, ArrayRecord):
            for name, array in record.items():
                record[name] = _chunked(_distinct(array, next(number)), shortening)
        elif integers := [value for value in record.values() if type(value) is int]:
            record[PADDING] = [0] * sum(_LARGEST_INTEGER - _width(value) for value in integers)


def _width(value: int) -> int:
    """Bytes of an integer in a message: zigzag, 7 bits a byte."""
    return max(1, -(-((value << 1) ^ (value >> 63)).bit_length() // 7))


def _distinct(array: Array, number: int) -> Array:
    """The array with its number in NumPy's header: a tab instead of a space for every 1 of its binary digits."""
    end = _PREFIX + int.from_bytes(array.data[8:_PREFIX], "little")
    first, *words = array.data[:end].split(b" ")
    marked = first + b"".join((b"\t" if number >> i & 1 else b" ") + word for i, word in enumerate(words))
    data = b"".join((marked, memoryview(array.data)[end:]))
    return Array(array.dtype, array.shape, array.stype, data)


def _chunked(array: Array, shortening: Any) -> Array:
    """The array in chunks of different lengths; the first one has the header, which is distinct."""
    ends = [len(array.data)]
    while ends[-1] > _CHUNK:
        ends.append(ends[-1] - _CHUNK // 2 + next(shortening))
    if len(ends) == 1:
        return array  # one chunk, as Flower sends it
    starts, data = [*ends[1:], 0], memoryview(array.data)
    chunks = [ArrayChunk(data[start:end]) for start, end in zip(starts, ends, strict=True)][::-1]
    array.__dict__["_chunks"] = pairs = [(chunk.object_id, chunk) for chunk in chunks]
    if array.slice_array() is not pairs:  # it looks there first
        raise DeployError(f"this version of flwr does not send an array in given chunks: install flwr{SUPPORTED}")
    return array
