"""A plan with less noise than it charges cannot be made: bugs are planted in what each mechanism draws."""

import math
from dataclasses import replace

import numpy as np
import pytest
from kit.tables import for_rows

from coterie.privacy import Banded, Joint, PrivacyError, RecordPlan, RRSlot, Secure
from coterie.privacy.mechanisms import banded, rebalancing
from coterie.privacy.noise import NoiseSplit, check_noise
from coterie.privacy.secure_aggregation.noise_layers import MIN_STEPS, NoiseLayers

NUMBERS = {"num_clusters": 3, "rounds": 6, "clip_norm": 0.5, "delta": 1e-4, "epsilon": math.inf}
NOISY = NUMBERS | {"noise_multiplier": 1.5}
PLANS = {
    "joint": lambda: Joint(clients=30, sampling_rate=0.2, identifier_share=0.04, clip_share=0.02, **NOISY),
    "banded": lambda: Banded(clients=30, sampling_rate=0.5, identifier_share=0.04, clip_share=0.02, **NOISY),
    "rr-slot": lambda: RRSlot(clients=30, sampling_rate=0.5, identifier_share=0.2, **NOISY),
    "secure": lambda: Secure(clients=30, sampling_rate=0.5, identifier_share=0.04, clip_share=0.02, **NOISY),
    "record": lambda: RecordPlan(
        num_examples=100, batch_size=10, rounds=3, clip_norm=1.0, epsilon=8.0, delta=1e-4, noise_multiplier=1.0,
        clip_share=0.1,
    ),
}  # fmt: skip


# What a round releases, beside updates.
PARTS = [
    *((name, "updates") for name in ("joint", "banded", "rr-slot", "record")),
    *((name, "counts") for name in ("joint", "banded", "rr-slot")),
    *((name, "norms") for name in ("joint", "banded", "record")),
]


@pytest.mark.parametrize(("mechanism", "part"), PARTS)
def test_a_part_with_less_noise_than_its_share_allows_is_refused(monkeypatch, mechanism, part):
    assert PLANS[mechanism]()
    value = getattr(NoiseSplit, part).fget
    monkeypatch.setattr(NoiseSplit, part, property(lambda split: 0.9 * value(split)))
    if mechanism == "rr-slot" and part == "counts":
        monkeypatch.setattr(RRSlot, "identifier_sensitivity", 1.0)
    with pytest.raises(PrivacyError, match="less than the charged one"):
        PLANS[mechanism]()


@pytest.mark.parametrize("part", range(3))
def test_a_vector_that_is_longer_than_the_grid_allows_is_refused(monkeypatch, part):
    assert PLANS["secure"]()
    factors = Secure.factors.fget
    longer = np.where(np.arange(3) == part, 1.5, 1.0)
    monkeypatch.setattr(Secure, "factors", property(lambda plan: tuple(longer * factors(plan))))
    with pytest.raises(PrivacyError, match="less than the charged one"):
        PLANS["secure"]()


def test_noise_of_clients_that_is_sized_for_the_largest_slot_is_refused(monkeypatch):
    """31 clients in two slots: 15 and 16."""
    uneven = {**NOISY, "clients": 31, "sampling_rate": 0.5}
    assert Secure(**uneven).slots == 2

    def largest(self):
        clients = -(-self.clients // self.slots)
        return NoiseLayers.of(self.noise_multiplier * 2**16, clients, self._least(clients), self.corrupt)

    monkeypatch.setattr(Secure, "layers", property(largest))
    with pytest.raises(PrivacyError, match="the honest of 15 clients, of which 11 must stay, add less than"):
        Secure(**uneven)
    assert Secure(**uneven | {"clients": 32})


@pytest.mark.parametrize("release", ["evaluations", "histograms"])
def test_noise_of_evaluations_that_ignores_corrupt_clients_is_refused(monkeypatch, release):
    numbers = {**NOISY, "clients": 30, "sampling_rate": 0.5, "corrupt": 3, "evaluations": 1, release: 1}
    assert Secure(**numbers)
    layers = Secure(**numbers).layers
    monkeypatch.setattr(Secure, "layers", property(lambda self: layers))
    of = NoiseLayers.of
    monkeypatch.setattr(NoiseLayers, "of", lambda total, clients, least, corrupt: of(total, clients, least, 0))
    with pytest.raises(PrivacyError, match="the honest of 30 clients"):
        Secure(**numbers)


def test_a_column_of_a_matrix_that_is_longer_than_one_is_refused(monkeypatch):
    plan = PLANS["banded"]()
    matrix = plan.matrix.copy()
    assert plan.new_state()
    for row in range(len(matrix)):
        longer = matrix.copy()
        longer[row, 0] *= 1.01
        monkeypatch.setattr(banded, "banded_matrix", lambda rounds, bands, longer=longer: longer)
        with pytest.raises(PrivacyError, match="less than the charged one, 1"):
            plan.new_state()


def test_a_matrix_with_more_bands_than_slots_is_refused(monkeypatch):
    plan, matrix = PLANS["banded"](), banded.banded_matrix
    monkeypatch.setattr(banded, "banded_matrix", lambda rounds, bands: matrix(rounds, bands + 1))
    with pytest.raises(PrivacyError, match="3 bands needs as many slots, and there are 2"):
        plan.new_state()


def test_labels_that_are_less_random_than_charged_are_refused(monkeypatch):
    plan = replace(PLANS["rr-slot"](), identifiers="exponential")
    gap = rebalancing.identifier_gap
    monkeypatch.setattr(rebalancing, "identifier_gap", lambda mu, k: 1.1 * gap(mu, k))
    with pytest.raises(PrivacyError, match="less than the charged one"):
        replace(plan, rounds=5)


@for_rows("seed", range(200))
def test_layers_suffice_if_every_number_of_survivors_has_the_noise(seed):
    rng = np.random.default_rng(seed)
    clients = int(rng.integers(3, 60))
    least = int(rng.integers(2, clients + 1))
    corrupt = int(rng.integers(0, least))
    made = NoiseLayers.of(1e5, clients, least, corrupt)
    assert made.suffice(1e5, clients, least, corrupt)
    layers = replace(made, deviations=tuple(rng.choice([1.0, 1.001, 0.99]) * d for d in made.deviations))
    low = max(1, least - int(rng.integers(0, 2)), corrupt + 1)
    every = min(math.sqrt(u - corrupt) * layers.deviation(u) for u in range(low, clients + 2))
    clients += 1  # a client more than the layers were made for
    assert layers.suffice(every, clients, low, corrupt) == (min(layers.deviations) >= MIN_STEPS)
    assert not layers.suffice(every * 1.0001, clients, low, corrupt)


def test_noise_is_compared_with_the_charge():
    check_noise([(1.0, math.sqrt(2)), (0.5, math.sqrt(2) / 2)], 1.0)
    for parts in ([(1.0, math.nan)], [(1.0, 0.999)], [(1.0, 1.0), (0.1, 10.0)]):
        with pytest.raises(PrivacyError, match="less than the charged one, 1"):
            check_noise(parts, 1.0)
