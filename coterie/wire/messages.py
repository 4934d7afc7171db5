"""The contract between server and clients: records, their names, and the validation of replies.

===============  ============================================================================================
to a client      ArrayRecord ``models``, keys ``"{cluster}/{parameter}"``; ConfigRecord ``config``
from a client    ArrayRecord ``update``, keys ``parameter``, float32; ConfigRecord ``reply`` (``client-id``,
                 ``round``, ``label``, ``redrawn-label``, ``below`` if the clipping norm of gradients is adaptive,
                 ``records`` if asked for, and ``head`` of a deployed client at record level);
                 MetricRecord ``diagnostics`` (evaluation only); key ``padding``: zeros (flower/sizes.py)
===============  ============================================================================================

Verbs are Flower message types: ``train``, ``query.losses``, ``evaluate``, ``query.identity``. The reply to
``query.losses`` is an ``update`` with the one entry ``losses``: a float32 number for every received model.

One-shot clustering of records adds three verbs. The replies to ``train.gan`` and ``train.centroids`` are an ``update``
with the one entry ``points``: float32 points of the data's shape, any number within bounds. ``query.label`` carries the
result, with which clients label their records; the reply has ``diagnostics`` if requested.

A masked round has four: ``train.open``, ``train.masked``, ``train.survivors``, ``train.unmask``; if it evaluates, the
second one is ``evaluate.masked`` (wire/masked.py).
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from coterie.fields import COUNT
from coterie.models import float32_arrays

if TYPE_CHECKING:
    from torch import nn

#: Key of the diagnostics: a client's counts of scores by label, floats so that their size is fixed.
SCORE_COUNTS = "score-counts"
MODELS, CONFIG, UPDATE, REPLY, DIAGNOSTICS = "models", "config", "update", "reply", "diagnostics"
TRAIN, LOSSES, EVALUATE, IDENTITY = "train", "query.losses", "evaluate", "query.identity"
GAN, CENTROIDS, LABEL = "train.gan", "train.centroids", "query.label"
#: The four steps of a masked round (wire/masked.py).
OPEN, MASKED, SURVIVORS, UNMASK = "train.open", "train.masked", "train.survivors", "train.unmask"
#: Step 2 of a masked round that evaluates.
MASKED_SCORES = "evaluate.masked"
#: Steps by message type, from 0.
MASKED_STEPS = {OPEN: 0, MASKED: 1, MASKED_SCORES: 1, SURVIVORS: 2, UNMASK: 3}
#: Message types whose replies a client charges at record level.
CHARGED_REQUESTS = (TRAIN, GAN, LOSSES)
#: Key of a request's configuration: the plans of clients at record level.
RECORD_PLANS = "record-plans"
#: Key of a request's configuration: the signed request for the run (coterie/site/run_request.py).
RUN_REQUEST = "run-request"
#: Key of a reply at record level, a random number of the charge that paid for it, and of the next request, in which the
#: server sends it back: a client that does not hold the charge was restored from an older copy.
HEAD = "head"
_HEAD = re.compile(r"[0-9a-f]{32}")
#: Keys of a message that may change when a run is resumed and do not affect the reply.
PLACES_OF_CLIENTS = ("data-dir", "device", RUN_REQUEST, HEAD)
_POINTS, _MASKED = "points", "masked"
# Types of arrays in replies, as NumPy's headers name them; both have four bytes.
_FLOAT32, _UINT32 = "<f4", "<u4"

#: Codes of error replies, by kind: the budget or the policy of a client does not allow the request, the client has no
#: data, or anything else, whose details are in the client's own log.
REFUSALS = {"budget": 9001, "policy": 9002, "no-data": 9003, "failed": 9004}

#: What a client and the server say of an update that is not finite.
DIVERGED = "training diverged; scale features and targets (docs/tables.md), or lower lr"

T = TypeVar("T")


# Types of arrays that can be parameters, and last names of buffers that are none, although they are real numbers.
_REAL = ("float16", "float32", "float64")
_STATISTICS = ("running_mean", "running_var")
# Largest header of NumPy's format; 128 bytes for the shapes in use.
_MAX_HEADER = 1024


class ReplyError(ValueError):
    """A reply violates the contract; it is dropped and the round continues."""


@dataclass(frozen=True)
class Layout:
    """Names and shapes of one model's parameters, and their layout in a flat vector of length ``size``."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, parameters: Mapping[str, Any]) -> Layout:
        """The layout of arrays or tensors by name, in their order."""
        return cls(tuple(parameters), tuple(tuple(value.shape) for value in parameters.values()))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of entries of each parameter."""
        return tuple(map(math.prod, self.shapes))

    @cached_property
    def size(self) -> int:
        """d, the number of entries of a whole model."""
        return sum(self.sizes)

    def flatten(self, parameters: Mapping[str, Any]) -> npt.NDArray[np.float32]:
        """One model's parameters as a (d,) float32 vector."""
        parts = [np.asarray(parameters[name], dtype=np.float32).reshape(-1) for name in self.names]
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)

    def split(self, vector: Any) -> dict[str, Any]:
        """Views of a (..., d) array or tensor as parameters of shape (..., *shape)."""
        views, start = {}, 0
        for name, shape, size in zip(self.names, self.shapes, self.sizes, strict=True):
            views[name] = vector[..., start : start + size].reshape((*vector.shape[:-1], *shape))
            start += size
        return views


