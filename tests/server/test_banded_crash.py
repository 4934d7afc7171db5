"""Runs of mechanism banded are killed at 50 random points: epsilon stays as planned, and no noise row is on disk."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_fifty_kills(tmp_path):
    driver = Path(__file__).with_name("banded_driver.py")
    done = subprocess.run(
        [sys.executable, str(driver), str(tmp_path), "50"], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["kills"] >= 50
    assert summary["runs"] >= 3
    assert summary["skipped"] >= 5  # kills fell between a charge and its checkpoint
