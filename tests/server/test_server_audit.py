"""What a deployed server records: submissions, who registered, who was ignored or refused, and how runs ended."""

import pytest
from flwr.app import Context, RecordDict
from test_refusals import POOR, Refusing
from test_resume_deployed import SETTINGS, clients  # noqa: F401

from coterie.cli.audit_log import read_audit_log
from coterie.fields.settings import ConfigError
from coterie.server import app as server_app


def submitted(tmp_path, grid, run_id, **settings):
    values = {**SETTINGS, "rounds": 2, **settings}
    server_app.app(grid, Context(run_id, 0, {}, RecordDict(), run_config=values))


def test_a_run_leaves_a_trail(clients, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("COTERIE_RUNS", str(tmp_path / "runs"))
    submitted(tmp_path, Refusing(clients, {0: POOR}), 17)
    with pytest.raises(Exception, match="no-such-strategy"):
        submitted(tmp_path, Refusing(clients, {}), 18, strategy="no-such-strategy")
    path = tmp_path / "runs" / "audit.jsonl"
    assert path.stat().st_mode & 0o777 == 0o600
    entries, summary = read_audit_log(path)
    events = [(entry["run"], entry["event"]) for entry in entries]
    assert events == [
        ("17", "submission"),
        ("17", "start"),
        *[("17", "introduction")] * 3,
        *[("17", "refusals")] * 2,
        ("17", "end"),
        ("18", "submission"),
        ("18", "end"),
    ]
    start = entries[1]
    assert (start["strategy"], start["epsilon"]) == ("fedavg", 8.0)
    assert start["out"].startswith(str(tmp_path / "runs"))
    assert entries[2]["client"] == 0
    assert entries[2]["versions"].startswith("coterie ")
    assert [entry["clients"] for entry in entries if entry["event"] == "refusals"] == [{"0": "budget"}] * 2
    assert "error" not in entries[7]
    assert "no-such-strategy" in entries[9]["error"]
    assert entries[0]["settings"] != entries[8]["settings"]
    assert len(entries[0]["settings"]) == 64
    assert summary.entries == 10


def test_a_run_that_cannot_be_recorded_is_not_begun(clients, tmp_path, monkeypatch):  # noqa: F811
    (tmp_path / "runs").write_text("a file")
    monkeypatch.setenv("COTERIE_RUNS", str(tmp_path / "runs"))
    grid = Refusing(clients, {})
    with pytest.raises(ConfigError, match=r"audit log cannot be written.*set COTERIE_RUNS"):
        submitted(tmp_path, grid, 17, out=str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    assert grid.rounds == []