def head_of(record: object) -> str | None:
    """Return the head in the ConfigRecord of a request or a reply; None without a valid one."""
    head = record.get(HEAD) if isinstance(record, ConfigRecord) else None
    return head if isinstance(head, str) and _HEAD.fullmatch(head) else None


def losses_layout(models: int) -> Layout:
    """Layout of the reply to ``query.losses``."""
    return Layout(("losses",), ((models,),))


@dataclass(frozen=True)
class PointsSpec:
    """Specification of a reply of n points in the data space.

    Attributes:
        shape: of one point.
        max_points: maximum n; the minimum is 1.
        num_points: the required n; 0: any from 1 to ``max_points``.
        low, high: range of every number.
    """

    shape: tuple[int, ...]
    max_points: int
    num_points: int = 0
    low: float = -1.0
    high: float = 1.0

    def check(self, rows: int) -> None:
        """Check a number of points.

        Raises:
            ReplyError: it is not allowed.
        """
        if self.num_points and rows != self.num_points:
            raise ReplyError(f"the number of points is {rows}, expected {self.num_points}")
        if not 1 <= rows <= self.max_points:
            raise ReplyError(f"the number of points is {rows}, expected 1 to {self.max_points}")


def pack_models(models: npt.NDArray[np.float32], layout: Layout) -> ArrayRecord:
    """(k, d) models as one ArrayRecord with keys ``"{cluster}/{parameter}"``."""
    parameters = layout.split(models)
    return ArrayRecord(
        {
            f"{cluster}/{name}": _pack(parameters[name][cluster])
            for cluster in range(len(models))
            for name in layout.names
        }
    )


def unpack_models(record: Mapping[str, Array]) -> tuple[npt.NDArray[np.float32], Layout]:
    """(k, d) float32 models and their layout; a record without cluster prefixes is one model, an empty one too.

    Raises:
        ValueError: clusters have different parameters.
    """
    clusters: dict[int, dict[str, npt.NDArray[Any]]] = {}
    for key, array in record.items():
        cluster, _, name = key.partition("/")
        if not (name and cluster.isdigit()):
            cluster, name = "0", key
        clusters.setdefault(int(cluster), {})[name] = array.numpy()
    clusters = clusters or {0: {}}
    layouts = {Layout.of(parameters) for parameters in clusters.values()}
    if len(layouts) != 1 or sorted(clusters) != list(range(len(clusters))):
        raise ValueError("the models must be clusters 0, 1, ... with the same parameters each")
    layout = layouts.pop()
    return np.stack([layout.flatten(clusters[j]) for j in range(len(clusters))]), layout


def trainable_arrays(network: nn.Module) -> ArrayRecord:
    """Return the trainable part of a network as float32 arrays, for the start of a strategy (models/trainable.py)."""
    return ArrayRecord({name: _pack(value) for name, value in float32_arrays(network).items()})


