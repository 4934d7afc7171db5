"""examples/flower-app: a ClientApp of its own under Coterie's IFCA, in process and by flwr run."""

import json
import math
import sys
from pathlib import Path

import pytest
from flwr.app import ArrayRecord, Context, RecordDict

from coterie.engine import InProcessGrid
from coterie.testing import check_client

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "flower-app"


@pytest.fixture
def apps(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    from flower_app import client_app, server_app, task

    yield client_app, server_app, task
    for name in [name for name in sys.modules if name.startswith("flower_app")]:
        del sys.modules[name]


def test_the_client_has_60_lines_at_most():
    assert len((FOLDER / "flower_app" / "client_app.py").read_text().splitlines()) <= 60


def test_the_client_conforms(apps):
    client_app, _, task = apps
    node = {"partition-id": 0, "num-partitions": 40}
    check_client(client_app.app, ArrayRecord(task.Net().state_dict()), train_config={"lr": 0.1}, node_config=node)


@pytest.mark.slow
@pytest.mark.parametrize(("epsilon", "least"), [(8.0, 0.0), (1e5, 0.6)])
def test_a_run_in_process(apps, tmp_path, epsilon, least):
    client_app, server_app, _ = apps
    config = {"clients": 20, "rounds": 8, "lr": 0.1, "epsilon": epsilon, "out": str(tmp_path / "out")}
    accuracy = []
    server_app.log = lambda level, text, *values: accuracy.append(values[0])
    server_app.app(InProcessGrid(client_app.app, 20), Context(1, 1, {}, RecordDict(), config))
    certificate = json.loads((tmp_path / "out" / "privacy.json").read_text())
    assert certificate["certified"] is True
    assert certificate["charges"] == 8
    assert 0 < certificate["epsilon"] <= epsilon
    assert len((tmp_path / "out" / "ledger.jsonl").read_text().splitlines()) == 1 + 8
    assert math.isfinite(accuracy[0])
    assert accuracy[0] >= least


def test_the_message_table_names_every_field():
    """The contract of messages is one table in docs/extending.md."""
    from coterie.wire import REQUESTS

    text = (ROOT / "docs" / "extending.md").read_text()
    section = text[text.index("## Messages") :].partition("\n## ")[0]
    for kind in ("query.identity", "train", "query.losses", "evaluate"):
        assert f"`{kind}`" in section
        fields = REQUESTS[kind].keys() if kind in REQUESTS else ()
        assert all(f"`{field}`" in section for field in fields), kind
    for field in ("client-id", "repeats", "evaluates", "label", "redrawn-label", "update", "diagnostics", "losses"):
        assert f"`{field}`" in section
