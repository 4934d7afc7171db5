"""Why RR-Cluster's own analysis is not certified, number by number; and what else is easy to get wrong."""

import math

import numpy as np
import pytest
from scipy.special import comb, logsumexp

from coterie.audit.printed import Paper
from coterie.privacy import Event, epsilon
from coterie.privacy.discrete_gaussians import gaussian_delta

NUMBERS = {"sampling_rate": 1.0, "rounds": 1, "clip_norm": 1.0, "epsilon": math.inf, "delta": 1e-5}


def expected(plan, members):
    """Noiseless sums of one draw (the noise is turned off by its scale) and the clusters of the slots."""
    contributions = plan.contributions(1)
    for slot, member in enumerate(members):
        if member is not None:
            contributions.add(slot, member[0], member[0], [member[1]])
    drawn = plan.perturb(contributions, np.random.default_rng(0), np.random.default_rng(1), np.eye(plan.num_clusters))
    return drawn.sums[0, :, 0], drawn


def quiet(kind, **numbers):
    return kind(noise_multiplier=1e-9, **NUMBERS, **numbers)


def test_the_removed_client_and_the_one_moved_in_its_place_shift_two_clusters():
    """|(2C, C)| = sqrt(5) C where the paper's lemma charges 2C."""
    plan = quiet(Paper, clients=12, num_clusters=2, rebalance_min=4)
    others = [(0, 0.0)] * 3 + [(1, 1.0)] * 8
    here, _ = expected(plan, [(0, -1.0), *others])
    gone, _ = expected(plan, [None, *others])
    np.testing.assert_allclose(gone - here, [2, -1], atol=1e-5)
    assert np.linalg.norm(gone - here) == pytest.approx(math.sqrt(5), abs=1e-5)


def test_one_member_fewer_takes_a_donor_out_of_the_pool():
    plan = quiet(Paper, clients=100, num_clusters=4, rebalance_min=12)
    rest = [(0, 1.0)] * 11 + [(2, -1.0)] * 88
    gone, _ = expected(plan, [None, *rest])
    np.testing.assert_allclose(gone, [10, -12, -63, -12], rtol=1e-5)  # 11 members and one from the only donor
    here, drawn = expected(plan, [(0, 1.0), *rest])
    assert (drawn.assigned[0, :12] != 0).any()  # with twelve members it was a donor itself
    assert here[1] + here[3] > -24


def test_the_donor_flip_costs_delta_a_quarter_where_a_hundred_thousandth_is_claimed():
    """True delta at epsilon 4.38 of the example above at sigma_theta = 1, by its exact densities."""
    assert gaussian_delta(1.0, 4.38) == pytest.approx(1e-5, rel=0.1)
    weights, centres = [], []
    for a in range(13):  # members of cluster 0 that go to cluster 1, and to cluster 3
        for b in range(13 - a):
            ways = (
                comb(12, a) * comb(88, 12 - a) / comb(100, 12) * comb(12 - a, b) * comb(76 + a, 12 - b) / comb(88, 12)
            )
            weights.append(ways)
            centres.append([12 - a - b, -12 + 2 * a, -64 + a + b, -12 + 2 * b])
    assert sum(weights) == pytest.approx(1)
    centres, noise = np.array(centres, float), 2.0
    rng = np.random.default_rng(0)
    draws = centres[rng.choice(len(weights), 20_000, p=weights)] + noise * rng.standard_normal((20_000, 4))

    def log_density(centre):
        return -((draws - centre) ** 2).sum(axis=1) / (2 * noise**2)

    here = logsumexp(np.stack([log_density(c) for c in centres]), axis=0, b=np.array(weights)[:, None])
    loss = here - log_density(np.array([10.0, -12.0, -63.0, -12.0]))
    true = np.mean(np.maximum(0.0, 1 - np.exp(4.38 - loss)))
    assert true == pytest.approx(0.2525, abs=0.01)  # the standard error is 0.003


def test_a_true_count_as_divisor_tells_one_client_by_hundreds_of_nats():
    """Divergence of the noise alone, divided by 11 or by 12, in 100,000 dimensions."""
    ratio = (12 / 11) ** 2
    assert 1e5 / 2 * (ratio - 1 - math.log(ratio)) == pytest.approx(803, abs=1)


def test_the_two_releases_of_a_round_are_one_event():
    """Sampling them separately would hide that they see the same cohort: it reports less than is spent."""
    for share, noise in ((0.5, 1.0), (0.04, 1.1)):
        two = [Event(0.1, noise / math.sqrt(share)), Event(0.1, noise / math.sqrt(1 - share))]
        true = epsilon({Event(0.1, noise): 100}, 1e-5)
        assert epsilon(two * 100, 1e-5) < true - 0.01


def test_an_absent_client_at_fixed_m_is_not_covered_by_the_population_bound():
    """Why rr-slot is charged by the symmetrised profile (docs/privacy.md, theorem 2).

    The others send (1, 0), client A sends (0, 1), and its empty slot (0, 0). In the direction "absent to there" the
    pair (Q, (1-q) Q + q P) has no loss above -log(1 - q); the mechanism has.
    """
    q, a, loss = 0.5, 2.0, 1.0  # a: an update over the noise's standard deviation
    assert loss > -math.log(1 - q)
    axis = np.linspace(-8, 10, 1201)
    x, y = np.meshgrid(axis, axis)

    def density(cx, cy):
        return np.exp(-((x - cx) ** 2 + (y - cy) ** 2) / 2) / (2 * math.pi)

    another, there, absent = density(a, 0), density(0, a), density(0, 0)
    with_a, without = (1 - q) * another + q * there, (1 - q) * another + q * absent
    delta = np.maximum(without - math.exp(loss) * with_a, 0).sum() * (axis[1] - axis[0]) ** 2
    population = np.maximum(another - math.exp(loss) * ((1 - q) * another + q * there), 0).max()
    assert population == 0
    assert delta > 0.14
    # The symmetrised profile at the larger shift, 2C, covers it.
    inner = math.log(1 + math.expm1(loss) / q)
    assert delta < q * gaussian_delta(2 * a, inner)
