"""Programs that kill a part of a run again and again, run in a process of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path


def summary_of(driver, folder, kills=40):
    """What a driver says in its last line, as JSON."""
    tests = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, str(driver), str(folder), str(kills)],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tests, tests.parent))), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
