"""A deployed client's own model stays in its state folder: no message says whether there is one."""

import json
import logging
import os
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ConfigRecord, RecordDict
from flwr.common.serde import recorddict_to_proto
from kit.deployed import reply_of

import coterie
from coterie.client import own_model
from coterie.client.state import ClientError
from coterie.datasets import Shard, TestSet
from coterie.fields import PERSONAL_METHODS
from coterie.models import initialise
from coterie.server import RunConfig
from coterie.site.errors import DeployError
from coterie.site.node import NodeConfig
from coterie.wire.messages import Layout, pack_models

SETTINGS = {"dataset": "own", "input-shape": "4", "num-classes": 3, "clients": 3, "model": "mlp-32", "clusters": 2}
SETTINGS |= {"seed": 1, "local-epochs": 1, "device": "cpu"}
CONFIG = RunConfig(SETTINGS)
RECORD = RunConfig(
    SETTINGS | {"privacy-unit": "record", "strategy": "fedavg", "clusters": 1, "samples-per-client": 60, "rounds": 2}
)
DRAWN = [initialise("mlp-32", (4,), 3, seed) for seed in range(2)]
LAYOUT = Layout.of(DRAWN[0])
MODELS = np.stack([LAYOUT.flatten(parameters) for parameters in DRAWN])
PLANS = {"record-plans": RECORD.plan.record_plans}
#: Requests by name: type, number of models, configuration.
REQUESTS = {
    "train": ("train", 2, {}),
    "train the assigned model": ("train", 1, {"cluster": 1}),
    "train with DP-SGD": ("train", 1, PLANS),
    "evaluate": ("evaluate", 2, {"private": False}),
    "evaluate, and personalise": ("evaluate", 2, {"private": False, "personalize": "all"}),
    "evaluate privately": ("evaluate", 2, {"private": True}),
    "evaluate own models privately": ("evaluate", 2, {"private": True, "personalize": "prior"}),
    "losses": ("query.losses", 2, {"compared": 2}),
    "identity": ("query.identity", 2, {}),
}


def write_data(path, rows=80, held_out=40):
    rng = np.random.default_rng(5)
    x, y = rng.normal(size=(rows + held_out, 4)).astype(np.float32), rng.integers(0, 2, rows + held_out)
    x[:, 0] += 3 * y
    held = {"x_test": x[rows:], "y_test": y[rows:]} if held_out else {}
    np.savez(path, x=x[:rows], y=y[:rows], **held)
    return path


def ask(folder, request, data=None, **node):
    """The bytes of the reply, or the text of the error."""
    folder.mkdir(exist_ok=True)
    data = data or write_data(folder.parent / "data.npz")
    message_type, models, extra = REQUESTS[request]
    config = RECORD if "record-plans" in extra else CONFIG
    content = RecordDict(
        {
            "models": pack_models(MODELS[:models], LAYOUT),
            "config": ConfigRecord({**config.for_clients(), "round": 4, **extra}),
        }
    )
    node = {"client-id": 2, "state-dir": str(folder), "data": str(data), **node}
    try:
        reply = reply_of(node, content, message_type)
    except ClientError as error:
        return str(error)
    if "reply" in reply.config_records:
        reply.config_records["reply"].pop("head", None)  # a random number of the charge
    return recorddict_to_proto(reply).SerializeToString(deterministic=True)


@pytest.mark.parametrize("request_name", REQUESTS)
def test_messages_are_equal_with_and_without_an_own_model_or_a_report(tmp_path, request_name):
    without = ask(tmp_path / "off", request_name)
    assert isinstance(without, bytes) or request_name == "identity"
    for method in PERSONAL_METHODS if request_name == "evaluate" else ["last-layer"]:
        assert ask(tmp_path / method, request_name, personalize=method) == without
        kept = own_model.own_model_folder(tmp_path / method, 2) / "cluster-0.safetensors"
        assert kept.exists() == request_name.startswith(("train", "evaluate"))
    assert ask(tmp_path / "report", request_name, **{"local-report": True}) == without
    reports = {path.parent.name for path in tmp_path.rglob("*.report.json")}
    assert reports == ({"report"} if request_name.startswith(("train", "evaluate")) else set())