def check_trainable(record: Mapping[str, Array], *, private: bool) -> None:
    """Check that the arrays of initial models are parameters, which training and noise may move.

    Args:
        record: as for :func:`unpack_models`.
        private: whether noise is added to updates.

    Raises:
        ValueError: one is of integers, booleans or complex numbers; or, in a private run, a running statistic.
    """
    for name, array in record.items():
        if array.dtype not in _REAL:
            raise ValueError(
                f"array '{name}' is {array.dtype}: the models of a strategy are parameters, which training and noise "
                "move, and real numbers; start with coterie.wire.trainable_arrays(network), which leaves out buffers "
                "and frozen parameters"
            )
        if private and name.rpartition(".")[2] in _STATISTICS:
            raise ValueError(
                f"array '{name}' is a statistic of normalisation, which noise would make useless: a variance may "
                "become negative; train coterie.models.without_batch_norm(network)"
            )


def pack_update(vector: npt.NDArray[np.float32], layout: Layout) -> ArrayRecord:
    """A (d,) update as the ArrayRecord of a reply."""
    return ArrayRecord({name: _pack(v) for name, v in layout.split(vector).items()})


@dataclass(frozen=True)
class Reply:
    """A valid training reply: its labels and its (d,) float32 update.

    ``below`` is a noisy share, clamped to [0, 1], of its gradients that are short, and ``records`` the number of
    training records; None if not requested.
    """

    client_id: int
    label: int
    redrawn_label: int
    update: npt.NDArray[np.float32]
    below: float | None = None
    records: int | None = None


def read_reply(
    content: RecordDict,
    *,
    client_id: int,
    round: int,
    num_clusters: int,
    layout: Layout,
    assigned: int | None = None,
    redraw: npt.NDArray[np.float64] | None = None,
    counts_norms: bool = False,
    counts_records: bool = False,
) -> Reply:
    """Validate a training reply against its request.

    Args:
        content: the reply.
        client_id: the client of the request.
        round: of the request.
        num_clusters: k.
        layout: of the update.
        assigned: cluster that the server assigned, which both labels must equal; None: the client chose.
        redraw: (k, k) matrix by which the client redraws its label; None: the labels must be equal.
        counts_norms: whether the reply has the share of gradients that are short.
        counts_records: whether it has a number of training records.

    Raises:
        ReplyError: wrong client or round, label, share or number, names, shapes or types, or NaN or Inf.
    """
    reply, update = _parts(content, client_id, round)
    labels = []
    for key in ("label", "redrawn-label"):
        label = reply.get(key)
        if type(label) is not int or not 0 <= label < num_clusters:
            raise ReplyError(f"{key} is {label!r}, expected an integer in [0, {num_clusters})")
        labels.append(label)
    label, redrawn = labels
    if assigned is not None and (label != assigned or redrawn != assigned):
        raise ReplyError(f"label is {label} and redrawn-label {redrawn}; the server assigned cluster {assigned}")
    if redraw is None and redrawn != label:
        raise ReplyError(f"redrawn-label is {redrawn}, expected {label}: the request has no redraw matrix")
    if redraw is not None and assigned is None and not redraw[label, redrawn] > 0:
        raise ReplyError(f"redrawn-label is {redrawn}, which has probability 0 for label {label} in the redraw matrix")
    if tuple(update) != layout.names:
        raise ReplyError(f"parameters are {list(update)}, expected {list(layout.names)}")
    vector = layout.flatten(
        {name: _read(name, update[name], shape) for name, shape in zip(layout.names, layout.shapes, strict=True)}
    )
    if not np.all(np.isfinite(vector)):
        raise ReplyError(f"the update contains NaN or Inf: {DIVERGED}")
    below = _share(reply.get("below")) if counts_norms else None
    records: Any = reply.get("records") if counts_records else None
    if counts_records and (type(records) is not int or not 1 <= records <= COUNT.high):
        raise ReplyError(f"records is {records!r}, expected an integer from 1 to {COUNT.high:,}")
    return Reply(client_id, label, redrawn, vector, below, records)


def _share(value: Any) -> float:
    """A noisy share of a reply, clamped to [0, 1].

    Raises:
        ReplyError: it is no finite number.
    """
    if type(value) is not float or not math.isfinite(value):
        raise ReplyError(f"below is {value!r}, expected a finite number")
    return min(max(value, 0.0), 1.0)


