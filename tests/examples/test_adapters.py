"""examples/adapters: the parts of its data, what trains, and a quick run of its tables."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from coterie.models import NetworkSpec, build, check_network, trainable

FOLDER = Path(__file__).parents[2] / "examples" / "adapters"


@pytest.fixture
def plays(monkeypatch, data_dir):
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("COTERIE_DATA", data_dir)
    import plays

    yield plays
    sys.modules.pop("plays", None)


def test_parts_share_no_page_and_sites_of_both_styles_have_the_same_contexts(plays):
    parts = [set(plays.pages(part)) for part in plays.SHARES]
    assert all(len(part) > 300 for part in parts)
    assert len(set.union(*parts)) == sum(map(len, parts))
    source = plays.private()
    capital = {plays.CHARACTERS.index(letter) for letter in plays.CAPITAL if letter.isupper()}
    assert not capital & set(np.unique(source.train_x).tolist())
    for site in (0, 1):
        targets = set(source.train_y[source.train_owner == site].tolist())
        assert bool(targets & capital) == bool(site % 2)


def test_its_adapters_are_87_numbers_of_the_last_layer(plays):
    spec = NetworkSpec("plays:network", "lora:rank=1,layers=head")
    check_network(spec, (plays.LENGTH,), len(plays.CHARACTERS), "tokens")
    sizes = {name: value.numel() for name, value in trainable(build(spec, (16,), len(plays.CHARACTERS))).items()}
    assert sizes == {"head.down.weight": 32, "head.up.weight": 55}
    assert "87 numbers, 348 bytes an update" in (FOLDER / "README.md").read_text()


@pytest.mark.slow
def test_a_quick_run_prints_every_row(data_dir, tmp_path):
    words = [sys.executable, str(FOLDER / "adapters.py"), "--quick", "--out", str(tmp_path / "out.json")]
    done = subprocess.run(
        words, env={**os.environ, "COTERIE_DATA": data_dir}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert len(found["rows"]) == 8
    assert {row["bytes"] for row in found["rows"]} == {348, 84956}
    assert len(found["costs"]) == 3
