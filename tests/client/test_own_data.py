"""Clients with data of their own: a deployed one reads, imports and says nothing that a server chose; records stay."""

import os
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from flwr.common.serde import message_to_proto
from kit.deployed import OWN, reply_of, request_of
from safetensors.torch import save_file

from coterie.client import cohort, handlers
from coterie.client.answer import handle
from coterie.client.cohort import Cohort
from coterie.client.handlers import HANDLERS
from coterie.client.identity import Client
from coterie.client.state import ClientError
from coterie.datasets import OwnFederation, own_shard
from coterie.engine.in_process import LocalGrid
from coterie.fields.plugins import sources
from coterie.models import file_hash, initialise
from coterie.server import RunConfig, RunFolder, run
from coterie.wire import ClientConfig, TrainRequest
from coterie.wire.messages import Layout, pack_update, read_reply
from coterie.wire.requests import parse_plans

PACKAGE = str(Path(cohort.__file__).parents[1])
SHAPE = (1, 4, 4)
#: Of a data set that is split, in place of clients' own.
SPLIT = {"input-shape": "", "num-classes": "auto", "groups": "1", "shift": "none"}
SETTINGS = {**OWN, "clients": 3, "clusters": 2, "privacy-unit": "none", "sampling-rate": 1, "rounds": 2, "seed": 3}


def write(path, seed, n=30, pixels=np.uint8):
    x = np.random.default_rng(seed).integers(0, 256, (n, *SHAPE)).astype(pixels)
    np.savez(path, x=x if pixels == np.uint8 else x / np.float32(255.0), y=np.arange(n) % 2)
    return str(path)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "data").mkdir()
    for i in range(3):
        write(tmp_path / "data" / f"client-{i}.npz", i)
    return tmp_path / "data"


def question(**settings):
    return request_of(RunConfig({**SETTINGS, **settings}))


def ask(content, message_type="train", **node):
    return reply_of(node, content, message_type)


def update(answer, layout):
    return read_reply(answer, client_id=0, round=1, num_clusters=1, layout=layout).update


_watchers = []  # an audit hook stays for good
sys.addaudithook(lambda event, words: [see(words[0]) for see in _watchers] if event in ("open", "os.listdir") else None)


@pytest.fixture
def touched(monkeypatch):
    """Every path that is opened, listed or asked after."""
    stat, seen = os.stat, []

    def watched(path, *arguments, **options):
        seen.append(str(path))
        return stat(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", watched)
    _watchers.append(lambda path: seen.append(str(path)))
    yield seen
    _watchers.clear()


def test_a_deployed_client_trains_on_its_own_file_and_opens_nothing_that_a_message_names(folder, tmp_path, touched):
    content, layout = question(**{"data-dir": str(folder)})
    own = write(tmp_path / "mine.npz", 9)
    found = update(ask(content, data=own), layout)
    assert own in touched
    assert not [path for path in touched if path.startswith(str(folder))]
    write(folder / "client-0.npz", 9)  # the same records where a simulated client finds them
    (simulated,) = handle("train", content, [Client(0)])
    np.testing.assert_array_equal(update(simulated, layout), found)
    assert [path for path in touched if path.startswith(str(folder))]  # what this test looks at can be seen
    write(folder / "client-1.npz", 8)
    (other,) = handle("train", content, [Client(1)])
    assert not np.array_equal(read_reply(other, client_id=1, round=1, num_clusters=1, layout=layout).update, found)


def test_a_message_is_parsed_once(folder, monkeypatch):
    (content, layout), parsed, parse = question(), [], cohort.read_request
    monkeypatch.setattr(cohort, "read_request", lambda *given, **more: parsed.append(given) or parse(*given, **more))
    assert update(ask(content, data=str(folder / "client-0.npz")), layout).any()
    assert len(parsed) == 1


def test_a_message_passes_few_functions_on_its_way(folder):
    """Functions of the package that take the message or its content, until both are a request and models."""
    (content, _), passed, data = question(), set(), str(folder / "client-0.npz")

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            given = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount]]
            if any(each is content or getattr(each, "content", None) is content for each in given if each is not None):
                passed.add(code.co_qualname)

    sys.setprofile(note)
    try:
        ask(content, data=data)
    finally:
        sys.setprofile(None)
    assert {"_handle", "read_request"} < passed
    assert len(passed) <= 20


def test_own_data_stand_in_for_those_of_any_data_set(tmp_path):
    """Of its shape and classes, without its files or its groups."""
    x = np.random.default_rng(0).integers(0, 256, (20, 28, 28), np.uint8)
    np.savez(tmp_path / "mine.npz", x=x, y=np.arange(20) % 10)
    content, layout = question(**SPLIT, dataset="mnist", **{"data-dir": "/nowhere"})
    assert np.any(update(ask(content, data=str(tmp_path / "mine.npz")), layout))


