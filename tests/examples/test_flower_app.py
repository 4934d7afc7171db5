"""examples/flower-app: an app of Flower's quickstart, before and after it is clustered and certified."""

import json
import random
import sys
from pathlib import Path

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict
from kit.documented import app_difference

from coterie.client import ClusteredClientApp
from coterie.engine import InProcessGrid
from coterie.privacy import read_ledger
from coterie.testing import check_client

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "flower-app"
CONFIG = {"num-server-rounds": 20, "local-epochs": 2, "batch-size": 8, "learning-rate": 0.1}


@pytest.fixture
def load(monkeypatch):
    """Import a module of the example."""
    monkeypatch.syspath_prepend(str(FOLDER))

    def modules():
        return [name for name in sys.modules if name.partition(".")[0] in ("quickstart", "clustered")]

    for name in modules():
        monkeypatch.delitem(sys.modules, name)
    yield lambda name: __import__(name, fromlist=["app"])
    for name in modules():
        del sys.modules[name]


def test_twenty_lines_make_the_app_clustered_and_certified_and_the_readme_shows_them():
    difference = app_difference(FOLDER, "quickstart", "clustered")
    changed = [line for line in difference if line[0] in "+-" and line[:3] not in ("+++", "---")]
    assert 0 < len(changed) <= 20
    names = ["__init__.py", "client_app.py", "server_app.py"]
    assert sorted(path.name for path in (FOLDER / "clustered").glob("*.py")) == names
    lines = [line for line in difference[: difference.index("--- quickstart/server_app.py")] if line[1:]]
    assert [line for line in lines if line[0] == "+"][1:] == [
        "+from coterie.client import ClusteredClientApp",
        "+app = ClusteredClientApp()",
    ]
    shown = (FOLDER / "README.md").read_text().partition("```diff\n")[2].partition("\n```")[0]
    assert shown.splitlines() == difference


def test_the_client_conforms(load):
    check_client(
        load("clustered.client_app").app,
        ArrayRecord(load("quickstart.task").Net().state_dict()),
        train_config={"lr": 0.1},
        node_config={"partition-id": 0, "num-partitions": 40},
        run_config=CONFIG,
    )


def run(load, room, out, clients, **config):
    """Run both apps of a room in process."""
    torch.manual_seed(0)
    random.seed(0)
    config = {**CONFIG, "clients": clients, "epsilon": 8.0, "out": str(out), **config}
    grid = InProcessGrid(load(f"{room}.client_app").app, clients, run_config=config)
    load(f"{room}.server_app").app(grid, Context(1, 1, {}, RecordDict(), config))
    return torch.load(out / "final_model.pt")


@pytest.mark.parametrize(("clients", "rounds"), [(4, 2), pytest.param(100, 20, marks=pytest.mark.slow)])
def test_the_lines_of_the_readme_run(load, clients, rounds):
    """With as many clients and rounds as a fast test takes, and as they are."""
    lines = (ROOT / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    grid = InProcessGrid(load("clustered.client_app").app, clients, run_config=CONFIG)
    names = {"grid": grid, "initial_arrays": ArrayRecord(load("quickstart.task").Net().state_dict())}
    names["config"] = ConfigRecord({"lr": 0.1})
    exec(lines.replace("clients=100", f"clients={clients}").replace("rounds=20", f"rounds={rounds}"), names)
    assert isinstance(names["app"], ClusteredClientApp)
    assert 7.9 < names["certificate"]["epsilon"] <= 8
    assert set(names["result"].arrays)


def test_both_apps_run(load, tmp_path, capsys):
    models = {
        room: run(load, room, tmp_path / room, 4, **{"num-server-rounds": 2}) for room in ("quickstart", "clustered")
    }
    assert set(models["clustered"]) == {f"{j}/{name}" for name in models["quickstart"] for j in (0, 1)}
    assert capsys.readouterr().out.count("Held-out records") == 2


@pytest.mark.slow
def test_a_run_is_certified_and_learns(load, tmp_path, capsys):
    run(load, "clustered", tmp_path, 100)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "Held-out" in line)
    certificate = json.loads((tmp_path / "privacy.json").read_text())
    assert certificate["certified"] is True
    assert 7.9 < certificate["epsilon"] <= 8
    header, charges = read_ledger(tmp_path / "ledger.jsonl")
    assert (header["epsilon"], len(charges)) == (8, 20)
    assert float(line.rpartition(": ")[2].strip("}")) > 0.65


def test_the_message_table_names_every_field():
    """The contract of messages is one table in docs/existing-app.md."""
    from coterie.wire import REQUESTS

    text = (ROOT / "docs" / "existing-app.md").read_text()
    section = text[text.index("## Messages") :].partition("\n## ")[0]
    for kind in ("query.identity", "train", "query.losses", "evaluate"):
        assert f"`{kind}`" in section
        fields = REQUESTS[kind].keys() if kind in REQUESTS else ()
        assert all(f"`{field}`" in section for field in fields), kind
    for field in ("client-id", "repeats", "evaluates", "label", "redrawn-label", "update", "diagnostics", "losses"):
        assert f"`{field}`" in section
