"""A client's process is killed by SIGKILL in the steps of masked rounds: no two answers, and no charge is lost."""

from pathlib import Path

import pytest
from kit.kill_drivers import summary_of


@pytest.mark.slow
def test_forty_kills(tmp_path):
    summary = summary_of(Path(__file__).with_name("masked_driver.py"), tmp_path)
    assert summary["kills"] >= 40
    assert summary["charged_rounds"] == summary["rounds"] == summary["charges"]
