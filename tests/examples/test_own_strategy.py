"""examples/own-strategy: it conforms, and the command of its page runs."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from coterie.privacy.mechanisms import NoPrivacy
from coterie.testing import check_strategy

FOLDER = Path(__file__).parents[2] / "examples" / "own-strategy"


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import own_strategy

    yield own_strategy
    sys.modules.pop("own_strategy", None)


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_it_conforms(example, beta):
    check_strategy(example.Momentum, settings=example.MomentumSettings(beta=beta))


@pytest.mark.parametrize(
    ("rounds", "small"),
    [
        (2, ["--rounds", 2, "--clients", 40, "--set", "local-epochs=1"]),
        pytest.param(80, [], marks=[pytest.mark.slow, pytest.mark.timeout(600)], id="shipped"),
    ],
)
def test_the_command_of_its_page_runs(example, coterie, tmp_path, rounds, small):
    command = "run --strategy own_strategy:Momentum --set momentum.beta=0.5"
    assert f"coterie {command}\n" in (FOLDER / "README.md").read_text()
    status, _, err = coterie(*command.split(), *small, "--out", "run")
    assert status == 0, err
    certificate = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert certificate["certified"]
    assert certificate["tuned_outside"]["momentum.beta"] == 0.5
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == list(range(1, rounds + 1))


def test_momentum_adds_the_last_step(example):
    """Two rounds with the step of one cluster known: 1 and 1, so the second moves by 1 + beta."""

    class Fixed(example.Momentum):
        name, row_wise = "fixed", True

    def rounds(self, number, models):
        yield
        return models + 1

    plan = NoPrivacy(clients=1, num_clusters=1, sampling_rate=1.0, rounds=2, noise_multiplier=0.0)
    strategy, models = Fixed(plan, example.MomentumSettings(beta=0.25)), np.zeros((1, 2), np.float32)
    base = example.IFCA.round
    try:
        example.IFCA.round = rounds
        for number in (1, 2):
            run = strategy.round(number, models)
            next(run)
            with pytest.raises(StopIteration) as stop:
                run.send(None)
            models = stop.value.value
    finally:
        example.IFCA.round = base
    assert models.tolist() == [[1 + 1.25, 1 + 1.25]]
