"""Which replies are valid, stated a second time: by the contract of the messages, with NumPy and the standard library.

Nothing here calls ``coterie.wire`` or the strategies, so an error there is not repeated here. The
oracle sees the request as it was sent, the reply as it arrives, and the few constants of the run that a request does
not hold. What a reply holds beyond the contract is ignored, as long as it contributes nothing.
"""

from __future__ import annotations

import ast
import json
import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, MetricRecord, RecordDict


@dataclass(frozen=True)
class Run:
    """Constants of a run.

    Attributes:
        clients: M.
        example: shape of one record.
        upload: most bytes of the points of one client.
        exact_scores: whether evaluations are read field by field; else any finite metrics are valid.
        clips: whether updates are clipped; else one whose norm overflows is not valid.
    """

    clients: int
    example: tuple[int, ...]
    upload: int
    exact_scores: bool = True
    clips: bool = True


class InvalidError(Exception):
    """Why a reply is not valid."""


def verdict(verb: str, request: RecordDict, reply: Any, client: int, run: Run) -> tuple[str | None, Any]:
    """(why the reply is not valid, or None if it is; what it contributes)."""
    try:
        if isinstance(reply, Error):
            raise InvalidError("an error")
        if not isinstance(reply, RecordDict):
            raise InvalidError("not a RecordDict")
        return None, _JUDGES[verb](request, reply, client, run)
    except InvalidError as error:
        return str(error), None


# ---- one judge for each verb -------------------------------------------------------------------------------------


def _introduction(request: RecordDict, reply: RecordDict, client: int, run: Run) -> int:
    claimed = _record(reply, "reply", ConfigRecord).get("client-id")
    return _index(claimed, run.clients, "client-id")


def _training(request: RecordDict, reply: RecordDict, client: int, run: Run) -> Any:
    config, models = request["config"], request["models"]
    labels = _labels(config, _sent(models), _header(request, reply, client))
    shapes = {
        name.partition("/")[2]: tuple(array.shape) for name, array in models.items() if name.partition("/")[0] == "0"
    }
    update = _arrays(reply, shapes)
    limit = max_update_norm(config, client, update.size) if run.clips else 1e18
    if not float(np.sqrt(np.sum(np.square(update.astype(np.float64))))) <= limit:
        raise InvalidError(f"longer than {limit:g}")
    return (*labels, update)


def _losses(request: RecordDict, reply: RecordDict, client: int, run: Run) -> Any:
    many = _sent(request["models"])
    labels = _labels(request["config"], many, _header(request, reply, client))
    return (*labels, _arrays(reply, {"losses": (many,)}))


def _samples(request: RecordDict, reply: RecordDict, client: int, run: Run) -> Any:
    wanted = request["config"]["samples"]
    return _points(request, reply, client, run, wanted or 1, wanted or run.upload)


def _centroids(request: RecordDict, reply: RecordDict, client: int, run: Run) -> Any:
    return _points(request, reply, client, run, 1, request["config"]["local-centroids"])


def _evaluation(request: RecordDict, reply: RecordDict, client: int, run: Run) -> Any:
    scores = _finite_metrics(reply)
    if not run.exact_scores:
        return None
    config, found = request["config"], {}
    accuracy = _real(scores, "accuracy")
    if not 0 <= accuracy <= 1:
        raise InvalidError("accuracy")
    found["accuracy"] = accuracy
    models = _sent(request["models"])
    if "cluster" in config:
        if _index(scores.get("cluster"), 2**31, "cluster") != config["cluster"]:
            raise InvalidError("cluster of another model")
    else:
        _index(scores.get("cluster"), models, "cluster")
    found["cluster"] = scores["cluster"]
    found["group"] = _index(scores.get("group"), run.clients, "group")
    if "loss" in scores:
        found["loss"] = _real(scores, "loss")
    if "num-examples" in scores and not 1 <= _index(scores["num-examples"], 10**9 + 1, "num-examples"):
        raise InvalidError("num-examples")
    return found


def _labelling(request: RecordDict, reply: RecordDict, client: int, run: Run) -> Any:
    _header(request, reply, client)
    if "diagnostics" not in reply:
        return None
    scores, clusters = _finite_metrics(reply), request["config"]["labels"]
    classes = _index(scores.get("classes"), 10_001, "classes")
    counts = scores.get("confusion")
    if not isinstance(counts, list) or classes < 1 or len(counts) != clusters * classes:
        raise InvalidError("confusion")
    for count in counts:
        _index(count, 2**40, "confusion")
    return {"classes": classes, "confusion": tuple(counts)}


_JUDGES = {
    "query.identity": _introduction,
    "train": _training,
    "query.losses": _losses,
    "train.gan": _samples,
    "train.centroids": _centroids,
    "evaluate": _evaluation,
    "query.label": _labelling,
}


# ---- parts of a reply --------------------------------------------------------------------------------------------


def _record(reply: RecordDict, name: str, kind: type) -> Any:
    record = reply.get(name)
    if type(record) is not kind:
        raise InvalidError(f"{name} is no {kind.__name__}")
    return record


def _index(value: Any, bound: int, name: str) -> int:
    if type(value) is not int or not 0 <= value < bound:
        raise InvalidError(f"{name} is {value!r:.60}")
    return value


def _real(scores: Any, name: str) -> float:
    if type(scores.get(name)) not in (int, float):
        raise InvalidError(name)
    return float(scores[name])