@pytest.mark.parametrize("trouble", ["fails", "its folder is a file", "no records"])
def test_a_fit_that_fails_changes_no_reply(tmp_path, monkeypatch, trouble, caplog):
    data = write_data(tmp_path / "data.npz", rows=1 if trouble == "no records" else 80)
    expected = ask(tmp_path / "off", "evaluate", data)
    if trouble == "fails":
        monkeypatch.setattr(own_model, "personalised", lambda *_: 1 / 0)
    elif trouble == "its folder is a file":
        (tmp_path / "on").mkdir()
        own_model.own_model_folder(tmp_path / "on", 2).write_text("")
    with caplog.at_level(logging.INFO, "flwr"):
        assert ask(tmp_path / "on", "evaluate", data, personalize="last-layer") == expected
    if trouble != "no records":
        assert "client 2 has no model of its own of this round" in caplog.text


def test_the_own_model_predicts_at_the_site_and_has_no_guarantee(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "flwr"):
        ask(tmp_path / "on", "evaluate", personalize="last-layer")
    path = own_model.own_model_folder(tmp_path / "on", 2)
    models = coterie.load(path)
    card = models.card
    assert (card.unit, card.certified, card.epsilon, card.clusters, card.rounds) == ("none", False, None, 1, 4)
    assert "not to be given away" in card.certificate
    data = np.load(tmp_path / "data.npz")
    hits = np.mean(models.predict(models.read(tmp_path / "data.npz").x, 0) == data["y"])
    assert hits > 0.9
    assert [oct(Path(p).stat().st_mode & 0o077) for p in (path, path / "cluster-0.safetensors")] == ["0o0", "0o0"]
    (line,) = [r.getMessage() for r in caplog.records if "fitted the model of round 4" in r.getMessage()]
    assert "% before and" in line
    assert "of 40 held-out records, " in line
    assert line.endswith(" % by a model trained alone on its records; client-2.own-model is never sent")
    alone = json.loads((path / "alone.json").read_text())
    assert alone["accuracy"] > 0.9
    (path / "alone.json").write_text(json.dumps(alone | {"accuracy": 0.123}))  # it is trained once in a run
    with caplog.at_level(logging.INFO, "flwr"):
        ask(tmp_path / "on", "evaluate", personalize="last-layer")
    assert "12.3 % by a model trained alone" in caplog.text


def test_without_held_out_records_no_figure_is_stated():
    x, y = np.zeros((3, 4), np.float32), np.zeros(3, np.int64)
    for test in (TestSet(x, y), TestSet(x[:0], y[:0])):
        assert own_model._figures(None, MODELS, Shard(0, 0, x, y, test)) == "no records are held out to compare them"


def test_the_model_that_suits_the_records_best_is_fitted(tmp_path):
    ask(tmp_path / "on", "evaluate", personalize="prior")
    own = LAYOUT.flatten(
        {
            name: value.numpy()
            for name, value in coterie.load(own_model.own_model_folder(tmp_path / "on", 2))[0].state_dict().items()
        }
    )
    moved = np.abs(MODELS - own)[:, :-3].max(axis=1)  # all but the bias of the last layer
    assert sorted(moved.tolist())[0] == 0 < max(moved)


def test_a_mixture_is_kept_as_the_sum_of_two_networks(tmp_path):
    ask(tmp_path / "on", "evaluate", personalize="mixture")
    models = coterie.load(own_model.own_model_folder(tmp_path / "on", 2))
    assert models.card.additive
    data = np.load(tmp_path / "data.npz")
    assert np.mean(models.predict(models.read(tmp_path / "data.npz").x, 0) == data["y"]) > 0.9


def test_audit_log_and_other_files_are_those_without(tmp_path):
    for folder, node in ((tmp_path / "off", {}), (tmp_path / "on", {"personalize": "all"})):
        ask(folder, "train with DP-SGD", **node)
    files = [set(os.listdir(tmp_path / name)) for name in ("off", "on")]
    assert files[1] - files[0] == {"client-2.own-model"}
    logs = [
        [json.loads(line) for path in (tmp_path / name).glob("*.audit.jsonl") for line in path.read_text().splitlines()]
        for name in ("off", "on")
    ]
    assert [set(entry) for entry in logs[0]] == [set(entry) for entry in logs[1]]


@pytest.mark.parametrize("value", ["head", "", "none", "ALL", 1])
def test_other_methods_are_refused_in_the_node_configuration(value):
    with pytest.raises(DeployError, match="personalize is"):
        NodeConfig.from_record({"client-id": 2, "personalize": value})