def pack_reply(
    update: npt.NDArray[np.float32],
    layout: Layout,
    *,
    client_id: int,
    round: int,
    label: int,
    redrawn_label: int | None = None,
    below: float | None = None,
    records: int | None = None,
) -> RecordDict:
    """The reply to a training request, which :func:`read_reply` reads.

    Args:
        update: (d,) trained model minus the received model.
        layout: of the received models.
        client_id: as in the identity of the client.
        round: of the request.
        label: cluster of the client: the assigned or the chosen one.
        redrawn_label: cluster that the update counts for, if the request has a redraw matrix; None: ``label``.
        below: noisy share of the gradients that are shorter than the plan's threshold, if the plan releases it.
        records: number of training records, if the request asks for it.
    """
    redrawn = label if redrawn_label is None else redrawn_label
    reply = ConfigRecord({"client-id": client_id, "round": round, "label": int(label), "redrawn-label": int(redrawn)})
    if below is not None:
        reply["below"] = float(below)
    if records is not None:
        reply["records"] = records
    return RecordDict({UPDATE: pack_update(update, layout), REPLY: reply})


def pack_points(points: npt.NDArray[np.float32]) -> ArrayRecord:
    """(n, *shape) points as the ArrayRecord of a reply."""
    return ArrayRecord({_POINTS: _pack(points)})


def read_points(content: RecordDict, *, client_id: int, round: int, expected: PointsSpec) -> npt.NDArray[np.float32]:
    """(n, *shape) points of a reply, validated against the request before they are unpacked.

    Raises:
        ReplyError: wrong client or round, names, shapes or types, number of points, or values that are not finite or
            out of range.
    """
    _, update = _parts(content, client_id, round)
    if tuple(update) != (_POINTS,):
        raise ReplyError(f"the arrays are {list(update)}, expected {[_POINTS]}")
    rows, *shape = update[_POINTS].shape or (0,)
    if tuple(shape) != expected.shape:
        raise ReplyError(f"the points have shape {tuple(shape)}, expected {expected.shape}")
    expected.check(rows)
    points = _read(_POINTS, update[_POINTS], (rows, *expected.shape))
    if not np.all(np.isfinite(points)):
        raise ReplyError("the points contain NaN or Inf")
    if not (points.min() >= expected.low and points.max() <= expected.high):
        raise ReplyError(
            f"the points lie in [{points.min():g}, {points.max():g}], expected [{expected.low:g}, {expected.high:g}]"
        )
    return points


def _parts(content: RecordDict, client_id: int, round: int) -> tuple[ConfigRecord, ArrayRecord]:
    """The metadata of a reply, and its arrays.

    Raises:
        ReplyError: a part is missing, or the client or round is wrong.
    """
    reply, update = content.get(REPLY), content.get(UPDATE)
    if not isinstance(reply, ConfigRecord) or not isinstance(update, ArrayRecord):
        raise ReplyError(f"expected a ConfigRecord {REPLY!r} and an ArrayRecord {UPDATE!r}")
    check_sender(content, client_id, round)
    return reply, update


def check_sender(content: RecordDict, client_id: int, round: int) -> None:
    """Check that a reply is of this client and round.

    Raises:
        ReplyError: it is not, or does not state them.
    """
    reply = content.get(REPLY)
    if not isinstance(reply, ConfigRecord):
        raise ReplyError(f"expected a ConfigRecord {REPLY!r}")
    for key, expected in (("client-id", client_id), ("round", round)):
        if type(reply.get(key)) is not int or reply[key] != expected:  # True is 1, and 1.0 as well
            raise ReplyError(f"{key} is {reply.get(key)!r}, expected {expected}")


def pack_integers(values: npt.NDArray[np.uint32]) -> ArrayRecord:
    """An (n,) masked vector as the ArrayRecord of a reply."""
    data = _header(values.shape, _UINT32) + np.asarray(values, _UINT32).tobytes()
    return ArrayRecord({_MASKED: Array("uint32", values.shape, "numpy.ndarray", data)})


