"""Check a machine with a GPU: parity with the CPU, speed, and one table of a paper.

    make gpu-check, or: python benchmarks/gpu_check.py [--data-dir DIR] [--only parity speed table]

Each step writes benchmarks/results/gpu/STEP.json, with the device and versions. Without --data-dir, the speed is
measured on made-up images, and there is no table.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "gpu"
#: Tests that compare the GPU with the CPU.
TESTS = ("tests/client/test_gpu.py", "tests/client/test_dpsgd.py::test_a_gpu_gives_the_same")
#: Arguments of speed.py for every figure.
SPEED = {
    "cnn": ["--workload", "cnn"],
    "mlp": ["--workload", "mlp"],
    "ifca": ["--workload", "ifca", "--only", "coterie"],
    "cohort-cnn": ["--workload", "cohort", "--model", "cnn-small"],
    "cohort-mlp": ["--workload", "cohort", "--model", "mlp-32"],
    "cohort-cnn-private": ["--workload", "cohort", "--model", "cnn-small", "--private"],
}
TABLE = "rr-table2"


def main() -> int:
    """Run all steps; return 1 if one failed."""
    steps: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
        "parity": parity,
        "speed": speed,
        "table": table,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", default=os.environ.get("COTERIE_DATA"))
    parser.add_argument("--only", nargs="*", choices=tuple(steps), default=tuple(steps))
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: PyTorch finds no GPU on this machine", file=sys.stderr)
        return 1
    chosen.out.mkdir(parents=True, exist_ok=True)
    failed = False
    for name in chosen.only:
        if name == "table" and not chosen.data_dir:
            print("table: left out, since there is no --data-dir", file=sys.stderr)
            continue
        found = steps[name](chosen)
        failed |= bool(found["failed"])
        document = {**found, "device": torch.cuda.get_device_name(), "versions": versions()}
        (chosen.out / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
        print(f"{name}: {'failed: ' + ', '.join(found['failed']) if found['failed'] else 'done'}")
    return int(failed)


def versions() -> dict[str, str]:
    """Return the versions that a figure depends on."""
    names = ("torch", "flwr", "numpy")
    cuda = {"cuda": str(torch.version.cuda), "python": platform.python_version()}
    return {name: importlib.metadata.version(name) for name in names} | cuda


def parity(chosen: argparse.Namespace) -> dict[str, Any]:
    """Run the tests; a test on the GPU that is skipped counts as failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        words = [sys.executable, "-m", "pytest", "-q", *TESTS, f"--junitxml={report}"]
        subprocess.run(words, cwd=HERE.parent, check=False)
        cases = ElementTree.parse(report).getroot().findall(".//testcase")
    failed = [str(case.get("name")) for case in cases if len(case)]
    return {"tests": len(cases), "failed": failed if cases else ["no test ran"]}


def speed(chosen: argparse.Namespace) -> dict[str, Any]:
    """Run speed.py for every figure."""
    data = ["--data-dir", chosen.data_dir] if chosen.data_dir else []
    figures, failed = {}, []
    for name, words in SPEED.items():
        command = [sys.executable, str(HERE / "speed.py"), "--device", "cuda", *words, *data]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode == 0:
            figures[name] = json.loads(done.stdout)
        else:
            failed.append(name)
    return {"figures": figures, "failed": failed}


def table(chosen: argparse.Namespace) -> dict[str, Any]:
    """Reproduce the quick version of one table."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["bench", TABLE, "--quick", "--device", "cuda", "--data-dir", chosen.data_dir, "--out", folder]
        call = "from coterie.cli import main; main()"
        done = subprocess.run([sys.executable, "-c", call, *words], cwd=HERE.parent, check=False)
        if done.returncode:
            return {"table": None, "failed": [TABLE]}
        return {"table": json.loads((Path(folder) / "table.json").read_text()), "failed": []}


if __name__ == "__main__":
    sys.exit(main())
