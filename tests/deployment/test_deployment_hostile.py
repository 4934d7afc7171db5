"""A client that answers badly in every round: each reply is dropped by name, and the honest ones make the models."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from stack import OWN_DATA

from coterie.privacy import Streams
from coterie.server import RunConfig
from coterie.server.run import initial_models

pytestmark = [pytest.mark.deployment, pytest.mark.timeout(1800)]

RUN = {
    **OWN_DATA,
    "strategy": "fedavg",
    "clusters": 1,
    "clients": 3,
    "privacy-unit": "client",
    "noise-multiplier": 0.05,
    "epsilon": 1e6,
    "delta": 0.01,
    "clip-norm": 0.3,
    "sampling-rate": 1.0,
    "rounds": 8,
    "evaluate": "diagnostic",
    "evaluate-every": 8,
    "seed": 3,
    "registration-timeout": 120.0,
    "min-clients": 3,
    "round-timeout": 90.0,
}
# Of rounds 2, 3, 5, 6 and 7; what is huge in round 4 is clipped, and what comes twice in round 8 counts once.
WHY = (
    "hidden.weight is float32 (32, 1)",
    "the update contains NaN",
    "label is 99",
    "parameters are",
    "round is 1, expected",
)


def test_bad_replies_are_dropped_by_name_and_the_run_goes_on(stack):
    code = f"{Path(__file__).parent / 'hostile'}:/hostile:ro"
    with stack.changed("client-2", environment={"PYTHONPATH": "/hostile"}, volumes=[code]):
        run_id = stack.submit(**RUN, out="/server/runs/hostile")
        stack.complete(run_id, seconds=900)
        twice = stack.execute("client-2", "cat", "/state/twice").stdout
    assert [line["round"] for line in stack.lines("hostile")] == list(range(1, RUN["rounds"] + 1))
    said = [line for line in stack.log(run_id).splitlines() if " dropped: " in line]
    assert [why for why, line in zip(WHY, said, strict=True) if f"reply of client 2 dropped: {why}" not in line] == []
    assert twice.startswith(("sent", "refused")), twice
    models = stack.runs / "hostile" / "models" / "cluster-0.safetensors"
    length = np.sqrt(sum(np.sum(np.square(values.astype(np.float64))) for values in moved(models).values()))
    # What 1e30 becomes is no longer than any other update: every round moves a model by clip at most, and by noise.
    noise = RUN["noise-multiplier"] * 2 * RUN["clip-norm"] * np.sqrt(2410) / 3
    assert 0 < length < RUN["rounds"] * (RUN["clip-norm"] + noise)


def moved(path):
    """How far the models are from where a run with this seed starts."""
    config = RunConfig(RUN)
    start, layout = initial_models(config, Streams(RUN["seed"]))
    first = layout.split(start[0])
    return {name: values - first[name] for name, values in load_file(path).items()}
