"""What outlives a round follows from what was released and charged, and from nothing else."""

import numpy as np
from kit.toy_grids import Kept
from test_base import CLIENTS, Stub, private, start

from coterie.privacy import calibrate, epsilon
from coterie.strategies import IFCA, Checkpoint


def test_rebalancing_reads_released_sizes_alone():
    """All clients choose model 0, and the noise on sizes has deviation 20: true sizes would be seen at once."""
    plan = private(noise=10.0, k=2, identifier_share=0.25, rebalance_min=1, rounds=3)
    recorder = Kept()
    start(Stub(), plan, IFCA, rounds=3, recorder=recorder)
    released = [np.array(line["histogram"]) for line in recorder.lines]
    mean = released[0]
    for histogram, kept in zip(released, [state.histogram for state in recorder.states], strict=True):
        if histogram is not released[0]:
            mean = 0.75 * mean + 0.25 * histogram
        np.testing.assert_array_equal(kept, mean)
    assert np.abs(released[0] - [CLIENTS, 0]).min() > 0.1


def test_noise_after_a_crash_makes_up_for_the_wasted_charges():
    """Four rounds fit the budget; round 1 was charged three times before it was done."""
    budget, rounds = 4.0, 4
    plan = private(noise=calibrate(budget, 1e-5, 1.0, rounds), rounds=rounds, budget=budget, identifier_share=0.0)
    ledger = plan.ledger()
    for _ in range(3):
        ledger.charge_round(1, plan.event())
    first = Checkpoint(1, np.zeros((1, 4), np.float32), start(Stub(), plan)[1].layout, None)
    _, strategy = start(Stub(), plan, rounds=rounds, ledger=ledger, resume_from=first)
    assert strategy.stopped is None
    assert len(ledger.charges) == 3 + rounds - 1
    assert strategy.plan.noise_multiplier > 1.1 * plan.noise_multiplier
    assert 0.98 * budget < epsilon(ledger.events, plan.delta) <= budget
