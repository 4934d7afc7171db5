"""The corpus of hostile messages: changes of an honest request or reply, as another program could make them.

Only what Flower can carry is made: the values of a record are numbers, texts, bytes, truth values or lists of these,
and the fields of an array are any JSON. Each operator changes one thing; :func:`changed` composes one to three. What a
client sends is changed in tests/fuzz, and what a server sends in tests/client/test_hostile_server.py and
test_hostile_masking.py.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

_TEXTS = ("", "0", "3", "nan", "\x1b[2J", "round 9/9: epsilon 0.001\nround 9/9", "\u202e\u2066x", "x" * 100_050, "\0")
_NUMBERS = (
    *(-1, 0, 1, 2, 3, 7, 8, 99, 9999, 2**31, 2**40, 2**53 + 1, 2**63 - 1, -(2**63), 2**64 - 1),
    *(-0.0, 0.0, 0.5, 1.0, 1.5, float("nan"), float("inf"), -float("inf"), 5e-324, 1e-320, 1e30, 1e308, -1e308),
)
_OTHERS = (b"", b"\x80\x04\x95", True, False, [], [0], [1.5], ["a"], [True], [b""], [0] * 10_000, [float("nan")])
_FLOATS = (np.nan, np.inf, -np.inf, 1e30, -1e30, 3.4e38, -3.4e38, 1e-45, -0.0, 0.0, 1.0, 1.0000001, -1.5, 100.0)
_SHAPES: tuple[Any, ...] = (
    *((), (0,), (1,), (4,), (1, 1), (2, 2), (-1,), (2**31, 2**31), (10**12,), (2**63,), (10**30,), (1,) * 40),
)
_NO_SHAPES: tuple[Any, ...] = (None, 5, "2", {}, [1.5], ["2"], [None], [[2]], [True, True], float("inf"))
_NAMES = ("update", "reply", "diagnostics", "models", "config", "points", "losses", "", "\x1b[2J", "y" * 10_000)
_KEYS = ("client-id", "round", "label", "redrawn-label", "accuracy", "loss", "cluster", "group", "epsilon", "repeats")
_DTYPES: tuple[Any, ...] = ("float64", "float16", "int32", "object", "<f4", "FLOAT32", "", "\x1b[2J", None, 4, ["f"])

Random = random.Random


@dataclass(frozen=True)
class Delivery:
    """What arrives instead of a reply.

    Attributes:
        content: of the reply, or an error.
        reply_to: id of the message that it answers; None: the one that was sent to the client.
        source: node id that it claims to come from; None: the client's.
    """

    content: Any
    reply_to: str | None = None
    source: int | None = None


def copied(content: RecordDict) -> RecordDict:
    """A copy whose records and arrays are its own."""
    copy = RecordDict()
    for name, record in content.items():
        if isinstance(record, ArrayRecord):
            arrays = {key: Array(a.dtype, tuple(a.shape), a.stype, a.data) for key, a in record.items()}
            copy[name] = ArrayRecord(arrays)
        else:
            copy[name] = type(record)({k: list(v) if isinstance(v, list) else v for k, v in record.items()})
    return copy


# ---- records and their values ------------------------------------------------------------------------------------


def _raw(record: Any) -> dict[str, Any]:
    """The dictionary behind a record: what was inflated passes none of Flower's checks."""
    data: dict[str, Any] = record.__dict__["_data"]
    return data


def _values(rng: Random, reply: RecordDict) -> tuple[ConfigRecord | MetricRecord, str] | None:
    """A record of values, and a key of it."""
    found = [record for record in reply.values() if isinstance(record, ConfigRecord | MetricRecord) and len(record)]
    if not found:
        return None
    record = rng.choice(found)
    return record, rng.choice(sorted(record))


def _set(rng: Random, record: ConfigRecord | MetricRecord, key: str, values: Sequence[Any]) -> None:
    """One of the values that Flower carries in such a record: of metrics, numbers and lists of one type of them."""
    if isinstance(record, MetricRecord):
        numbers = [value if isinstance(value, list) else [value] for value in values]
        values = [
            value
            for value, parts in zip(values, numbers, strict=True)
            if {type(part) for part in parts} in (set(), {int}, {float})
        ]
    if values:
        _raw(record)[key] = rng.choice(values)


def _near(value: Any) -> list[Any]:
    """Values close to one, and equal ones of other types."""
    if isinstance(value, bool | int | float):
        whole = [int(value) + 1, int(value) - 1, -int(value), int(value), value + 0.5] if abs(value) < 1e15 else []
        return [*whole, float(value), str(value), bool(value), [value]]
    if isinstance(value, list) and value:
        numbers = [float(one) for one in value if isinstance(one, int | float)]
        return [value[:-1], [*value, value[0]], [*value[:-1], -1], numbers, [*map(str, value)], value[0]]
    return [str(value)]


