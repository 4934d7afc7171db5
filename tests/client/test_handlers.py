"""The verbs: what a client answers, and that many clients at once answer as each would alone."""

import numpy as np
import pytest
from flwr.app import ConfigRecord, RecordDict

from coterie.client import local_evaluation
from coterie.client.answer import handle
from coterie.client.cohort import Cohort, federation
from coterie.client.identity import Client
from coterie.client.state import ClientError, StateFile
from coterie.models import initialise
from coterie.server import RunConfig
from coterie.wire.messages import Layout, pack_models, read_reply

CONFIG = RunConfig({"clients": 20, "seed": 3, "local-epochs": 1})


def content(k=3, **extra):
    drawn = [initialise("mlp-32", (1, 8, 8), 10, seed) for seed in range(k)]
    layout = Layout.of(drawn[0])
    models = np.stack([layout.flatten(d) for d in drawn])
    record = ConfigRecord({**CONFIG.for_clients(), "round": 4, **extra})
    return RecordDict({"models": pack_models(models, layout), "config": record}), layout


def replies(clients, **extra):
    message, layout = content(**extra)
    answers = handle("train", message, [Client(i) for i in clients])
    redraw = np.reshape(extra["redraw"], (3, 3)) if "redraw" in extra else None
    return [
        read_reply(a, client_id=i, round=4, num_clusters=3, layout=layout, redraw=redraw)
        for i, a in zip(clients, answers, strict=True)
    ]


def test_many_clients_at_once_answer_as_each_alone():
    together = replies([2, 7, 11, 19])
    for reply in together:
        (alone,) = replies([reply.client_id])
        assert alone.label == reply.label
        np.testing.assert_allclose(alone.update, reply.update, atol=1e-6)


@pytest.mark.parametrize(("skew", "classes"), [("non-iid:1", 1), ("none", 10), ("classes:3", 3)])
def test_how_labels_are_spread_reaches_the_clients(skew, classes):
    data = federation(RunConfig({"clients": 10, "groups": "1", "shift": "none", "label-skew": skew}).for_clients())
    assert {len(set(data.shard(i).y)) for i in range(10)} == {classes}


def test_a_reply_holds_the_contract_and_nothing_else():
    message, _ = content()
    (answer,) = handle("train", message, [Client(0)])
    assert set(answer) == {"update", "reply"}
    assert set(answer["reply"]) == {"client-id", "round", "label", "redrawn-label"}


def test_redrawn_labels_follow_the_row_of_the_label():
    cycle = np.roll(np.eye(3), 1, axis=1)  # every label becomes the next one
    plain, moved = replies(range(20)), replies(range(20), redraw=cycle.ravel().tolist())
    assert len({r.label for r in plain}) > 1
    for before, after in zip(plain, moved, strict=True):
        assert (after.label, after.redrawn_label) == (before.label, (before.label + 1) % 3)
        np.testing.assert_allclose(after.update, before.update, atol=1.0)  # trained from its own model


def test_evaluation_is_on_held_out_data_of_the_own_group():
    message, _ = content()
    answers = handle("evaluate", message, [Client(i) for i in range(8)])
    metrics = [a["diagnostics"] for a in answers]
    assert [m["group"] for m in metrics] == [0, 1, 2, 3] * 2
    assert {m["num-examples"] for m in metrics} == {397}
    labels = [r.label for r in replies(range(8))]
    assert [m["cluster"] for m in metrics] == labels


def test_models_are_evaluated_once_per_test_set_until_they_change(monkeypatch):
    evaluated, real = [], local_evaluation.accuracies
    monkeypatch.setattr(local_evaluation, "accuracies", lambda *given: evaluated.extend(given[2]) or real(*given))
    monkeypatch.setattr(local_evaluation, "_LATEST", local_evaluation._LatestModels())
    message, other = content()[0], content(k=2)[0]
    alone = [handle("evaluate", message, [Client(client)])[0]["diagnostics"] for client in range(8)]
    pairs = {(reply["group"], reply["cluster"]) for reply in alone}
    assert len(evaluated) == len(pairs)
    together = handle("evaluate", message, [Client(client) for client in range(8)])
    assert [dict(reply["diagnostics"]) for reply in together] == [pytest.approx(dict(reply)) for reply in alone]
    assert len(evaluated) == len(pairs)
    handle("evaluate", other, [Client(0)])
    assert len(evaluated) == len(pairs) + 1


@pytest.mark.parametrize("extra", [{}, {"assign": "nearest"}, {"sampled": True}, {"sampled": True, "k": 1}])
def test_evaluation_reads_few_pairs_and_equals_one_of_all_pairs(monkeypatch, tmp_path, extra):
    """The oracle evaluates every model on every test set, and picks the client's."""
    monkeypatch.setattr(local_evaluation, "MAX_SAMPLED_TESTS", 100)
    monkeypatch.setattr(local_evaluation, "_LATEST", local_evaluation._LatestModels())
    passes, real = [], local_evaluation.accuracies
    monkeypatch.setattr(local_evaluation, "accuracies", lambda *given: passes.append(len(given[2])) or real(*given))
    message, _ = content(**{"clients-dir": str(tmp_path), **extra})
    if "assign" in extra:
        for client in range(6):
            StateFile(tmp_path, client).write({"label": np.array([client % 3])})
    clients = [Client(i) for i in range(8)]
    found = [dict(reply["diagnostics"]) for reply in handle("evaluate", message, clients)]
    cohort = Cohort.of("evaluate", message, clients)
    k, stride = len(cohort.models), 4 if "sampled" in extra else 1
    labels = cohort.losses.argmin(axis=1)
    if "assign" in extra:
        labels[:6] = [0, 1, 2] * 2
    pairs = len({(shard.group, label) for shard, label in zip(cohort.shards, labels.tolist(), strict=True)})
    assert sum(passes) == pairs < 4 * k or k == 1
    for i, (reply, shard) in enumerate(zip(found, cohort.shards, strict=True)):
        x, y = shard.test.x[::stride], shard.test.y[::stride]
        of_all = real(cohort.network, cohort.layers.whole, cohort.models, x, y, "cpu", cohort.task)
        assert (reply["cluster"], reply["accuracy"], reply["num-examples"]) == (labels[i], of_all[labels[i]], len(y))
        assert reply.get("loss") == (None if k == 1 else cohort.losses[i, labels[i]])


def test_unseeded_clients_use_their_own_secret_randomness():
    unseeded = RunConfig({"clients": 20, "local-epochs": 1})
    assert "seed" not in unseeded.for_clients()
    message, layout = content()
    message["config"] = ConfigRecord({**unseeded.for_clients(), "round": 4})
    first, second = (
        read_reply(handle("train", message, [Client(0)])[0], client_id=0, round=4, num_clusters=3, layout=layout)
        for _ in range(2)
    )
    assert not np.array_equal(first.update, second.update)


def test_only_a_simulated_client_writes_where_a_message_says(tmp_path):
    message, _ = content(assign="nearest", **{"clients-dir": str(tmp_path / "server")})
    handle("train", message, [Client(0)])
    handle("train", message, [Client(1, str(tmp_path / "own"), guarantee="trusted-server")])
    written = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert written == {"server/client-0.safetensors", "own/client-1.safetensors"}
    with pytest.raises(ClientError, match="state-dir"):
        handle("train", message, [Client(2, "", guarantee="trusted-server")])
    (tmp_path / "own" / "client-1.safetensors").write_bytes(b"torn")
    with pytest.raises(ClientError, match="cannot be read"):
        handle("train", message, [Client(1, str(tmp_path / "own"), guarantee="trusted-server")])
