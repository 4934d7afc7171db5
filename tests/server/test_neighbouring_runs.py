"""Whole runs in two neighbouring worlds, with the same noise: only what the ledger charges differs.

Neighbours differ in all data of client 0, which replies or not, at client level; and in one record of it at record
level. All that a run leaves is compared: every entry of every file of its folder, the result, and the log. Samples of a
GAN and labels of records, whose training takes minutes: tests/client/test_neighbouring_worlds.py.
"""

import json
import logging
import re

import numpy as np
import pytest
from kit.run_folders import execute
from kit.two_worlds import Randomness, differing
from safetensors import safe_open

from coterie.datasets import own_shard

CLIENTS, RECORDS = 12, 30
COMMON = {"dataset": "own", "input-shape": "1x4x4", "num-classes": 2, "model": "linear", "device": "cpu", "rounds": 3}
COMMON |= {"clients": CLIENTS, "epsilon": 20.0, "batch-size": 10, "local-epochs": 1}
PRIVATE = {"evaluate": "private", "evaluate-every": 2, "score-share": 0.2, "evaluate-noise": 0.3}
TWO = {"clusters": 2, "sampling-rate": 0.5, **PRIVATE}
ALONE = {"privacy-unit": "record", "samples-per-client": RECORDS, "evaluate": "off"}
CLIENT_LEVEL = {
    "joint": {"strategy": "ifca", **TWO},
    "joint, own models": {"strategy": "fedavg", "clusters": 1, **PRIVATE, "personalize": "prior"},
    "joint, adaptive clipping": {"strategy": "fedavg", "clusters": 1, **PRIVATE, "clip-norm": "adaptive"},
    "joint, shared block": {"strategy": "fedcam", **TWO},
    "banded": {"strategy": "ifca", "mechanism": "banded", **TWO},
    "rr-slot": {"strategy": "rr-cluster", "mechanism": "rr-slot", **TWO},
    "secure": {"strategy": "ifca", "mechanism": "secure", **TWO, "sampling-rate": 1.0},
}
RECORD_LEVEL = {
    "histogram": {"strategy": "fedavg", "clusters": 1, **ALONE, "evaluate": "private", "score-share": 0.5},
    "losses": {"strategy": "lcfl", "clusters": 2, **ALONE},
    "selection": {"strategy": "rc-dpfl", "clusters": 2, **ALONE},
}
#: Entries that the ledger charges, and what follows from them; the rest is the same in all worlds.
LINE = r"(metrics.jsonl:\d+|checkpoint/state.safetensors.about.line)"
CHARGED = (
    "models/",
    r"checkpoint/state.safetensors.(?!about)",
    rf"{LINE}.(accuracy|score_histogram|histogram|below|clip_norm)$",
    r"(result.json|outcome).(accuracy|clip_norm|estimates)",
)
#: What clustering of models, losses or samples states, all of which follow from charged replies.
OF_METHODS = ("evidence/", f"{LINE}.notes", "(result.json|outcome).notes")
#: Clocks, and what is a function of the time or of all bytes.
CLOCKS = re.compile(r".*(\.time|\.uptime|\.elapsed|\.chain|seconds\w*|peak_rss_mb|SHA256SUMS|about\.digest)$")


def write(folder, change):
    """The data of all clients; those of client 0 are changed."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for client in range(CLIENTS):
        sign = 1 if client % 2 else -1
        y, y_test = rng.integers(0, 2, RECORDS), rng.integers(0, 2, 9)
        x, x_test = (
            rng.normal(0.5, 0.1, (len(of), 1, 4, 4)) + sign * of[:, None, None, None] / 5 for of in (y, y_test)
        )
        if client == 0 and change == "other data":
            x, y, x_test, y_test = 1 - x[:20], 1 - y[:20], 1 - x_test[:5], 1 - y_test[:5]
        if client == 0 and change == "no reply":
            x, y = x[:0], y[:0]
        if client == 0 and change == "a record less":
            x, y = x[:-1], y[:-1]
        if client == 0 and change == "a held-out record less":
            x_test, y_test = x_test[:-1], y_test[:-1]
        arrays = {"x": x, "x_test": x_test}
        arrays = {name: values.clip(0, 1).astype(np.float32) for name, values in arrays.items()}
        np.savez(folder / f"client-{client}.npz", **arrays, y=y, y_test=y_test)
    return folder


def entries(value, name):
    """Every number and text of a JSON document, by path."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from entries(item, f"{name}.{key}")
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        for number, item in enumerate(value):
            yield from entries(item, f"{name}[{number}]")
    else:
        yield name, value