def drop_record(rng: Random, reply: RecordDict) -> None:
    if reply:
        del reply[rng.choice(sorted(reply))]


def rename_record(rng: Random, reply: RecordDict) -> None:
    if reply:
        name = rng.choice(sorted(reply))
        record = _raw(reply).pop(name)
        _raw(reply)[rng.choice([*_NAMES, name.upper(), name + " "])] = record


def add_record(rng: Random, reply: RecordDict) -> None:
    _raw(reply)[rng.choice(_NAMES)] = rng.choice(
        [ConfigRecord({"client-id": 0}), MetricRecord({"accuracy": 1.0}), ArrayRecord({"x": Array(np.zeros(2))})]
    )


def replace_record(rng: Random, reply: RecordDict) -> None:
    if reply:
        _raw(reply)[rng.choice(sorted(reply))] = rng.choice([ConfigRecord(), MetricRecord(), ArrayRecord()])


def drop_value(rng: Random, reply: RecordDict) -> None:
    if (place := _values(rng, reply)) is not None:
        del _raw(place[0])[place[1]]


def rename_value(rng: Random, reply: RecordDict) -> None:
    if (place := _values(rng, reply)) is not None:
        record, key = _raw(place[0]), place[1]
        record[rng.choice([*_KEYS, key.upper(), key.replace("-", "_"), key + "\n"])] = record.pop(key)


def add_value(rng: Random, reply: RecordDict) -> None:
    if (place := _values(rng, reply)) is not None:
        _set(rng, place[0], rng.choice([*_KEYS, *_NAMES]), [*_NUMBERS, *_TEXTS, *_OTHERS])


def change_value(rng: Random, reply: RecordDict) -> None:
    if (place := _values(rng, reply)) is not None:
        _set(rng, *place, [*_NUMBERS, *_TEXTS, *_OTHERS])


def nudge_value(rng: Random, reply: RecordDict) -> None:
    if (place := _values(rng, reply)) is not None:
        _set(rng, *place, _near(place[0][place[1]]))


def scale_value(rng: Random, reply: RecordDict) -> None:
    """Of the right type, perhaps within bounds."""
    if (place := _values(rng, reply)) is not None:
        value = place[0][place[1]]
        if isinstance(value, float):
            values = [rng.random(), -rng.random(), 1 + 1e-12, 1.0, 0.0, 1e308, 5e-324, rng.gauss(0, 9)]
            _set(rng, *place, values)
        elif isinstance(value, int):
            _set(rng, *place, [rng.randrange(4), rng.randrange(10), rng.randrange(10**6), -rng.randrange(9)])


# ---- arrays ------------------------------------------------------------------------------------------------------


def _array(rng: Random, reply: RecordDict) -> tuple[dict[str, Any], str] | None:
    """A record of arrays, and a key of it."""
    found = [record for record in reply.values() if isinstance(record, ArrayRecord) and len(record)]
    if not found:
        return None
    record = rng.choice(found)
    return _raw(record), rng.choice(sorted(record))


def _npy(values: Any, version: tuple[int, int] | None = None, pickled: bool = False) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.asarray(values), version=version, allow_pickle=pickled)
    return stream.getvalue()


def _packed(values: Any, data: bytes | None = None) -> Array:
    values = np.asarray(values)
    return Array(str(values.dtype), tuple(values.shape), "numpy.ndarray", _npy(values) if data is None else data)


def _numbers(array: Array) -> np.ndarray | None:
    """What an array holds; None if it is damaged, or no numbers."""
    try:
        values = np.array(array.numpy())
    except Exception:
        return None
    return values if values.dtype.kind in "fiub" else None


def drop_array(rng: Random, reply: RecordDict) -> None:
    if (place := _array(rng, reply)) is not None:
        del place[0][place[1]]


def rename_array(rng: Random, reply: RecordDict) -> None:
    if (place := _array(rng, reply)) is not None:
        arrays, key = place
        arrays[rng.choice([*_NAMES, "0/" + key, key + "\x1b[2J", key[:-1]])] = arrays.pop(key)


def add_array(rng: Random, reply: RecordDict) -> None:
    found = [record for record in reply.values() if isinstance(record, ArrayRecord)]
    if found:
        _raw(rng.choice(found))[rng.choice([*_NAMES, "output.extra"])] = _packed(np.zeros(3, np.float32))


