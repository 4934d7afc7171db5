"""examples/guard: an app with its own DP training, before and after the guard."""

import json
import os
import shutil
from pathlib import Path

import pytest
from kit.documented import app_difference
from kit.superlinks import ROOT, flwr, latest, simulating_superlink

from coterie.guard import certificate
from coterie.privacy import Event, epsilon

EXAMPLE = ROOT / "examples" / "guard"
STEPS, RATE, NOISE, DELTA = 3 * 4, 32 / 140, 2.0, 1e-4


def test_the_guard_adds_at_most_ten_lines_and_the_readme_shows_them():
    difference = app_difference(EXAMPLE, "quickstart", "guarded")
    added = [line for line in difference if line.startswith("+") and not line.startswith("+++")]
    assert 0 < len(added) <= 10
    names = ["__init__.py", "client_app.py", "server_app.py"]
    assert sorted(path.name for path in (EXAMPLE / "guarded").glob("*.py")) == names
    shown = (EXAMPLE / "README.md").read_text().partition("```diff\n")[2].partition("\n```")[0]
    assert shown.splitlines() == difference


@pytest.mark.slow
@pytest.mark.ray
def test_it_runs_by_flwr_run_and_its_certificates_agree(tmp_path):
    app = tmp_path / "guard"
    shutil.copytree(EXAMPLE, app, ignore=shutil.ignore_patterns("__pycache__"))
    federation = f"num-supernodes=10 client-resources-num-cpus={os.cpu_count()}"
    variables = {"HOME": str(tmp_path / "home"), "COTERIE_RUNS": str(tmp_path / "runs")}
    Path(variables["HOME"]).mkdir()
    with simulating_superlink(tmp_path, **variables) as environment:
        for _ in range(2):
            done = flwr(environment, "run", str(app), "--stream", "--federation-config", federation)
            assert latest(environment)["status"] == "finished:completed", done.stdout + done.stderr
    runs = [json.loads(path.read_text()) for path in (tmp_path / "runs").glob("*/guard.json")]
    assert len(runs) == 2
    for document in runs:
        assert document["certified"], document["reasons"]
        assert len(document["sites"]) == 10
        assert document["epsilon"] == pytest.approx(epsilon({Event(RATE, NOISE): STEPS}, DELTA))
    ledgers = list((tmp_path / "home" / "guarded-quickstart").glob("*.ledger.jsonl"))
    assert len(ledgers) == 10
    for path in ledgers:  # both runs together
        assert certificate(path)["epsilon"] == pytest.approx(epsilon({Event(RATE, NOISE): 2 * STEPS}, DELTA))
