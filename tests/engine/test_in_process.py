"""The local engine answers as the ClientApp does, in process and in workers, and survives a client's failure."""

import logging
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from kit.tables import for_rows

from coterie.client.app import app
from coterie.client.handlers import HANDLERS
from coterie.client.state import KeptStates, write_states
from coterie.engine.in_process import LocalGrid
from coterie.engine.workers import Workers, workers_for
from coterie.logs import ignore_progress, report_progress
from coterie.models import build_gan, initialise
from coterie.server import RunConfig
from coterie.wire import RequestError
from coterie.wire.messages import Layout, PointsSpec, losses_layout, pack_models, read_points, read_reply


def question(model="mlp-32", **settings):
    config = RunConfig({"clients": 12, "seed": 5, "local-epochs": 1, "model": model, **settings})
    drawn = initialise(model, (1, 8, 8), 10, 0)
    layout = Layout.of(drawn)
    record = ConfigRecord({**config.for_clients(), "round": 1})
    return RecordDict({"models": pack_models(layout.flatten(drawn)[None], layout), "config": record}), layout


def ask(grid, content, verb="train", nodes=range(1, 13)):
    return list(grid.send_and_receive([Message(content, dst_node_id=n, message_type=verb) for n in nodes]))


def updates(replies, layout):
    return np.stack(
        [
            read_reply(r.content, client_id=i, round=1, num_clusters=1, layout=layout).update
            for i, r in enumerate(replies)
        ]
    )


def by_grid_and_client_app(content, verb, layout):
    """Updates of all clients by the local engine, and by the ClientApp."""
    grid = LocalGrid(12)  # which gives messages their sender
    messages = [Message(content, dst_node_id=n, message_type=verb) for n in range(1, 13)]
    local = updates(grid.send_and_receive(messages), layout)
    nodes = [Context(1, 1, {"partition-id": client}, RecordDict(), {}) for client in range(12)]
    return local, updates(map(app, messages, nodes), layout)


def test_the_client_app_gives_the_same_answers():
    content, layout = question()
    local, flower = by_grid_and_client_app(content, "train", layout)
    np.testing.assert_allclose(flower, local, atol=1e-6)


def test_the_client_app_tells_the_same_losses():
    content, layout = question()
    drawn = [layout.flatten(initialise("mlp-32", (1, 8, 8), 10, seed)) for seed in range(3)]
    content["models"] = pack_models(np.stack(drawn), layout)
    content["config"]["compared"] = 3
    local, flower = by_grid_and_client_app(content, "query.losses", losses_layout(3))
    np.testing.assert_allclose(flower, local, rtol=1e-5)
    assert len(np.unique(local)) == 36
    assert 2 < local.min() < local.max() < 3  # networks that nobody trained: about log 10


def test_workers_give_the_same_answers_in_order():
    content, layout = question("cnn-tiny")
    with closing(LocalGrid(12, workers=2)) as grid:
        replies = ask(grid, content)
    assert [r.metadata.src_node_id for r in replies] == list(range(1, 13))
    np.testing.assert_allclose(updates(replies, layout), updates(ask(LocalGrid(12), content), layout), atol=1e-6)


@for_rows("sampled", [False, True])
def test_workers_evaluate_as_this_process_does(sampled):
    content, layout = question("cnn-tiny")
    drawn = [layout.flatten(initialise("cnn-tiny", (1, 8, 8), 10, seed)) for seed in range(3)]
    content["models"] = pack_models(np.stack(drawn), layout)
    content["config"]["sampled"] = sampled
    with closing(LocalGrid(12, workers=2)) as there:
        replies = [ask(grid, content, "evaluate") for grid in (LocalGrid(12), there)]
    expected, found = ([dict(reply.content["diagnostics"]) for reply in each] for each in replies)
    assert [report["client-id"] for report in found] == list(range(12))
    assert len({report["cluster"] for report in found}) > 1
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-6)


