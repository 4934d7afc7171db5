"""A client's process is killed by SIGKILL in the steps of masked rounds: no two answers, and no charge is lost."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_forty_kills(tmp_path):
    driver, tests = Path(__file__).with_name("masked_driver.py"), Path(__file__).parents[1]
    path = os.pathsep.join(map(str, (tests, tests.parent)))
    done = subprocess.run(
        [sys.executable, str(driver), str(tmp_path), "40"],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["kills"] >= 40
    assert summary["charged_rounds"] == summary["rounds"] == summary["charges"]