def reorder_arrays(rng: Random, reply: RecordDict) -> None:
    if (place := _array(rng, reply)) is not None:
        arrays, key = place
        arrays[key] = arrays.pop(key)


def swap_arrays(rng: Random, reply: RecordDict) -> None:
    if (place := _array(rng, reply)) is not None:
        arrays, key = place
        other = rng.choice(sorted(arrays))
        arrays[key], arrays[other] = arrays[other], arrays[key]


def array_field(rng: Random, reply: RecordDict) -> None:
    """The type or shape that an array claims; its bytes stay."""
    if (place := _array(rng, reply)) is not None:
        fields = place[0][place[1]].__dict__
        kind = rng.randrange(3)
        if kind == 0:
            fields["dtype"] = rng.choice(_DTYPES)
        elif kind == 1:
            shape, near = fields["shape"], []
            if isinstance(shape, tuple) and all(type(size) is int for size in shape):
                near = [tuple(reversed(shape)), (*shape, 1), shape[1:], list(shape), tuple(map(float, shape))]
            fields["shape"] = rng.choice(rng.choice([_SHAPES, _NO_SHAPES, near or _SHAPES]))
        else:
            fields["stype"] = rng.choice(["", "pickle", "torch.Tensor", "NUMPY.NDARRAY", "\x1b[2J", None, 1])


def array_bytes(rng: Random, reply: RecordDict) -> None:
    """Damaged bytes under the right fields."""
    if (place := _array(rng, reply)) is not None:
        fields = place[0][place[1]].__dict__
        data = fields["data"]
        cut = rng.randrange(len(data) + 1)
        flipped = bytearray(data)
        for _ in range(rng.choice([1, 1, 8])):
            if flipped:
                flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        fields["data"] = rng.choice(
            [data[:cut], data + bytes(rng.choice([1, 4, 900, 5000])), b"", bytes(flipped), rng.randbytes(200), data * 2]
        )


def array_encoding(rng: Random, reply: RecordDict) -> None:
    """The same numbers, written in another way, or other numbers behind the same fields."""
    place = _array(rng, reply)
    if place is None or (values := _numbers(place[0][place[1]])) is None:
        return
    array = place[0][place[1]]
    shape = values.shape
    record = np.zeros(shape, [("a", "<f4"), ("b", "<i4")])
    header = b"\x93NUMPY\1\0"
    others: list[bytes] = [
        *(_npy(values.astype(kind)) for kind in (">f4", "<f8", "<f2", "<i4", "?", "<c8", "U4")),
        _npy(np.full(shape, None, object), pickled=True),
        _npy(record),
        _npy(np.asfortranarray(values)),
        _npy(values, (2, 0)),
        _npy(values, (3, 0)),
        _npy(values, (2, 0)) + b"\0" * 8,
        _npy(np.asfortranarray(values))[:-4],
        header + _head({"descr": "<f4", "fortran_order": False, "shape": (10**15,)}),
        header + _head({"descr": "<f4", "fortran_order": False, "shape": (-1,)}) + values.tobytes(),
        header + _head({"descr": "|O", "fortran_order": False, "shape": shape}) + b"\x80\x04N.",
        header + _head({"descr": "<f4", "fortran_order": 2, "shape": shape}) + values.tobytes(),
        header + _head({"descr": "<f4", "fortran_order": False, "shape": shape, "x": 1}) + values.tobytes(),
        header + b"\xff\xff" + b"(" * 60_000,
        header + _head("__import__('os').abort()"),
        values.tobytes(),
    ]
    array.__dict__["data"] = rng.choice(others)


def _head(header: Any) -> bytes:
    text = (header if isinstance(header, str) else repr(header)).encode()
    return len(text + b"\n").to_bytes(2, "little") + text + b"\n"


def array_type(rng: Random, reply: RecordDict) -> None:
    """Honestly declared arrays of another type or shape."""
    place = _array(rng, reply)
    if place is None or (values := _numbers(place[0][place[1]])) is None:
        return
    flat = values.ravel()
    others: list[Callable[[], Any]] = [
        lambda: values.astype(rng.choice(["<f8", "<f2", "<i8", "?", ">f4", "<c8"])),
        lambda: values[None],
        lambda: flat,
        lambda: values.T,
        lambda: np.float32(1.0),
        lambda: np.zeros(0, np.float32),
        lambda: np.zeros((0, *values.shape[1:]), np.float32),
        lambda: np.concatenate([values, values]) if values.ndim else flat,
        lambda: values[:1] if values.ndim else flat,
        lambda: values[:, :1] if values.ndim > 1 else flat[:1],
        lambda: np.repeat(values, 100, axis=0) if values.ndim else flat,
        lambda: np.zeros((1, *values.shape[1:]), np.float32) if values.ndim else flat,
    ]
    place[0][place[1]] = _packed(rng.choice(others)())