def test_replies_name_the_message_that_they_answer():
    content, _ = question()
    messages = [Message(content, dst_node_id=n, message_type="query.identity") for n in (3, 9)]
    replies = list(LocalGrid(12).send_and_receive(messages))
    assert [r.metadata.reply_to_message_id for r in replies] == [m.metadata.message_id for m in messages]
    assert [r.content["reply"]["client-id"] for r in replies] == [2, 8]


def own_data(folder, faults, model="mlp-32", clients=6):
    """A question to clients with data of their own; ``faults`` maps a client to what its file holds instead."""
    for client in range(clients):
        file, rng = folder / f"client-{client}.npz", np.random.default_rng(client)
        np.savez(file, x=rng.standard_normal((10, 2)).astype(np.float32), y=np.arange(10) % 2)
        if client in faults:
            file.write_bytes(faults[client]) if isinstance(faults[client], bytes) else np.savez(file, **faults[client])
    settings = {"dataset": "own", "input-shape": "2", "num-classes": 2, "clients": clients, "data-dir": str(folder)}
    config = RunConfig({"clusters": 1, "seed": 5, "local-epochs": 1, "model": model, **settings})
    drawn = initialise(model, (2,), 2, 0)
    layout = Layout.of(drawn)
    record = ConfigRecord({**config.for_clients(), "round": 1})
    return RecordDict({"models": pack_models(layout.flatten(drawn)[None], layout), "config": record}), layout


@pytest.mark.parametrize("workers", [0, 2])
def test_data_that_cannot_be_loaded_fail_their_client_alone(workers, tmp_path):
    (tmp_path / "whole").mkdir()
    whole, layout = own_data(tmp_path / "whole", {})
    damaged, _ = own_data(tmp_path, {2: b"no archive", 4: {"x": np.zeros((10, 3)), "y": np.zeros(10, int)}})
    expected = updates(ask(LocalGrid(6), whole, nodes=range(1, 7)), layout)
    with closing(LocalGrid(6, workers)) as grid:
        replies = ask(grid, damaged, nodes=range(1, 7))
    replies.sort(key=lambda reply: int(reply.metadata.reply_to_message_id))
    assert [r.has_error() for r in replies] == [False, False, True, False, True, False]
    assert "client-2.npz" in replies[2].error.reason
    assert "client-4.npz" in replies[4].error.reason
    for i in (0, 1, 3, 5):
        reply = read_reply(replies[i].content, client_id=i, round=1, num_clusters=1, layout=layout)
        np.testing.assert_allclose(reply.update, expected[i], atol=1e-6)


@pytest.mark.slow
def test_a_worker_that_dies_takes_no_other_client_with_it(tmp_path):
    deadly = {"x": np.full((10, 2), -9.0, np.float32), "y": np.arange(10) % 2}
    content, _ = own_data(tmp_path, {1: deadly}, model="kit.toys:deadly")
    with closing(LocalGrid(6, workers=2)) as grid:
        for _ in range(2):  # the engine answers further rounds too
            replies = ask(grid, content, nodes=range(1, 7))
            replies.sort(key=lambda reply: int(reply.metadata.reply_to_message_id))
            assert [r.metadata.src_node_id for r in replies if r.has_content()] == [1, 3, 4, 5, 6]
            assert "BrokenProcessPool" in replies[1].error.reason


