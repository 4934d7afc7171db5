"""Deployed clients whose records have several labels: what they reply, refuse and report."""

import csv
import json
import math

import numpy as np
import pytest
from flwr.common.serde import recorddict_to_proto
from kit.deployed import reply_of, request_of
from PIL import Image

from coterie.client.state import ClientError
from coterie.datasets import Declared, describe, own_shard
from coterie.privacy.ledger_lines import read_ledger
from coterie.server import RunConfig
from coterie.site.node import NodeConfig
from coterie.wire.messages import read_reply

FEATURES = "".join(f'[[columns]]\nname = "f{j}"\ntype = "number"\nmean = 0\nscale = 1\n' for j in range(4))
SCHEMAS = {"[labels]": f'version = 1\n[labels]\ncolumns = ["anaemia", "copd"]\n{FEATURES}'}
SHAPES = {
    "labels of an archive": {"input-shape": "4", "num-classes": 2, "task": "multi-label"},
    "labels of images": {"input-shape": "1x2x2", "num-classes": 2, "task": "multi-label"},
}
TEXTS = {
    "[labels]": "2 labels (anaemia ",
    "labels of an archive": "2 labels (0 ",
    "labels of images": "2 labels (left ",
}
SETTINGS = {"dataset": "own", "model": "linear", "device": "cpu", "strategy": "fedavg", "clients": 3}
SETTINGS |= {"privacy-unit": "none"}
RECORD_LEVEL = {"privacy-unit": "record", "epsilon": 8.0, "delta": 1e-5, "samples-per-client": 60, "rounds": 2}
RECORD_LEVEL |= {"evaluate": "off"}
BUDGET = {"epsilon": 8.0, "delta": 1e-5}


@pytest.fixture(autouse=True)
def _sender():
    own_shard.cache_clear()


def write(folder, name):
    """Data of 100 records, and what the owner declares of them."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(100, 4)).astype(np.float32).round(3)
    bits = (x[:, :2] > 0).astype(int)
    if name == "labels of images":
        (folder / "images").mkdir()
        (folder / "images" / "classes.txt").write_text("left\nright\n")
        for i, pixels in enumerate((127 + 40 * x).clip(0, 255).astype(np.uint8).reshape(-1, 2, 2)):
            Image.fromarray(pixels).save(folder / "images" / f"{i}.png")
        rows = ["file,right,left", *(f"{i}.png,{right},{left}" for i, (left, right) in enumerate(bits))]
        (folder / "images" / "labels.csv").write_text("\n".join(rows) + "\n")
        return {"data": str(folder / "images"), **SHAPES[name]}
    if name in SHAPES:
        np.savez(folder / "a.npz", x=x, y=bits)
        return {"data": str(folder / "a.npz"), **SHAPES[name]}
    with (folder / "t.csv").open("w", newline="") as file:
        lines = [[*row, *target] for row, target in zip(x.tolist(), bits, strict=True)]
        csv.writer(file).writerows([[*(f"f{j}" for j in range(4)), "anaemia", "copd"], *lines])
    (folder / "schema.toml").write_text(SCHEMAS[name])
    return {"data": str(folder / "t.csv"), "schema": str(folder / "schema.toml")}


def config_of(folder, name, **more):
    of_data = {"table-schema": str(folder / "schema.toml")} if name in SCHEMAS else SHAPES[name]
    return RunConfig({**SETTINGS, **of_data, **more}, deployed=True)


def ask(folder, node, config, message_type, **request):
    content, layout = request_of(config, **request)
    return reply_of({"state-dir": str(folder), **node}, content, message_type), layout


@pytest.fixture(params=[*SCHEMAS, *SHAPES])
def site(request, tmp_path):
    return tmp_path, request.param, write(tmp_path, request.param)


def test_the_line_about_its_data_speaks_of_the_task(site):
    _, name, node = site
    declared = Declared.of(*NodeConfig(client_id=0, **{k.replace("-", "_"): v for k, v in node.items()}).declaration)
    text = describe(node["data"], declared)
    assert TEXTS[name] in text
    assert "classes" not in text.replace("classes.txt", "")


def test_it_trains_and_its_own_report_is_of_the_task(site):
    folder, name, node = site
    content, layout = ask(folder, {**node, "local-report": True}, config_of(folder, name, seed=3), "train")
    update = read_reply(content, client_id=0, round=1, num_clusters=1, layout=layout).update
    assert np.isfinite(update).all()
    assert np.abs(update).max() > 0
    stated = json.loads((folder / "client-0.report.json").read_text())
    assert 5 < stated["held-out-records"] < 40
    values = np.array(stated["metrics"]["label_rate"], float)
    assert ((values > 0) & (values < 1)).all()
    sent = recorddict_to_proto(content).SerializeToString(deterministic=True)
    without, _ = ask(folder, node, config_of(folder, name, seed=3), "train")
    assert sent == recorddict_to_proto(without).SerializeToString(deterministic=True)


def test_it_trains_at_record_level_within_its_budget(site):
    folder, name, node = site
    budget = folder / "budget.jsonl"
    config = config_of(folder, name, **RECORD_LEVEL)
    content, layout = ask(folder, {**node, **BUDGET, "budget-file": str(budget)}, config, "train")
    update = read_reply(content, client_id=0, round=1, num_clusters=1, layout=layout).update
    assert np.abs(update).max() > 0
    (charge,) = read_ledger(budget)[1]
    assert charge["round"] == 1


def test_its_score_is_released_under_noise_alone(site):
    """At client level a score in [0, 1] is sent, to which the server adds noise; at record level none is."""
    folder, name, node = site
    content, _ = ask(folder, node, config_of(folder, name), "evaluate", private=True)
    (metrics,) = content.metric_records.values()
    assert 0 <= metrics["accuracy"] <= 1
    assert math.isfinite(metrics["accuracy"])


def test_what_needs_two_classes_is_refused_before_anything_is_charged(site):
    folder, name, node = site
    budget = folder / "budget.jsonl"
    config = config_of(folder, name, **RECORD_LEVEL)
    node = {**node, **BUDGET, "budget-file": str(budget)}
    with pytest.raises(ClientError, match="a histogram of scores is of one model, for two classes"):
        ask(folder, node, config, "evaluate", private=True, histogram=True, cluster=0)
    assert not budget.exists() or not read_ledger(budget)[1]


@pytest.mark.parametrize("name", SHAPES)
def test_a_run_with_another_task_is_refused_before_the_data_are_read(tmp_path, name):
    node = write(tmp_path, name)
    others = {"input-shape": SHAPES[name]["input-shape"], "num-classes": 4}
    for other, text in (({**others, "task": "auto"}, "4 classes"), ({**others, "task": "multi-label"}, "4 labels")):
        config = RunConfig({**SETTINGS, **other}, deployed=True)
        with pytest.raises(ClientError, match=f"it is for examples of .* with {text}, but the node configuration"):
            ask(tmp_path, {**node, "data": "/absent"}, config, "train")
