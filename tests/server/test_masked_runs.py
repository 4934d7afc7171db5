"""Simulated runs whose clients run the whole protocol of masks: the models are those without masks, bit for bit."""

import json
from collections import Counter
from contextlib import closing

import numpy as np
import pytest
from flwr.common.serde import recorddict_to_proto
from kit.tiers import mark_slow

from coterie.client.answer import handle
from coterie.client.state import ClientError
from coterie.engine import in_process
from coterie.privacy import read_ledger
from coterie.privacy.mechanisms import score_sums, secure
from coterie.privacy.secure_aggregation import MaskingClient, noise_layers
from coterie.rounds import score_estimates
from coterie.server import RunConfig, RunFolder
from coterie.server.checkpoints import read_checkpoint
from coterie.server.run import RunError
from coterie.server.simulate import prepare, simulate

SETTINGS = {"mechanism": "secure", "clients": 12, "groups": "2", "rounds": 2, "local-epochs": 1}
SETTINGS |= {"samples-per-client": 20, "model": "linear", "clusters": 2, "epsilon": 1e6, "delta": 1e-3}
SETTINGS |= {"evaluate": "off", "corrupt": 2}


def zeros(rng, std, size):
    return np.zeros(size, np.int64)


@pytest.fixture(autouse=True)
def few_repetitions(monkeypatch):
    """Errors of estimates take most of the time of an evaluation, and no test here reads them."""
    monkeypatch.setattr(score_estimates, "_REPETITIONS", 2)


@pytest.fixture
def without_noise(monkeypatch):
    for module in (noise_layers, score_sums, secure):
        monkeypatch.setattr(module, "discrete_gaussian", zeros)


def models_of(path, **settings):
    config = RunConfig({**SETTINGS, "seed": 3, "out": str(path), **settings})
    with closing(RunFolder.create(path, config, prepare(config))) as folder:
        outcome = simulate(folder, cores=1)
    checkpoint, _ = read_checkpoint(path / "checkpoint" / "state.safetensors")
    return checkpoint.models, outcome


def dropping(message_type, clients):
    """A handler whose clients do not reply to one type of message."""

    def drop(asked, content, of):
        replies = handle(asked, content, of)
        gone = [asked == message_type and client.client_id in clients for client in of]
        return [ClientError("gone") if lost else reply for lost, reply in zip(gone, replies, strict=True)]

    return drop


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"strategy": "fedcam"},
        {"strategy": "fesem"},
        {"strategy": "rr-cluster", "clip-norm": "adaptive"},
        {"sampling-rate": 0.5, "clients": 24},
    ],
    ids=["ifca", "fedcam", "fesem", "rr-cluster, adaptive norm", "two slots"],
)
def test_masks_change_no_bit(tmp_path, without_noise, monkeypatch, settings):
    monkeypatch.setattr(in_process, "_CHUNK", 1)  # clients that train together round their updates otherwise
    plain, _ = models_of(tmp_path / "plain", **settings)
    masked, outcome = models_of(tmp_path / "masked", masks=True, **settings)
    np.testing.assert_array_equal(plain, masked)
    assert outcome.skipped_rounds == ()
    assert np.ptp(masked) > 0
    line = json.loads((tmp_path / "masked" / "metrics.jsonl").read_text().splitlines()[0])
    known = {"round", "epsilon", "epsilon_rdp", "reseeded", "seconds", "seconds_total"}
    assert {*line} <= known | {"histogram", "clip_norm", "notes"}  # no label and no vector of a client


SCORES = {"evaluate": "private", "score-share": 0.1}
EVALUATED = {
    "ifca": {},
    "fedcam": {"strategy": "fedcam"},
    "fedper": {"strategy": "fedper", "clusters": 1, "model": "mlp-32"},
    "fesem": {"strategy": "fesem"},
    "two slots": {"sampling-rate": 0.5, "clients": 24},
    "every round": {"evaluate-every": 1},
    "accuracy alone": {"score-share": 0},
    "models of their own": {"personalize": "last-layer"},
}