def outputs(path, settings, change, caplog, randomness):
    """All that a run leaves, but for clocks."""
    own_shard.cache_clear()
    caplog.clear()
    data = write(path / "data", change)
    randomness.restart()
    with caplog.at_level(logging.INFO):
        outcome = execute(path / "run", {**COMMON, **settings, "data-dir": str(data)})
    left = dict(entries(outcome, "outcome"))
    for file in sorted(file for file in (path / "run").rglob("*") if file.is_file()):
        name, content = str(file.relative_to(path / "run")), file.read_bytes().replace(str(path).encode(), b"")
        if file.suffix == ".json":
            left |= entries(json.loads(content), name)
        elif file.suffix == ".jsonl":
            for number, line in enumerate(content.splitlines()):
                left |= entries(json.loads(line), f"{name}:{number}")
        elif file.suffix == ".safetensors":
            with safe_open(file, "np") as tensors:
                left |= {f"{name}.{key}": tensors.get_tensor(key) for key in tensors.keys()}  # noqa: SIM118
                for text in (tensors.metadata() or {}).values():
                    left |= entries(json.loads(text), f"{name}.about")
        else:
            left[name] = content
    left["outcome.out"] = None  # the path of the folder
    lines = [(record.levelname, record.getMessage().replace(str(path), "")) for record in caplog.records]
    left["log"] = [line for line in lines if "seconds" not in line[1]]
    return {name: value for name, value in left.items() if not CLOCKS.match(name)}


def check(worlds, charged):
    (_, base), (name, other) = worlds.items()
    pattern = re.compile("|".join(f"({prefix})" for prefix in charged))
    moved = differing(base, other)
    assert {key: (base.get(key), other.get(key)) for key in moved if not pattern.match(key)} == {}, name
    return moved


@pytest.fixture
def randomness(monkeypatch):
    return Randomness(monkeypatch)


@pytest.mark.parametrize("name", CLIENT_LEVEL)
def test_a_client_changes_nothing_but_what_is_charged(tmp_path, caplog, randomness, name):
    def left(change):
        (tmp_path / change).mkdir()
        return outputs(tmp_path / change, CLIENT_LEVEL[name], change, caplog, randomness)

    base, other, missing = left("nothing"), left("other data"), left("no reply")
    moved = check({"nothing": base, "other data": other}, CHARGED)
    assert any(re.match(r"metrics.jsonl:\d+.accuracy|metrics.jsonl:\d+.score_histogram", key) for key in moved)
    assert any(key.startswith("models/") for key in moved)
    # The simulated client's own log says why it does not reply, and the operator's how many replies were dropped.
    own = re.compile("client 0 (failed|is left out)|[0-9]+ replies were dropped")
    missing["log"] = [line for line in missing["log"] if not own.match(line[1])]
    # Who replies is public under `secure`, and sets how much noise is in the sum.
    public = (r"metrics.jsonl:\d+.score_noise",) if name == "secure" else ()
    check({"nothing": base, "no reply": missing}, (*CHARGED, *public))


@pytest.mark.parametrize("name", RECORD_LEVEL)
def test_a_record_changes_nothing_but_what_is_charged(tmp_path, caplog, randomness, name):
    def left(change):
        (tmp_path / change).mkdir()
        return outputs(tmp_path / change, RECORD_LEVEL[name], change, caplog, randomness)

    base = left("nothing")
    moved = check({"nothing": base, "a record less": left("a record less")}, (*CHARGED, *OF_METHODS))
    assert any(key.startswith("models/") for key in moved)
    moved = check({"nothing": base, "a held-out record less": left("a held-out record less")}, CHARGED)
    assert not any(key.startswith("models/") for key in moved)
    assert bool(moved) == (name == "histogram")