def test_without_data_of_its_own_a_client_uses_its_own_environment(folder, monkeypatch, caplog):
    monkeypatch.delenv("COTERIE_DATA", raising=False)
    with pytest.raises(
        ClientError, match="the run uses the clients' own data, but no data are configured; set data in the node"
    ):
        ask(question(**{"data-dir": str(folder)})[0])
    embedded, layout = question(**SPLIT, dataset="digits")
    assert np.any(update(ask(embedded), layout))
    mnist, _ = question(**SPLIT, dataset="mnist", **{"data-dir": str(folder)})
    for own in (None, "/of/its/own"):
        if own:
            monkeypatch.setenv("COTERIE_DATA", own)
        with pytest.raises(ClientError, match="client 0 failed; see its own log for details"):
            ask(mnist)
        assert str(folder) not in caplog.text
        assert "COTERIE_DATA=DIR" in caplog.text
    assert "/of/its/own" in caplog.text


def test_a_server_chooses_no_code_to_import():
    content, layout = question(**SPLIT, dataset="kit.toys:pixels")
    with pytest.raises(
        ClientError, match=r"client 0 rejects the request: dataset = 'kit.toys:pixels' names code chosen by the server"
    ):
        ask(content)
    with pytest.raises(ClientError, match=r"dataset = 'kit.toys:pixels' names code"):
        ask(content, code="kit.toys:blobs kit.toys:pixel")
    assert np.any(update(ask(content, code="kit.toys:blobs kit.toys:pixels"), layout))
    for key in ("model", "features", "optimizer", "loss", "trainer"):
        for code in ("no_such_module:make", "an-entry-point"):
            wrong, _ = question(**SPLIT, dataset="kit.toys:pixels")
            wrong["config"][key] = code
            with pytest.raises(ClientError, match=f"{key} = '{code}' names code"):
                ask(wrong, code="kit.toys:pixels kit.toys:chain")
    allowed, _ = question(**SPLIT, dataset="kit.toys:pixels", features="plugged:flip")
    assert np.any(update(ask(allowed, code="kit.toys:pixels plugged:flip"), layout))


def test_a_client_takes_public_parameters_from_its_own_file_alone(folder, tmp_path, caplog):
    data, files = str(folder / "client-0.npz"), [tmp_path / f"{name}.safetensors" for name in ("run", "site", "other")]
    torch.manual_seed(0)
    for file, bias in zip(files, (0.0, 0.0, 1.0), strict=True):
        save_file({"output.bias": torch.full((2,), bias)}, file)
    content, layout = question(pretrained=str(files[0]))
    content["config"]["pretrained-sha256"] = file_hash(files[0])
    with pytest.raises(ClientError, match=r"a file with SHA-256 [0-9a-f]{64}: name it under pretrained in the node"):
        ask(content, data=data)
    for wrong in (files[2], tmp_path / "absent"):
        with pytest.raises(ClientError, match=r"and pretrained of the node configuration names another file$"):
            ask(content, data=data, pretrained=str(wrong))
    assert "absent cannot be read" in caplog.text
    files[0].unlink()
    assert np.any(update(ask(content, data=data, pretrained=str(files[1])), layout))
    content["config"]["pretrained-sha256"] = "\n" * 64
    with pytest.raises(ClientError, match="names another file") as refused:
        ask(content, data=data, pretrained=str(files[1]))
    assert "\n" not in str(refused.value)


PLUGIN = """
class Loop:
    def __init__(self, network):
        pass

    def train(self, arrays, x, y, settings, rng):
        raise ValueError(f"pixel {x.max()}")
"""


def test_a_client_compares_the_code_of_its_training_with_the_servers(folder, tmp_path, monkeypatch, caplog):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "loop_of_a_site.py").write_text(PLUGIN)
    (tmp_path / "loop_of_others.py").write_text(f"open('{tmp_path}/imported', 'w')\n")
    data, name = str(folder / "client-0.npz"), "loop_of_a_site:Loop"
    content, _ = question(trainer=name)
    content["config"]["sources"] = "trainer=0000"
    with pytest.raises(ClientError, match="the file of trainer differs here from that at the server; use the server's"):
        ask(content, data=data, code=name)
    content["config"]["sources"] = sources({"trainer": name})
    with pytest.raises(ClientError, match=r"^client 0 failed; see its own log for details$"):
        ask(content, data=data, code=name)
    assert "trainer 'loop_of_a_site:Loop' fails: ValueError: pixel" in caplog.text
    content["config"]["trainer"] = "loop_of_others:Loop"
    with pytest.raises(ClientError, match="names code chosen by the server"):
        ask(content, data=data, code=name)
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize("verb", HANDLERS)
def test_every_verb_is_guarded(verb, monkeypatch):
    content, _ = question()
    of_verbs = {"gan": "gan-pendigits", "labels": 2, "samples": 1, "average": 0.0}
    of_verbs |= {"feature-range": 1.0, "local": "k-means", "local-centroids": 1}
    of_verbs |= {"encoder": "none", "release-counts": False, "compared": 1}
    content["config"] = ConfigRecord({**content["config"], **of_verbs})
    with pytest.raises(ClientError, match="no data are configured; set data"):
        ask(content, verb)


