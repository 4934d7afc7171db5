"""Layers of noise: what survivors keep suffices, what they reveal is their surplus and nothing before it."""

import math
import secrets
from dataclasses import replace
from itertools import pairwise

import numpy as np
from kit.tables import for_rows

from coterie.privacy.secure_aggregation import NoiseLayers, Surplus, noise_layers
from coterie.privacy.secure_aggregation.noise_layers import MIN_STEPS

TOTAL = 1e5
LAYERS = NoiseLayers.of(TOTAL, 10, 7, 2)


def keys(count):
    return [secrets.token_bytes(32) for _ in range(count)]


@for_rows("case", range(300))
def test_honest_survivors_have_the_noise_of_the_guarantee_whoever_stays(case):
    rng = np.random.default_rng(case)
    clients = int(rng.integers(1, 400))
    least = int(rng.integers(max(2 * clients // 3, 1), clients + 1))
    corrupt = int(rng.integers(0, min(least, 2 * least - clients)))
    total = float(np.exp(rng.uniform(np.log(32 * math.sqrt(clients)), np.log(1e7))))
    these = NoiseLayers.of(total, clients, least, corrupt)
    assert these.survivors[0] == clients
    assert these.survivors[-1] == least
    assert all(one > other for one, other in pairwise(these.survivors))
    assert min(these.deviations) >= MIN_STEPS * (1 - 1e-12)
    for survivors in range(least, clients + 1):
        assert these.deviation(survivors) * math.sqrt(survivors - corrupt) >= total * (1 - 1e-12)
    assert math.isclose(these.deviation(clients) * math.sqrt(clients - corrupt), total)


def test_a_few_clients_have_a_layer_for_every_one_that_may_drop_out():
    assert LAYERS.survivors == (10, 9, 8, 7)
    for survivors in LAYERS.survivors:
        assert math.isclose(LAYERS.deviation(survivors) * math.sqrt(survivors - 2), TOTAL)
    many = NoiseLayers.of(TOTAL, 100, 70, 2)
    assert len(many.survivors) == 5
    excess = max(many.deviation(u) * math.sqrt(u - 2) for u in range(70, 101)) / TOTAL
    assert 1.03 < excess < 1.06


def test_layers_that_the_grid_does_not_show_are_part_of_the_next_one():
    small = NoiseLayers.of(40 * math.sqrt(98), 100, 70, 2)
    assert small.survivors == (100, 70)
    assert math.isclose(
        small.deviation(70) * math.sqrt(68), max(40 * math.sqrt(98), math.hypot(40, 32) * math.sqrt(68))
    )


def test_more_survivors_than_expected_keep_the_first_layer():
    assert [LAYERS.kept(survivors) for survivors in (12, 11, 10, 9, 8, 7, 6)] == [1, 1, 1, 2, 3, 4, 4]


@for_rows("survivors", [10, 9, 8, 7])
def test_less_the_surplus_the_noise_is_that_of_the_layers_that_are_kept(survivors):
    secret, size = keys(survivors), 5000
    drawn = [LAYERS.draw(key, size) for key in secret]
    whole = sum(noise for noise, _ in drawn)
    revealed = [LAYERS.surplus(key, digests, survivors) for key, (_, digests) in zip(secret, drawn, strict=True)]
    surplus, many = LAYERS.total_surplus(revealed, size, survivors)
    kept = replace(LAYERS, deviations=LAYERS.deviations[: LAYERS.kept(survivors)])
    np.testing.assert_array_equal(whole - surplus, sum(kept.draw(key, size)[0] for key in secret))
    assert many == (survivors if survivors > 7 else 0)
    honest = (whole - surplus).std() * math.sqrt((survivors - 2) / survivors)
    assert math.isclose(honest, TOTAL, rel_tol=0.05)


def test_what_is_revealed_does_not_give_the_layers_before_it(monkeypatch):
    """The keys that follow from a revealed one are those of later layers."""
    (secret,), drawn = keys(1), []
    monkeypatch.setattr(noise_layers, "AESCounter", lambda key: drawn.append(key) or np.random.PCG64(key))
    _, digests = LAYERS.draw(secret, 3)
    of_client = drawn[::-1]  # the last layer is drawn first
    assert len(set(of_client)) == 4
    for survivors in (10, 9, 8):
        drawn.clear()
        first = LAYERS.kept(survivors)
        LAYERS.draw(LAYERS.surplus(secret, digests, survivors).key, 3, first)
        assert drawn[::-1] == of_client[first:]
    assert LAYERS.surplus(secret, digests, 7) == Surplus()


@for_rows(
    "surplus",
    [Surplus(bytes(32), bytes(32)), Surplus(bytes(32)), Surplus(b"", bytes(32)), Surplus(), Surplus(b"x", b"y")],
)
def test_layers_that_the_server_draws_otherwise_stay_in_the_sum(surplus):
    (secret,) = keys(1)
    good = LAYERS.surplus(secret, LAYERS.draw(secret, 50)[1], 9)
    expected, _ = LAYERS.total_surplus([good], 50, 9)
    total, many = LAYERS.total_surplus([surplus, good], 50, 9)
    np.testing.assert_array_equal(total, expected)
    assert many == 1


def test_layers_are_independent_and_new_in_every_client():
    drawn = [LAYERS.draw(key, 4000)[0] for key in keys(4)]
    single = [replace(LAYERS, deviations=(1e4,)).draw(key, 4000)[0] for key in keys(2)]
    assert abs(np.corrcoef(drawn + single)[np.triu_indices(6, 1)]).max() < 0.1
