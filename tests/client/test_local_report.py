"""A deployed client's report on received models is for its owner: no message says that there is one."""

import json
import logging

import pytest
from test_own_model import ask, write_data

from coterie.client import own_model
from coterie.tasks import Performance


def report(folder):
    (file,) = folder.rglob("*.report.json")
    return json.loads(file.read_text())


def test_it_states_metrics_beside_the_constant_prediction(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "flwr"):
        ask(tmp_path / "on", "evaluate", **{"local-report": True})
    stated = report(tmp_path / "on")
    assert stated["held-out-records"] == 40
    assert "never sent" in stated["about"]
    assert 0 <= stated["metrics"]["pooled_accuracy"] <= 1
    assert stated["metrics"]["baseline_accuracy"] >= 0.5
    (line,) = [record.getMessage() for record in caplog.records if "the received model" in record.getMessage()]
    assert line.endswith("on 40 held-out records; client-2.report.json is never sent")


def test_without_held_out_records_there_is_none(tmp_path, caplog):
    x = write_data(tmp_path / "few.npz", rows=1, held_out=0)
    with caplog.at_level(logging.INFO, "flwr"):
        ask(tmp_path / "on", "evaluate", x, **{"local-report": True})
    files = list((tmp_path / "on").rglob("*.report.json"))
    assert bool(files) != ("no records are held out" in caplog.text)


def test_it_is_not_called_worse_without_a_metric_to_compare(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(own_model, "_report_metrics", lambda *_: Performance(log_loss=0.5))  # all times are censored
    with caplog.at_level(logging.INFO, "flwr"):
        ask(tmp_path / "on", "evaluate", **{"local-report": True})
    assert "is not comparable with the best constant prediction" in caplog.text


@pytest.mark.parametrize("error", [ValueError("a"), OSError("disk full"), MemoryError()])
def test_a_failure_changes_no_reply(tmp_path, monkeypatch, error):
    without = ask(tmp_path / "off", "evaluate")

    def fail(*_):
        raise error

    monkeypatch.setattr(own_model, "_write_report", fail)
    assert ask(tmp_path / "on", "evaluate", **{"local-report": True}) == without


def test_it_is_readable_for_its_owner_alone(tmp_path):
    ask(tmp_path / "on", "train", **{"local-report": True})
    (file,) = (tmp_path / "on").rglob("*.report.json")
    assert file.stat().st_mode & 0o077 == 0