def _header(request: RecordDict, reply: RecordDict, client: int) -> Any:
    header = _record(reply, "reply", ConfigRecord)
    for name, value in (("client-id", client), ("round", request["config"]["round"])):
        if type(header.get(name)) is not int or header[name] != value:
            raise InvalidError(name)
    return header


def _sent(models: ArrayRecord) -> int:
    """How many models the request holds; one without parameters has no key."""
    return len({key.partition("/")[0] for key in models}) or 1


def _labels(config: Any, models: int, header: Any) -> tuple[int, int]:
    """Both labels, as the request allows them."""
    if "cluster" in config:
        for name in ("label", "redrawn-label"):
            if _index(header.get(name), 2**31, name) != config["cluster"]:
                raise InvalidError(f"{name} of another cluster")
        return config["cluster"], config["cluster"]
    label, redrawn = (_index(header.get(name), models, name) for name in ("label", "redrawn-label"))
    if "redraw" in config:
        if not config["redraw"][label * models + redrawn] > 0:
            raise InvalidError("an impossible redrawn label")
    elif label != redrawn:
        raise InvalidError("a redrawn label without a redraw matrix")
    return label, redrawn


def _arrays(reply: RecordDict, shapes: dict[str, tuple[int, ...]]) -> np.ndarray:
    """(d,) of arrays with these names and shapes, in this order."""
    update = _record(reply, "update", ArrayRecord)
    if list(update) != list(shapes):
        raise InvalidError("names of arrays")
    parts = [_values(update[name], shape).ravel() for name, shape in shapes.items()]
    return np.concatenate([np.zeros(0, np.float32), *parts])


def _values(array: Array, shape: tuple[int, ...]) -> np.ndarray:
    """The numbers of an array of float32, read byte by byte: NumPy's format, and nothing after it."""
    if array.stype != "numpy.ndarray" or array.dtype != "float32":
        raise InvalidError("type of an array")
    if type(array.shape) not in (tuple, list) or list(array.shape) != list(shape):
        raise InvalidError("shape of an array")
    if any(type(size) is not int for size in array.shape):
        raise InvalidError("shape of an array")
    data = array.data
    if (
        len(data) > 1024 + 4 * math.prod(shape)
        or data[:6] != b"\x93NUMPY"
        or data[6:8] not in (b"\1\0", b"\2\0", b"\3\0")
    ):
        raise InvalidError("bytes of an array")
    size, form = (2, "<H") if data[6] == 1 else (4, "<I")
    try:
        (length,) = struct.unpack(form, data[8 : 8 + size])
        text = data[8 + size : 8 + size + length].decode("utf8" if data[6] == 3 else "latin1")
        head = ast.literal_eval(text.strip(" \n"))
        described = head["descr"], tuple(head["shape"]), head["fortran_order"], len(head)
    except Exception:
        raise InvalidError("header of an array") from None
    body = data[8 + size + length :]
    if described[:2] != ("<f4", tuple(shape)) or type(described[2]) is not bool or described[3] != 3:
        raise InvalidError("header of an array")
    if any(type(size) is not int for size in described[1]) or len(body) != 4 * math.prod(shape):
        raise InvalidError("length of an array")
    values = np.frombuffer(body, "<f4").reshape(shape, order="F" if described[2] else "C")
    if not np.isfinite(values).all():
        raise InvalidError("not finite")
    return values


def max_update_norm(config: Any, client: int, size: int) -> float:
    """Length that an honest update at record level never has: clipped gradients of all batches, and their noise."""
    if "record-plans" not in config:
        return math.inf
    plans = json.loads(config["record-plans"])
    plan, first = plans[client % len(plans)], bool(config.get("first-batch"))
    batch = (plan["first_batch_size"] if first else None) or plan["batch_size"]
    noise = (plan["first_noise_multiplier"] if first else None) or plan["noise_multiplier"]
    steps = plan["local_epochs"] * (plan["num_examples"] // batch)
    gradients = steps * batch + 6.5 * math.sqrt(steps * batch) + 14
    noise = noise * math.sqrt(steps) * (math.sqrt(size) + 6.5)
    return float(config["lr"] * plan["clip_norm"] / batch * (gradients + noise))


def _points(request: RecordDict, reply: RecordDict, client: int, run: Run, least: int, most: int) -> np.ndarray:
    _header(request, reply, client)
    update = _record(reply, "update", ArrayRecord)
    if list(update) != ["points"]:
        raise InvalidError("names of arrays")
    shape = update["points"].shape
    if type(shape) not in (tuple, list) or not shape or list(shape[1:]) != list(run.example):
        raise InvalidError("shape of points")
    rows = _index(shape[0], run.upload // (4 * math.prod(run.example)) + 1, "number of points")
    if not least <= rows <= most:
        raise InvalidError("number of points")
    points = _values(update["points"], (rows, *run.example))
    if not (np.abs(points) <= 1).all():
        raise InvalidError("points out of range")
    return points


def _finite_metrics(reply: RecordDict) -> Any:
    scores = _record(reply, "diagnostics", MetricRecord)
    for value in scores.values():
        for number in value if isinstance(value, list) else [value]:
            if type(number) not in (int, float) or not math.isfinite(number):
                raise InvalidError("a metric is not finite")
    return scores
