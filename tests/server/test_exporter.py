"""What Prometheus reads while a run goes on; what is in the ServerApp's log; and what of it is secret."""

import json
import logging
import socket
import sys
import urllib.error
import urllib.request
from contextlib import closing
from socketserver import BaseServer

import pytest
from flwr.app import Context, RecordDict
from kit.commands import TINY
from kit.toy_grids import Simulated

from coterie.deploy.progress import read_progress
from coterie.engine.in_process import LocalGrid
from coterie.results import Diagnostics, RoundRecord
from coterie.server import ConfigError, RunConfig, RunFolder
from coterie.server.app import app, open_folder
from coterie.server.exporter import address, serve_metrics


@pytest.fixture(autouse=True, scope="module")
def servers_that_end_soon():
    """A server of the standard library looks twice a second whether it must end."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(BaseServer.serve_forever, "__defaults__", (0.01,))
        yield


@pytest.fixture
def port(monkeypatch):
    """A free port, which COTERIE_METRICS names."""
    pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        number = probe.getsockname()[1]
    monkeypatch.setenv("COTERIE_METRICS", f"127.0.0.1:{number}")
    return number


def scrape(port):
    """Samples by name with labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


@pytest.fixture
def folder(tmp_path):
    folders = []

    def make(**values):
        values = TINY | {key.replace("_", "-"): value for key, value in values.items()}
        folders.append(RunFolder.create(tmp_path / f"run-{len(folders)}", RunConfig(values)))
        return folders[-1]

    yield make
    for each in folders:
        each.close()


def test_prometheus_reads_the_run_while_it_lasts(folder, port):
    run, seen = folder(privacy_unit="none"), []
    run.on_metrics = observer = seen.append
    with serve_metrics(run, 2):
        before = scrape(port)
        info = [name for name in before if name.startswith("coterie_run_info{")]
        assert info == ['coterie_run_info{dataset="digits",strategy="ifca"}']
        about = {info[0]: 1.0, "coterie_rounds": 2.0, "coterie_epsilon_budget": float("inf")}
        assert before == about | {"coterie_round": 0.0}
        first = {"round": 1, "epsilon": float("inf"), "accuracy": 0.5, "clients_present": 9, "seconds": 1.0}
        replies = {"asked": 9, "accepted": 5, "dropped": {"a": 1, "b": 2}}
        run.on_metrics(RoundRecord.of(first | {"replies": replies}))
        second = {"round": 2, "epsilon": float("inf"), "clients_present": 8, "seconds": 1.0}
        run.on_metrics(RoundRecord.of(second | {"replies": {"asked": 8, "accepted": 8, "dropped": {}}}))
        assert scrape(port) == about | {
            "coterie_round": 2.0,
            "coterie_epsilon": float("inf"),
            "coterie_accuracy": 0.5,
            "coterie_clients_present": 8.0,
            'coterie_replies_total{result="accepted"}': 13.0,
            'coterie_replies_total{result="dropped"}': 3.0,
        }
    assert [record.round for record in seen] == [1, 2]
    assert run.on_metrics is observer
    assert_closed(port)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, {"coterie_accuracy": 0.25}), ({"privacy_unit": "none"}, {"coterie_accuracy": 0.75})],
    ids=str,
)
def test_exact_scores_are_served_as_recorders_record_them(folder, port, settings, expected):
    """Of a private run on request alone; the noisy mean always."""
    run = folder(clients=2000, **settings)
    with serve_metrics(run, 2):
        run.on_metrics(RoundRecord(round=1, epsilon=0.5, accuracy=0.25, scores=Diagnostics(accuracy=0.75)))
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        samples = scrape(port)
    assert {name: value for name, value in samples.items() if "accuracy" in name} == expected
    (text,) = [line for line in lines if "HELP coterie_accuracy" in line]
    assert "noisy and charged; exact in a run without privacy" in text


def assert_closed(port):
    with pytest.raises(urllib.error.URLError, match="refused"):
        scrape(port)


def test_the_port_is_closed_after_a_failure(folder, port):
    def fail():
        with serve_metrics(folder(), 2):
            scrape(port)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert_closed(port)


