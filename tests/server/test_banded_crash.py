"""Runs of mechanism banded are killed at 50 random points: epsilon stays as planned, and no noise row is on disk."""

from pathlib import Path

import pytest
from kit.kill_drivers import summary_of


@pytest.mark.slow
def test_fifty_kills(tmp_path):
    summary = summary_of(Path(__file__).with_name("banded_driver.py"), tmp_path, 50)
    assert summary["kills"] >= 50
    assert summary["runs"] >= 3
    assert summary["skipped"] >= 5  # kills fell between a charge and its checkpoint
