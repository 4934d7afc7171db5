"""What tests of run folders share: run in one, and read its certificate and its models."""

import json

from safetensors.numpy import load_file

from coterie.engine.in_process import LocalGrid
from coterie.privacy import read_ledger
from coterie.privacy.check import check
from coterie.server import run


def run_in(folder):
    """Run in an open folder, and close it; the result."""
    try:
        return run(folder, LocalGrid(folder.config["clients"]))
    finally:
        folder.close()


def privacy(path):
    """The certificate, after it was checked against the ledger."""
    stated = json.loads((path / "privacy.json").read_text())
    assert check(*read_ledger(path / "ledger.jsonl"), stated) == []
    return stated


def model(path, name="models/cluster-0"):
    """Parameters by name."""
    return load_file(path / f"{name}.safetensors")