def test_without_a_port_nothing_is_served(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    run = folder()
    before = run.on_metrics
    with serve_metrics(run, 2):
        assert run.on_metrics is before


def test_a_port_that_is_taken(folder, port):
    with socket.create_server(("127.0.0.1", port)), pytest.raises(ConfigError) as caught, serve_metrics(folder(), 2):
        pass
    for part in (f"COTERIE_METRICS = '127.0.0.1:{port}'", "in use", "another address"):
        assert part in str(caught.value)


def test_a_library_that_is_missing_is_told_before_there_is_a_folder(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.setenv("COTERIE_METRICS", "127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"requires prometheus-client.*pip install 'coterie\[metrics\]'"):
        open_folder(TINY | {"out": str(tmp_path / "run")}, tmp_path)
    assert not (tmp_path / "run").exists()


def test_addresses(monkeypatch):
    for value in ("9100", ":9100", "host:", "host:0", "host:65536", "host:-1", "host:http", "host:９"):
        monkeypatch.setenv("COTERIE_METRICS", value)
        with pytest.raises(ConfigError, match="must be host:port, such as"):
            address()
    monkeypatch.setenv("COTERIE_METRICS", "[::1]:9100")
    assert address() == ("::1", 9100)
    monkeypatch.setenv("COTERIE_METRICS", "")
    assert address() is None


# ---- the ServerApp -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", ["client", "record", "none"])
def test_a_run_tells_log_and_prometheus_what_is_no_secret(tmp_path, monkeypatch, caplog, capfd, port, unit):
    monkeypatch.setenv("COTERIE_LOG", "json")
    logger, scraped = logging.getLogger("flwr"), []
    monkeypatch.setattr(logger, "handlers", logger.handlers[:])
    caplog.set_level(logging.INFO, logger.name)
    ended, told = RunFolder.certify, RunFolder.round_finished

    def round_finished(self, line):
        told(self, line)
        scraped.append(scrape(port))

    def certify(self):
        assert_closed(port)
        return ended(self)

    monkeypatch.setattr(RunFolder, "round_finished", round_finished)
    monkeypatch.setattr(RunFolder, "certify", certify)
    values = TINY | {"privacy-unit": unit, "evaluate": "diagnostic", "out": str(tmp_path / "run")}
    if unit == "record":
        values |= {"strategy": "fedavg", "clusters": 1, "sampling-rate": 1.0}
    with closing(LocalGrid(TINY["clients"], 1)) as grid:
        app(grid, Context(run_id=77, node_id=0, node_config={}, state=RecordDict(), run_config=values))

    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    assert {line["run"] for line in lines} == {"77"}
    rounds = [line for line in lines if "rounds" in line]
    assert [(line["round"], line["rounds"]) for line in rounds] == [(1, 2), (2, 2)]
    found = read_progress("\n".join(map(json.dumps, lines)))
    assert (found["round"], found["accuracy"]) == (2, rounds[-1]["accuracy"])
    kept = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [sample["coterie_round"] for sample in scraped] == [1, 2]
    assert found["accuracy"] is not None
    assert ("coterie_accuracy" in scraped[-1]) == (unit == "none")  # exact: evaluate = diagnostic
    assert not [name for sample in scraped for name in sample if "diagnostics" in name]
    if unit == "client":
        assert scraped[-1]["coterie_epsilon"] == kept[-1]["epsilon"] == rounds[-1]["epsilon"] < 8.0
        assert scraped[-1]["coterie_epsilon_budget"] == 8.0
        everything = json.dumps([rounds, scraped, kept])
        assert "replies" not in everything
        assert "clients_present" not in everything
        assert found["dropped"] is None
    else:
        assert [line["clients_present"] for line in kept] == [TINY["clients"]] * 2
        assert [line["replies"] for line in rounds] == [line["replies"] for line in kept]
        assert all(line["replies"]["asked"] == line["replies"]["accepted"] > 0 for line in kept)
        accepted = sum(line["replies"]["accepted"] for line in kept)
        assert scraped[-1]['coterie_replies_total{result="accepted"}'] == accepted
        assert found["dropped"] == 0


@pytest.mark.parametrize(("kind", "evaluate"), [(LocalGrid, "private"), (Simulated, "diagnostic")])
def test_a_deployed_run_evaluates_privately_by_default(tmp_path, monkeypatch, kind, evaluate):
    logger = logging.getLogger("flwr")
    monkeypatch.setattr(logger, "handlers", logger.handlers[:])
    values = {key: value for key, value in TINY.items() if key != "evaluate"} | {"out": str(tmp_path / "run")}
    values |= {"evaluate-noise": 0.2, "evaluate": "auto"}
    grid = kind(TINY["clients"])
    app(grid, Context(run_id=77, node_id=0, node_config={}, state=RecordDict(), run_config=values))
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["evaluate"] == evaluate
    assert ("accuracy" in result) == (evaluate == "private")
    assert (tmp_path / "run" / "diagnostics.json").exists() == (evaluate == "diagnostic")