def read_integers(content: RecordDict, *, client_id: int, round: int, size: int) -> npt.NDArray[np.uint32]:
    """(n,) integers modulo 2^32 of a reply; shape and type alone are checked, since any integers may be valid.

    Raises:
        ReplyError: wrong client or round, names, shape or type.
    """
    _, update = _parts(content, client_id, round)
    if tuple(update) != (_MASKED,):
        raise ReplyError(f"the arrays are {list(update)}, expected {[_MASKED]}")
    values: npt.NDArray[np.uint32] = _read(_MASKED, update[_MASKED], (size,), _UINT32).astype(np.uint32)
    return values


def _read(name: str, array: Array, shape: tuple[int, ...], descr: str = _FLOAT32) -> npt.NDArray[Any]:
    """An array of this shape and type.

    Raises:
        ReplyError: it has another shape or type, is too long, or damaged.
    """
    dtype = np.dtype(descr).name
    if array.dtype != dtype or tuple(array.shape) != shape or any(type(size) is not int for size in array.shape):
        raise ReplyError(f"{name} is {array.dtype} {tuple(array.shape)}, expected {dtype} {shape}")
    if len(array.data) > _MAX_HEADER + 4 * int(np.prod(shape)):
        raise ReplyError(f"{name} has {len(array.data)} bytes, too many for {dtype} {shape}")
    try:
        return _unpack(array, shape, descr)
    except Exception as error:  # untrusted bytes from the network
        raise ReplyError(f"{name} cannot be read: {error}") from error


@lru_cache(maxsize=256)
def _header(shape: tuple[int, ...], descr: str = _FLOAT32) -> bytes:
    """NumPy's header of an array of this shape and type; parsing it would cost more than the rest."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": descr, "fortran_order": False, "shape": shape})
    return stream.getvalue()


def _pack(values: npt.NDArray[np.float32]) -> Array:
    """``Array(values)``, faster."""
    values = np.asarray(values, dtype="<f4")
    return Array("float32", values.shape, "numpy.ndarray", _header(values.shape) + values.tobytes())


def _unpack(array: Array, shape: tuple[int, ...], descr: str = _FLOAT32) -> npt.NDArray[Any]:
    """The array of this shape and type that ``array`` holds.

    Raises:
        ValueError: it declares another shape, type or length (checked before memory is allocated), or is damaged.
    """
    header = _header(shape, descr)
    if array.stype == "numpy.ndarray" and array.data[: len(header)].replace(b"\t", b" ") == header:  # flower/sizes.py
        return np.frombuffer(array.data, descr, offset=len(header)).reshape(shape)
    stream = io.BytesIO(array.data)
    major, _ = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
    claimed, _, dtype = read(stream)
    if claimed != shape or dtype != np.dtype(descr):
        raise ValueError(f"the array is {dtype} {claimed}, expected {np.dtype(descr).name} {shape}")
    if (held := len(array.data) - stream.tell()) != (size := 4 * int(np.prod(shape))):
        raise ValueError(f"the array has {held} bytes, expected {size}")
    return array.numpy()


def payload(content: RecordDict) -> int:
    """Bytes of the arrays of a message."""
    return sum(len(array.data) for record in content.array_records.values() for array in record.values())


def update_payload(layout: Layout) -> int:
    """:func:`payload` of the reply with an update."""
    return sum(len(_header(shape)) + 4 * size for shape, size in zip(layout.shapes, layout.sizes, strict=True))


def diagnostics(content: RecordDict) -> MetricRecord:
    """The diagnostics of an evaluation reply.

    Raises:
        ReplyError: there are none, or a value is not finite.
    """
    metrics = content.get(DIAGNOSTICS)
    if not isinstance(metrics, MetricRecord):
        raise ReplyError(f"expected a MetricRecord {DIAGNOSTICS!r}")
    if not all(np.all(np.isfinite(np.asarray(value, np.float64))) for value in metrics.values()):
        raise ReplyError("a diagnostic is NaN or Inf")
    return metrics


def parse(read: Callable[..., T], content: Any, **expected: object) -> T:
    """Parse a reply with ``read``.

    Raises:
        ReplyError: the reply is invalid.
    """
    try:
        return read(content, **expected)
    except ReplyError:
        raise
    except Exception as error:  # the reply comes from the network: anything may be in it
        raise ReplyError(f"the reply cannot be parsed: {type(error).__name__}: {error}") from error