def released(path):
    """What evaluations have released, by round."""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    names = ("accuracy", "score_histogram", "score_noise", "epsilon")
    return {line["round"]: {name: line.get(name) for name in names} for line in lines}


@pytest.mark.parametrize("name", mark_slow(EVALUATED, EVALUATED.keys() - {"ifca", "every round"}))
def test_masks_change_no_bit_of_an_evaluation(tmp_path, without_noise, monkeypatch, name):
    monkeypatch.setattr(in_process, "_CHUNK", 1)
    settings = SCORES | EVALUATED[name]
    models_of(tmp_path / "plain", **settings)
    _, outcome = models_of(tmp_path / "masked", masks=True, **settings)
    plain, masked = released(tmp_path / "plain"), released(tmp_path / "masked")
    assert plain == masked
    assert 0.1 < masked[2]["accuracy"] <= 1
    assert (masked[1]["accuracy"] is not None) == (name == "every round")
    histogram = masked[2]["score_histogram"]
    assert (histogram is None) == (name == "accuracy alone")
    assert histogram is None or np.ptp(histogram) > 1
    assert outcome.charges == 2 + 1 + (name == "every round") + (name != "accuracy alone")
    for client in range(settings.get("clients", 12)):
        charges = read_ledger(tmp_path / "masked" / "clients" / f"client-{client}.ledger.jsonl")[1]
        trained = 1 if name == "two slots" else 2
        counts = Counter(charge["for"] for charge in charges)
        expected = {"training": trained, "accuracy": 1 + (name == "every round"), "histogram": 1}
        assert counts == Counter(expected) - Counter(histogram=int(name == "accuracy alone"))


@pytest.mark.parametrize(("lost", "missing"), [({3, 4, 5}, ""), ({3, 4, 5, 6}, "sent a vector")])
def test_clients_may_drop_out_of_an_evaluation(tmp_path, monkeypatch, caplog, lost, missing):
    """Nine of twelve must stay; with fewer, it is charged and skipped."""
    monkeypatch.setattr(in_process, "handle", dropping("evaluate.masked", lost))
    _, outcome = models_of(tmp_path / "masked", masks=True, **SCORES)
    (last,) = [found for number, found in released(tmp_path / "masked").items() if number == 2]
    assert outcome.charges == 4
    assert (last["accuracy"] is None) == (last["score_histogram"] is None) == bool(missing)
    assert not missing or f"8 clients {missing}, of the 9 that mechanism secure requires" in caplog.text


def spoiling(message_type):
    """A handler in which client 5 adds to its masked vector what no client can have."""

    def spoiled(asked, content, of):
        replies = handle(asked, content, of)
        if asked == message_type and [client.client_id for client in of] == [5]:
            record = replies[0]["update"]
            record["masked"] = type(record["masked"])(record["masked"].numpy() + np.uint32(2**30))
        return replies

    return spoiled