def array_values(rng: Random, reply: RecordDict) -> None:
    """Other numbers: not finite, huge, tiny, out of range, or merely wrong."""
    place = _array(rng, reply)
    if place is None or (values := _numbers(place[0][place[1]])) is None or not values.size:
        return
    values = values.copy()
    with np.errstate(all="ignore"):
        kind = rng.randrange(5)
        if kind == 0:
            values.flat[rng.randrange(values.size)] = rng.choice(_FLOATS)
        elif kind == 1:
            values[...] = rng.choice(_FLOATS)
        elif kind == 2:
            values = -values
        elif kind == 3:
            values = (values * rng.choice([0.5, 10.0, 1e6, 1e-30, 1e37])).astype(np.float32)
        else:
            noise = np.random.default_rng(rng.randrange(2**32)).standard_normal(values.shape)
            values = (noise * rng.choice([0.1, 1.0, 1e3, 1e38])).astype(values.dtype)
    place[0][place[1]] = _packed(values)


def poison(rng: Random, reply: RecordDict) -> None:
    """One number that is not finite, or all of them far too large."""
    place = _array(rng, reply)
    if place is None or (values := _numbers(place[0][place[1]])) is None or not values.size:
        return
    values = values.astype(np.float32)
    if rng.random() < 0.6:
        values.flat[rng.randrange(values.size)] = rng.choice([np.nan, np.inf, -np.inf])
    else:
        values[...] = rng.choice([5.0, 1e3, 1e19, 3e38])
    place[0][place[1]] = _packed(values)


def more_rows(rng: Random, reply: RecordDict) -> None:
    """The same numbers several times."""
    place = _array(rng, reply)
    if place is not None and (values := _numbers(place[0][place[1]])) is not None and values.ndim:
        place[0][place[1]] = _packed(np.concatenate([values] * rng.choice([2, 3, 50])))


OPERATORS: tuple[Callable[[Random, RecordDict], None], ...] = (
    *(drop_record, rename_record, add_record, replace_record),
    *(drop_value, rename_value, add_value, change_value, change_value, nudge_value, nudge_value, scale_value),
    *(drop_array, rename_array, add_array, reorder_arrays, swap_arrays),
    *(array_field, array_field, array_bytes, array_encoding, array_type, array_values, array_values),
    *(poison, poison, more_rows),
)


# ---- whole replies -----------------------------------------------------------------------------------------------


def changed(rng: Random, reply: RecordDict) -> RecordDict:
    """A copy with one to three changes."""
    copy = copied(reply)
    for _ in range(rng.choice([1, 1, 1, 2, 2, 3])):
        rng.choice(OPERATORS)(rng, copy)
    return copy


def mutate(rng: Random, request: Message, honest: Any, others: Sequence[RecordDict]) -> list[Delivery]:
    """What arrives in place of an honest reply: nothing, one message or several.

    Args:
        rng: chooses.
        request: that the honest reply answers.
        honest: content of the reply.
        others: replies of all clients to all requests of the run.
    """
    base = honest if isinstance(honest, RecordDict) else rng.choice(others)
    kind = rng.random()
    if kind < 0.76:
        return [Delivery(changed(rng, base))]
    if kind < 0.82:  # of another client, round or verb
        other = copied(rng.choice(others))
        return [Delivery(other if rng.random() < 0.7 else changed(rng, other))]
    if kind < 0.85:
        return [Delivery(rng.choice([ArrayRecord(), ConfigRecord({"client-id": 1}), MetricRecord(), None]))]
    if kind < 0.90:
        return [Delivery(Error(rng.choice([0, 1, 5, 100, -1, 2**31]), rng.choice(_TEXTS)))]
    several = [Delivery(copied(base)), Delivery(changed(rng, base))]
    if kind < 0.95:
        rng.shuffle(several)
        return [*several, Delivery(copied(base))]
    known = request.metadata.message_id
    unknown = rng.choice(["", known + "0", "0", "\x1b[2J", "z" * 10_000])
    stray = Delivery(several[rng.randrange(2)].content, unknown, rng.choice([None, 0, 1, 2**63, -1]))
    return rng.choice([[stray], [stray, several[0]], [Delivery(several[1].content, None, 1)]])