KILLED = """
import os, signal
from coterie.engine.workers import Workers
from coterie.logs import ignore_progress
if __name__ == "__main__":
    workers = Workers(2, ignore_progress)
    print(*workers._pool._processes, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_workers_end_with_their_process():
    command, quiet = [sys.executable, "-c", KILLED], subprocess.DEVNULL
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=quiet, text=True) as killed:
        processes = [int(word) for word in killed.stdout.readline().split()]
    assert (len(processes), killed.returncode) == (2, -signal.SIGKILL)
    deadline = time.monotonic() + 60
    while any(alive(process) for process in processes):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def alive(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def draw(_, folder):
    """Draw in each of two workers: neither returns before both have started."""
    (folder / str(os.getpid())).touch()
    while len(list(folder.iterdir())) < 2:
        time.sleep(0.01)
    return random.random(), np.random.random(), torch.rand(()).item()


@pytest.mark.timeout(60)
def test_workers_do_not_share_random_generators(tmp_path):
    with closing(Workers(2, ignore_progress)) as workers:
        one, other = [workers.submit(draw, RecordDict(), tmp_path) for _ in range(2)]
        equal = [a == b for a, b in zip(workers.result(one), workers.result(other), strict=True)]
    assert equal == [False, False, False]


def sleep(_, started):
    started.touch()
    time.sleep(600)


@pytest.mark.timeout(60)
def test_workers_stop_in_the_middle_of_a_call(tmp_path):
    workers = Workers(1, ignore_progress)
    future = workers.submit(sleep, RecordDict(), tmp_path / "started")
    while not (tmp_path / "started").exists():
        time.sleep(0.01)
    workers.close()
    assert future.exception(timeout=0)


def die_within_a_result(_):
    """Exit after a part of a result has been written, as a worker does that is killed at this moment."""
    frame = sys._getframe()
    while "result_queue" not in frame.f_locals:
        frame = frame.f_back
    os.write(frame.f_locals["result_queue"]._writer.fileno(), (1 << 16).to_bytes(4, "big") + b"a part")
    os._exit(1)


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_worker_may_die_within_a_result(tmp_path):
    workers = Workers(2, ignore_progress)
    with pytest.raises(BrokenProcessPool):
        workers.result(workers.submit(die_within_a_result, RecordDict()))
    assert workers.result(workers.submit(len, RecordDict())) == 0
    workers.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_client_that_failed_alone_is_not_asked_again(workers, tmp_path, caplog):
    content, _ = own_data(tmp_path, {1: b"no archive"})
    with closing(LocalGrid(6, workers)) as grid, caplog.at_level(logging.WARNING, "flwr"):
        (reply,) = ask(grid, content, nodes=[2])
    assert reply.has_error()
    assert [record.getMessage().count("client-1.npz") for record in caplog.records] == [1]


def test_a_client_that_repeats_its_work_starts_from_what_it_remembered(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    content, layout = own_data(tmp_path / "data", {}, clients=3)
    shared = {name: value for name, value in initialise("mlp-32", (2,), 2, 0).items() if "output" not in name}
    assert 0 < len(shared) < len(layout.names)
    content["models"] = pack_models(Layout.of(shared).flatten(shared)[None], Layout.of(shared))

    def two_rounds(name):
        content["config"]["clients-dir"] = str(tmp_path / name)
        grid = LocalGrid(3)
        first = ask(grid, content, nodes=[1, 2, 3])
        return first + ask(grid, content, nodes=[1, 2, 3])

    expected = two_rounds("whole")
    kept = [KeptStates(tmp_path / "whole").of(client).read() for client in range(3)]

    def full(file, states):
        if 2 in states:
            raise OSError("no space left on the device")
        return write_states(file, states)

    monkeypatch.setattr("coterie.engine.in_process.write_states", full)
    found = two_rounds("full")
    assert [r.has_error() for r in found] == [False, False, True] * 2
    for i in (0, 1, 3, 4):
        ours, theirs = (r[i].content["update"] for r in (found, expected))
        np.testing.assert_allclose(
            np.concatenate([a.numpy().ravel() for a in ours.values()]),
            np.concatenate([a.numpy().ravel() for a in theirs.values()]),
            atol=1e-6,
        )
    for client in (0, 1):
        for name, values in KeptStates(tmp_path / "full").of(client).read().items():
            np.testing.assert_allclose(values, kept[client][name], atol=1e-6)


@for_rows("workers", [0, 1])
def test_what_clients_tell_reaches_the_watcher(workers):
    content, _ = question()
    talking = {"dataset": "kit.toys:talking", "labels": 2, "encoder": "none", "release-counts": False}
    content["config"] = ConfigRecord({**content["config"], **talking})
    heard = []
    with closing(LocalGrid(12, workers, heard.append)) as grid:
        ask(grid, content, "query.label", nodes=[1])
    assert heard == ["reading"]
    report_progress("to the log, once the grid is closed")
    assert heard == ["reading"]


def points_question(verb):
    settings = {"dataset": "kit.toys:blobs", "clients": 12, "seed": 5, "local-epochs": 1, "label-skew": "non-iid:0"}
    config = RunConfig({"strategy": "ppfc-gan", "clusters": 3, **settings}).for_clients()
    asked = {"labels": 3, "local": "k-means", "local-centroids": 2}
    asked |= {"gan": "gan-pendigits", "samples": 4, "average": 0.9, "feature-range": 1.0}
    drawn = {name: value.detach().numpy() for name, value in build_gan("gan-pendigits", (4,), 3).named_parameters()}
    if verb == "query.label":
        asked |= {"encoder": "none", "release-counts": True}
        drawn = {"centroids": np.eye(3, 4, dtype=np.float32)}
    layout = Layout.of(drawn)
    record = ConfigRecord({**config, **asked, "round": 1})
    return RecordDict({"models": pack_models(layout.flatten(drawn)[None], layout), "config": record})


@for_rows(
    ("settings", "device", "cores", "workers"),
    [
        ({}, "cpu", 2, 2),
        ({"rounds": 4, "sampling-rate": 0.2}, "cpu", 2, 0),
        ({}, "auto", 2, 2),
        ({}, "cpu", 1, 0),
        ({}, "cuda", 2, 0),
        ({"strategy": "ppfc-gan", "privacy-unit": "none"}, "cpu", 2, 2),
    ],
)
def test_a_long_run_has_one_worker_per_core(settings, device, cores, workers):
    assert workers_for(RunConfig(settings).trainings, device, cores) == workers


def test_a_client_s_gan_is_there_before_the_next_client_trains():
    content, heard = points_question("train.gan"), []
    with closing(LocalGrid(12, 0, heard.append)) as grid:
        replies = grid.send_and_receive(Message(content, dst_node_id=n, message_type="train.gan") for n in (8, 9))
        assert next(replies).metadata.src_node_id == 8
        assert heard == ["GAN of client 7: epoch 1 of 1"]
        assert next(replies).metadata.src_node_id == 9
        assert heard[1:] == ["GAN of client 8: epoch 1 of 1"]


@pytest.mark.parametrize("verb", ["train.gan", "train.centroids", "query.label"])
def test_the_client_app_answers_the_verbs_of_one_shot_clustering(verb, tmp_path):
    content = points_question(verb)
    content["config"]["clients-dir"] = str(tmp_path)
    (local,) = ask(LocalGrid(12), content, verb, nodes=[8])
    node = Context(run_id=1, node_id=1, node_config={"partition-id": 7}, state=RecordDict(), run_config={})
    flower = app(Message(content, dst_node_id=8, message_type=verb), node)
    if verb == "query.label":
        assert flower.content["diagnostics"] == local.content["diagnostics"]
        assert sum(flower.content["diagnostics"]["confusion"]) in (5, 6)
        return
    expected = PointsSpec((4,), 4)
    mine, its = (read_points(r.content, client_id=7, round=1, expected=expected) for r in (local, flower))
    assert mine.shape == {"train.gan": (4, 4), "train.centroids": (2, 4)}[verb]
    np.testing.assert_allclose(its, mine, atol=1e-6)


def test_the_client_app_knows_every_verb():
    node = Context(run_id=1, node_id=1, node_config={"partition-id": 0}, state=RecordDict(), run_config={})
    for verb in HANDLERS:
        with pytest.raises(RequestError, match="a request needs a ConfigRecord"):  # an unknown verb is a ValueError
            app(Message(RecordDict(), dst_node_id=1, message_type=verb), node)
    with pytest.raises(ValueError, match="nonsense"):
        app(Message(RecordDict(), dst_node_id=1, message_type="train.nonsense"), node)
