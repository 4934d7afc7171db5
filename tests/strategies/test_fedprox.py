"""FedProx's penalty reaches clients at every unit of privacy, also as the optimizer of LCFL's clusters."""

import numpy as np
import pytest
from kit.toys import trained

SMALL = {"clients": 8, "groups": "2", "rounds": 2, "local-epochs": 3, "samples-per-client": 10, "batch-size": 5}
SMALL |= {"lr": 0.1, "evaluate": "off", "seed": 3, "model": "linear"}


def distance(some, others):
    return sum(float(np.abs(some[key] - others[key]).sum()) for key in some)


@pytest.mark.parametrize("unit", ["client", "record", "none"])
def test_the_penalty_pulls_at_every_unit(unit, tmp_path):
    common = {**SMALL, "privacy-unit": unit, "sampling-rate": 1.0, "epsilon": 100}
    average = trained(tmp_path / "average", {**common, "strategy": "fedavg"})
    free = trained(tmp_path / "free", {**common, "strategy": "fedprox", "proximal-mu": 0})
    near = trained(tmp_path / "near", {**common, "strategy": "fedprox", "proximal-mu": 5})
    assert average.keys() == free.keys() == near.keys() != set()
    assert distance(average, free) == 0
    assert distance(average, near) > 0.1
