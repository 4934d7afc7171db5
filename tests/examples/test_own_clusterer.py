"""examples/own-clusterer: it finds groups, and the command of its page runs."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from coterie.clustering.clusterers import cluster

FOLDER = Path(__file__).parents[2] / "examples" / "own-clusterer"


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import own_clusterer

    yield own_clusterer
    sys.modules.pop("own_clusterer", None)


@pytest.mark.parametrize("k", [3, None])
def test_it_finds_three_groups(example, k):
    places = np.repeat([0.0, 10.0, 30.0], 8) + np.random.default_rng(0).normal(0, 0.3, 24)
    found = cluster(np.abs(np.subtract.outer(places, places)), "own_clusterer:spectral", k)
    assert found.labels.tolist() == np.repeat([0, 1, 2], 8).tolist()


@pytest.mark.parametrize(
    "small",
    [
        ["--rounds", 2, "--set", "local-epochs=2"],
        pytest.param([], marks=[pytest.mark.slow, pytest.mark.timeout(600)], id="shipped"),
    ],
)
def test_the_command_of_its_page_runs(example, coterie, tmp_path, small):
    command = "run --strategy lcfl --clusters 0 --clients 60 --set clusterer=own_clusterer:spectral"
    assert f"coterie {command}\n" in (FOLDER / "README.md").read_text()
    status, out, err = coterie(*command.split(), *small, "--seed", 0, "--out", "run", "--json")
    assert status == 0, err
    assert json.loads(out)["notes"]["clusterer"] == "own_clusterer:spectral"