def test_what_is_wrong_with_its_data_stays_with_the_client(tmp_path, caplog):
    """Flower sends the server what an exception says."""
    path = tmp_path / "mine.npz"
    np.savez(path, x=np.full((3, *SHAPE), 7.25), y=[0, 1, 0])
    content, layout = question()
    assert np.any(update(ask(content, data=str(path)), layout))  # pixels are clamped
    assert "3 records clamped (2 of class 0, 1 of class 1); the first problem is: " in caplog.text
    assert "mine.npz: x, y: a pixel is 7.25" in caplog.text
    path.write_text("no archive")
    own_shard.cache_clear()
    with pytest.raises(ClientError) as refusal:
        ask(content, data=str(path))
    assert str(refusal.value) == "client 0 failed; see its own log for details"
    assert refusal.value.__cause__ is None
    assert "mine.npz is not a numpy archive" in caplog.text
    with pytest.raises(ClientError, match="the node configuration has errors; see the client's own log"):
        ask(question()[0], data="mine.npz")
    assert "data must be an absolute path" in caplog.text


def test_own_records_are_not_cut_in_a_simulation_either(folder):
    """One that is removed would make room for another."""
    settings = {**SETTINGS, "strategy": "fedavg", "clusters": 1, "privacy-unit": "record", "samples-per-client": 5}
    config = RunConfig({**settings, "data-dir": str(folder), "batch-size": 5, "delta": 1e-3})
    request = TrainRequest(record_plans=config.plan.record_plans)
    plans, client = parse_plans(request.record_plans), Client(0)
    own = Cohort(ClientConfig.from_record(config.for_clients()), request, plans, None, None, [client], None)
    assert isinstance(own.federation, OwnFederation)
    assert len(own.shard(client).y) > own.plan(0).num_examples == 5


# ---- a client's data never leave it ----------------------------------------------------------------------------------


class Tapped(LocalGrid):
    """Keeps the bytes of every message, both ways, as Flower puts them on the wire."""

    def __init__(self, clients):
        super().__init__(clients)
        self.wire = []

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        replies = list(super().send_and_receive(messages, timeout=timeout))
        self.wire += [message_to_proto(message).SerializeToString() for message in [*messages, *replies]]
        return replies


def traces(folder):
    """Bytes by which half a record of anybody's would be known, as it is in the file, scaled, or centred."""
    found = set()
    for i in range(3):
        with np.load(folder / f"client-{i}.npz") as archive:
            x = archive["x"].reshape(len(archive["y"]), -1)
        scaled = x.astype(np.float32) / (255 if x.dtype == np.uint8 else 1)
        forms = [x, np.round(scaled * 255).astype(np.uint8), scaled, 2 * scaled - 1]
        forms += [form.astype(kind) for form in (x, scaled, 2 * scaled - 1) for kind in (np.float32, np.float64)]
        halves = [half for form in forms for half in np.split(form, 2, axis=1)]
        found |= {record.tobytes() for half in halves for record in half}
    return found


def leaks(folder, grid):
    return [trace for trace in traces(folder) if any(trace in message for message in grid.wire)]


def train(folder, path, **settings):
    grid = Tapped(3)
    config = RunConfig({**SETTINGS, "data-dir": str(folder), "batch-size": 1, "evaluate-every": 1, **settings})
    with closing(RunFolder.create(path, config)) as opened:
        result = run(opened, grid)
    return grid, result


@pytest.mark.parametrize("strategy", ["ifca", "fedcam", "fesem", "lcfl", "fedper", "cfl"])
@pytest.mark.parametrize("pixels", [np.uint8, np.float32])
def test_no_record_is_in_any_message(tmp_path, folder, strategy, pixels):
    for i in range(3):
        write(folder / f"client-{i}.npz", i, pixels=pixels)
    changes = {"fedper": {"clusters": 1, "model": "mlp-32"}, "cfl": {"clusters": 0}}.get(strategy, {})
    grid, result = train(folder, tmp_path / "run", strategy=strategy, **changes)
    assert result["rounds"] == 2
    assert len(grid.wire) >= 2 * 2 * 3
    assert sum(map(len, grid.wire)) > 2 * 2 * 3 * 4 * 34  # models travelled
    assert leaks(folder, grid) == []


@pytest.mark.parametrize(
    "planted",
    [
        lambda shard: {"more": ArrayRecord([shard.x[0]])},
        lambda shard: {"more": ConfigRecord({"bytes": np.round((shard.x[0] + 1) * 127.5).astype(np.uint8).tobytes()})},
        lambda shard: {"more": ArrayRecord([shard.x.reshape(-1)[8:24].astype(np.float64)])},  # two halves
        lambda shard: {"update": pack_update(np.resize(shard.x[1], 34), Layout.of(initialise("linear", SHAPE, 2, 0)))},
    ],
    ids=["array", "bytes", "halves", "model"],
)
def test_a_leak_would_be_found(tmp_path, folder, monkeypatch, planted):
    honest = handlers._reply

    def leaky(cohort, *rest):
        return RecordDict({**honest(cohort, *rest), **planted(cohort.shards[0])})

    monkeypatch.setattr(handlers, "_reply", leaky)
    grid, _ = train(folder, tmp_path / "run", strategy="fedavg", clusters=1)
    assert leaks(folder, grid)
