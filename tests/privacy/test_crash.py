"""The ledger's process is killed at 200 random points; whatever was released had been paid for."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_two_hundred_kills(tmp_path):
    driver = Path(__file__).with_name("ledger_driver.py")
    done = subprocess.run(
        [sys.executable, str(driver), str(tmp_path), "200"], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["kills"] >= 200
    assert summary["wasted"] > 20  # many kills fell between a charge and its checkpoint
    assert summary["finished"] > summary["spent"]
