"""docs/first-hour.md, every command in order, in a copy of the repository and an environment of its own."""

import os
import shutil
import subprocess
import sysconfig

import pytest
from kit.documented import ROOT, commands_of

_NOT_IN_A_CHECKOUT = (".git", ".venv", "build", "dist", "runs", "__pycache__", "*.egg-info", ".*_cache")


def script():
    """All commands; the environment sees the packages that are installed here, instead of installing 6 GB."""
    for command in commands_of(ROOT / "docs" / "first-hour.md"):
        yield command
        if command == "python3 -m venv .venv":
            yield f'echo {sysconfig.get_path("purelib")} > "$(echo .venv/lib/python3*/site-packages)/packages.pth"'


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_command_in_order(tmp_path):
    shutil.copytree(ROOT, folder := tmp_path / "coterie", ignore=shutil.ignore_patterns(*_NOT_IN_A_CHECKOUT))
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "COTERIE_DATA")}
    done = subprocess.run(
        ["bash", "-evo", "pipefail", "-c", "\n".join(script())],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert done.stdout.count("the certificate matches the ledger") == 2
    for path in ("runs/demo/report.html", "comparison.html", "sweep/table.png", "predictions.csv"):
        assert (folder / path).stat().st_size > 0
    predicted = (folder / "predictions.csv").read_text().splitlines()
    assert len(predicted) == len((folder / "sites" / "client-3.csv").read_text().splitlines())
