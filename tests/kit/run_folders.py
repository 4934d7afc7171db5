"""What tests of run folders share: run in one, and read its certificate and its models."""

import json

import numpy as np
from safetensors.numpy import load_file

from coterie.engine.in_process import LocalGrid
from coterie.privacy import read_ledger
from coterie.privacy.check import check
from coterie.server import RunConfig, RunFolder, run


def run_in(folder, grid=None):
    """Run in an open folder, on a grid of its clients, and close it; the result."""
    try:
        return run(folder, LocalGrid(folder.config["clients"]) if grid is None else grid)
    finally:
        folder.close()


def execute(path, settings=None, **changes):
    """A new run, or (settings None) the one in ``path`` with changes: its result."""
    return run_in(RunFolder.resume(path, changes) if settings is None else RunFolder.create(path, RunConfig(settings)))


def privacy(path):
    """The certificate, after it was checked against the ledger."""
    stated = json.loads((path / "privacy.json").read_text())
    assert check(*read_ledger(path / "ledger.jsonl"), stated) == []
    return stated


def model(path, name="models/cluster-0"):
    """Parameters by name."""
    return load_file(path / f"{name}.safetensors")


def networks(path):
    """Parameters of all models of server and clients, by file and name."""
    files = sorted(file for room in ("models", "clients") for file in (path / room).glob("*.safetensors"))
    return {(file.name, key): values for file in files for key, values in load_file(file).items()}


def assert_agree(ours, theirs, atol=1e-5):
    """Check that there are networks, the same ones, up to rounding."""
    assert ours.keys() == theirs.keys() != set()
    for name, values in ours.items():
        np.testing.assert_allclose(theirs[name], values, atol=atol, err_msg=str(name))