def test_scores_that_are_impossible_spoil_one_evaluation_and_are_noticed(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(in_process, "handle", spoiling("evaluate.masked"))
    models_of(tmp_path / "masked", masks=True, **SCORES)
    assert released(tmp_path / "masked")[2]["accuracy"] is None
    assert caplog.text.count("the sum of the clients' scores is impossible: its norm exceeds") == 2


@pytest.mark.parametrize(
    ("step", "lost", "skipped"),
    [
        ("query.identity", {3, 7, 11}, ()),
        ("train.open", {0, 1, 2}, ()),
        ("train.masked", {3, 4, 5}, ()),
        ("train.survivors", {0, 4, 8}, ()),
        ("train.unmask", {9, 10, 11}, ()),
        ("train.masked", {0, 1, 2, 3}, (1, 2)),
        ("train.survivors", {0, 1, 2, 3}, (1, 2)),
        ("train.unmask", {0, 1, 2, 3}, (1, 2)),
    ],
)
def test_clients_may_drop_out_before_any_step(tmp_path, monkeypatch, caplog, step, lost, skipped):
    """Nine of twelve must stay; with fewer, the round is charged and skipped."""
    monkeypatch.setattr(in_process, "handle", dropping(step, lost))
    models, outcome = models_of(tmp_path / "masked", masks=True, **{"registration-timeout": 1.0})
    assert outcome.skipped_rounds == skipped
    assert outcome.charges == 2
    if skipped:
        assert "8 clients" in caplog.text
        assert "of the 9 that mechanism secure requires" in caplog.text
    assert np.isfinite(models).all()


def test_a_run_that_no_round_can_open_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(in_process, "handle", dropping("train.open", {0, 1, 2, 3}))
    with pytest.raises(RunError, match="no valid reply in the whole run"):
        models_of(tmp_path / "masked", masks=True)


def test_a_vector_that_is_none_spoils_one_round_and_is_noticed(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(in_process, "handle", spoiling("train.masked"))
    _, outcome = models_of(tmp_path / "masked", masks=True)
    assert outcome.skipped_rounds == (1, 2)
    assert "the sum of the clients' vectors is impossible: its norm exceeds" in caplog.text


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Ray
def test_masks_on_ray_give_the_same_models(tmp_path):
    expected, _ = models_of(tmp_path / "local", masks=True)
    config = RunConfig({**SETTINGS, "seed": 3, "masks": True, "out": str(tmp_path / "ray")})
    with closing(RunFolder.create(tmp_path / "ray", config, prepare(config, "ray"))) as folder:
        simulate(folder, "ray")
    checkpoint, _ = read_checkpoint(tmp_path / "ray" / "checkpoint" / "state.safetensors")
    assert np.abs(expected).max() > 0.01
    np.testing.assert_allclose(checkpoint.models, expected, atol=1e-5)


def integers_inside(integers, content):
    """Whether eight consecutive integers of a vector, not all zero, are in some bytes, modulo 2^32."""
    words = np.asarray(integers).astype(np.uint32).astype("<u4")
    windows = (words[start : start + 8] for start in range(len(words) - 7))
    return any(window.any() and window.tobytes() in content for window in windows)


@pytest.mark.parametrize("leaks", [False, True], ids=["masked", "planted leak"])
def test_no_reply_and_no_file_holds_integers_of_a_client(tmp_path, monkeypatch, leaks):
    """Three of ten drop out after they have sent their vectors; their masks are then known to nobody."""
    replies, vectors = bytearray(), []

    def recorded(asked, content, of):
        made = handle(asked, content, of)
        for reply in made:
            replies.extend(recorddict_to_proto(reply).SerializeToString())
        gone = [asked == "train.survivors" and client.client_id in (1, 2, 3) for client in of]
        return [ClientError("gone") if lost else reply for lost, reply in zip(gone, made, strict=True)]

    def drawn(masking, rng):
        vectors.append(noise_of(masking, rng))
        return vectors[-1]

    monkeypatch.setattr(in_process, "handle", recorded)
    noise_of = MaskingClient.noise
    monkeypatch.setattr(MaskingClient, "noise", drawn)
    if leaks:
        monkeypatch.setattr(MaskingClient, "masked", lambda masking, vector: vector)
    models_of(tmp_path / "masked", masks=True, rounds=1, epsilon=1e4)
    folder = tmp_path / "masked"
    own = folder / "clients"  # the state of the clients
    files = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file() and own not in path.parents)
    assert len(vectors) == 12
    # Entries of the other cluster are noise alone: without a mask, they are in the clear.
    assert any(integers_inside(vector, bytes(replies)) for vector in vectors) == leaks
    assert not any(integers_inside(vector, files) for vector in vectors)
