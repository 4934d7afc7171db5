"""What must hold for every input: accountants, clipping, the redraw matrix, and the moves of members."""

import math

import numpy as np
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from coterie.audit.comparisons import TheoremAccountant
from coterie.audit.printed import large_members
from coterie.privacy import Event, PrivacyError, calibrate, clip, composed, epsilon, redraw_matrix
from coterie.privacy.clipping import clip_to_unit
from coterie.privacy.mechanisms import Joint, RRSlot, move_members
from coterie.privacy.mechanisms.rebalancing import surplus_members

many = settings(max_examples=250)

WAYS = [("pld", "poisson"), ("pld", "fixed"), ("rdp", "poisson"), ("rdp", "fixed"), ("theorem-4.2", "fixed")]
every_way = pytest.mark.parametrize(("accountant", "sampler"), WAYS, ids=["-".join(way) for way in WAYS])


def few(accountant, sampler, examples=8):
    """Renyi bounds of fixed-size sampling take a quarter of a second an event; shrinking would take minutes."""
    slow = (accountant, sampler) == ("rdp", "fixed")
    unshrunk = (Phase.explicit, Phase.generate)
    return settings(phases=unshrunk, max_examples=max(1, examples // 4) if slow else examples)


DELTA = 1e-5
# Below 1/2, so that twice as many are not yet all: at q = 1 the Renyi bound of fixed size becomes another, tighter one.
rates = st.floats(0.01, 0.45)
noises = st.floats(0.6, 10)
rounds_run = st.integers(1, 100)
# Rounding of sums in another order.
SLACK = {"rel": 1e-6, "abs": 1e-4}


# ---- accountants ------------------------------------------------------------------------------------------


@every_way
def test_less_noise_more_clients_and_more_rounds_cost_more(accountant, sampler):
    """A tenth more of anything is more than rounding; only what is free already may stay free."""

    def cost(rate, noise, rounds):
        return epsilon({Event(rate, noise, sampler): rounds}, DELTA, accountant)

    @few(accountant, sampler)
    @given(rate=rates, noise=noises, rounds=rounds_run, factor=st.floats(1.1, 2))
    def holds(rate, noise, rounds, factor):
        base = cost(rate, noise, rounds)
        assert 0 <= base < math.inf
        for more in (
            cost(rate, noise / factor, rounds),
            cost(rate * factor, noise, rounds),
            cost(rate, noise, math.ceil(rounds * factor)),
        ):
            assert more > base or more == base == 0

    holds()


@every_way
def test_calibration_meets_its_target_and_no_more(accountant, sampler):
    @few(accountant, sampler, 4)
    @given(target=st.floats(0.3, 8), delta=st.floats(1e-6, 1e-3), rate=rates, rounds=rounds_run)
    def holds(target, delta, rate, rounds):
        try:
            noise = calibrate(target, delta, rate, rounds, sampler=sampler, accountant=accountant)
        except PrivacyError:
            # Every other accountant's epsilon falls to 0 as the noise grows.
            assert accountant == "theorem-4.2"
            assert TheoremAccountant.floor(rate, rounds, delta) >= target
            return
        enough, short = (
            epsilon({Event(rate, factor * noise, sampler): rounds}, delta, accountant) for factor in (1, 0.99)
        )
        assert enough <= target < short

    holds()


@every_way
def test_composition_knows_no_order_and_a_count_is_repetition(accountant, sampler):
    kinds = st.lists(
        st.tuples(rates, noises, st.integers(1, 9)), min_size=2, max_size=4, unique_by=lambda kind: kind[:2]
    )

    @few(accountant, sampler)
    @given(kinds=kinds, coins=st.randoms())
    def holds(kinds, coins):
        one_by_one = [Event(rate, noise, sampler) for rate, noise, count in kinds for _ in range(count)]
        coins.shuffle(one_by_one)
        live = composed([], accountant)
        for event in one_by_one:
            live.compose(event)
        at_once = composed([], accountant)
        for rate, noise, count in reversed(kinds):
            at_once.compose(Event(rate, noise, sampler), count)
        assert at_once.epsilon(DELTA) == pytest.approx(live.epsilon(DELTA), **SLACK)
        assert epsilon(one_by_one, DELTA, accountant) == pytest.approx(live.epsilon(DELTA), **SLACK)

    holds()


@every_way
def test_a_further_event_never_lowers_the_cost(accountant, sampler):
    @few(accountant, sampler)
    @given(rate=rates, noise=noises, rounds=rounds_run, other=st.tuples(rates, noises))
    def holds(rate, noise, rounds, other):
        live = composed({Event(rate, noise, sampler): rounds}, accountant)
        more = live.with_rounds(Event(*other, sampler), 1)
        assert more.epsilon(DELTA) >= live.epsilon(DELTA) * (1 - 1e-6)

    holds()


# ---- noise and sensitivity --------------------------------------------------------------------------------


@pytest.mark.parametrize("clip_norm", [5e-324, 1e-310, 1e-200, 1e-6, 0.3, 1e6, 1e200, 1.7e308])
@pytest.mark.parametrize("row", [[3.0, -4.0], [5e-324] * 3, [1.7e308] * 9, [1e308, 5e-324], [0.0, 0.0]], ids=str)
def test_a_clipped_row_in_units_of_the_clipping_norm_is_at_most_one(row, clip_norm):
    (unit,) = clip_to_unit([row], clip_norm)
    assert np.isfinite(unit).all()
    assert np.linalg.norm(unit) <= 1.0
    if math.hypot(*row) > 2 * clip_norm:
        assert np.linalg.norm(unit) > 1 - 2e-6


@pytest.mark.parametrize("kind", [Joint, RRSlot])
@pytest.mark.parametrize("clip_norm", [1e-6, 1e6])
def test_the_noise_over_the_clipping_norm_is_the_same_for_every_clipping_norm(kind, clip_norm):
    """One draw of the noise at two clipping norms: the released sums differ by that factor alone."""

    def drawn(clip_norm):
        plan = kind(
            clients=4, num_clusters=2, sampling_rate=1.0, rounds=1, clip_norm=clip_norm, epsilon=math.inf, delta=1e-5,
            noise_multiplier=1.0, identifier_share=0.2,
        )  # fmt: skip
        contributions = plan.contributions(3)
        for slot in range(4):
            contributions.add(slot, slot % 2, slot % 2, np.full(3, 1e9))
        rngs = (np.random.default_rng(i) for i in range(2))
        return plan.perturb(contributions, *rngs, np.eye(2)).sums / clip_norm

    np.testing.assert_allclose(drawn(clip_norm), drawn(1.0), rtol=1e-12)


# ---- clipping ---------------------------------------------------------------------------------------------

shapes = st.one_of(st.just(()), st.just((0,)), st.just((2, 0, 3)), array_shapes(max_dims=3, max_side=6))
updates = arrays(np.float64, shapes, elements=st.floats(width=64))
# The squares of norms further out leave float64; no clipping norm is out there.
clip_norms = st.floats(1e-150, 1e150)


@given(update=updates, clip_norm=clip_norms)
@example(update=np.full(1000, 1.7e308), clip_norm=1.0)
@example(update=np.full(7, 5e-324), clip_norm=0.5)
@example(update=np.array([1e308, 5e-324]), clip_norm=1e-6)
@example(update=np.array([1.0, math.nan]), clip_norm=2.0)
@example(update=np.array(-math.inf), clip_norm=2.0)
@many
def test_clipping_bounds_every_input_and_keeps_shape_and_direction(update, clip_norm):
    clipped = clip(update, clip_norm)
    assert clipped.dtype == np.float64
    assert clipped.shape == update.shape
    if not np.isfinite(update).all():
        assert not clipped.any()
        return
    norm, length = math.hypot(*clipped.ravel()), math.hypot(*update.ravel())  # hypot neither over- nor underflows
    assert norm <= clip_norm
    if length <= clip_norm * (1 - 2e-6):
        np.testing.assert_array_equal(clipped, update)
        return
    assert norm >= clip_norm * (1 - 2e-6)
    largest = np.abs(update).max()
    direction = update / largest
    np.testing.assert_allclose(clipped / norm, direction / np.linalg.norm(direction), rtol=0, atol=1e-12)


@given(update=updates)
@many
def test_without_a_bound_only_what_is_not_finite_changes(update):
    kept = clip(update, math.inf)
    expected = update if np.isfinite(update).all() else np.zeros(update.shape)
    np.testing.assert_array_equal(kept, expected)


# ---- the redraw matrix ------------------------------------------------------------------------------------

sizes_released = st.lists(
    st.one_of(st.floats(-1e9, 1e9), st.floats(0, 1e-300), st.sampled_from([0.0, -0.0, 0.1, 1.0, 7.3, 1e15])),
    min_size=1,
    max_size=8,
)
minima = st.one_of(st.just(0.0), st.floats(0, 1e9))


@given(histogram=sizes_released, minimum=minima)
@example(histogram=[1e15, 0.0, -1e15], minimum=1e9)
@example(histogram=[-3.0, -2.0], minimum=5.0)
@many
def test_redrawing_fills_every_cluster_from_surplus_alone(histogram, minimum):
    matrix = redraw_matrix(histogram, minimum)
    sizes = np.maximum(histogram, 0.0)
    assert matrix.shape == (len(sizes),) * 2
    assert (matrix >= 0).all()
    np.testing.assert_allclose(matrix.sum(axis=1), 1, rtol=0, atol=1e-12)
    target = min(minimum, math.fsum(sizes) / len(sizes))
    rounding = 1e-9 * sizes.max()
    after = sizes @ matrix
    assert (after >= target - rounding).all()
    assert after.sum() == pytest.approx(sizes.sum(), rel=1e-12)
    moving = matrix * ~np.eye(len(sizes), dtype=bool)
    assert not moving[sizes <= target - rounding].any()
    assert not moving[:, sizes >= target + rounding].any()
    stays = sizes * np.diag(matrix)  # donors keep the target; who is short keeps everything
    assert (stays >= np.minimum(sizes, target) - rounding).all()
    # No more moves than is missing.
    assert (sizes @ moving).sum() == pytest.approx(np.maximum(target - sizes, 0).sum(), rel=1e-6, abs=8 * rounding)


def test_a_deficit_by_rounding_is_none():
    """The mean of three times 0.1 is above 0.1 in float64."""
    np.testing.assert_array_equal(redraw_matrix([0.1, 0.1, 0.1], 1.0), np.eye(3))


# ---- moving members ---------------------------------------------------------------------------------------


@st.composite
def partitions(draw):
    num_clusters = draw(st.integers(1, 6))
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 40)))
    least = draw(st.sampled_from([-1, 0]))
    return num_clusters, draw(arrays(np.int64, shape, elements=st.integers(least, num_clusters - 1)))


def counts(labels, num_clusters):
    return np.array([(labels == j).sum() for j in range(num_clusters)])


def moves(partition, minimum, seed, movable):
    """(before, after, sizes before, sizes after, who moved) of every draw, checked for what any move obeys."""
    num_clusters, labels = partition
    original = labels.copy()
    moved = move_members(labels, num_clusters, minimum, np.random.default_rng(seed), movable=movable)
    np.testing.assert_array_equal(labels, original)
    assert moved.shape == labels.shape
    for before, after in zip(labels, moved, strict=True):
        np.testing.assert_array_equal(after == -1, before == -1)
        assert after.max() < num_clusters
        old, new = counts(before, num_clusters), counts(after, num_clusters)
        assert old.sum() == new.sum()
        went = before != after
        # From those with B or more to those with less, and never past B.
        assert (old[before[went]] >= minimum).all()
        assert (old[after[went]] < minimum).all()
        short = old < minimum
        assert (new[short] >= old[short]).all()
        assert (new[short] <= minimum).all()
        if num_clusters * minimum <= old.sum():
            assert (new[short] == minimum).all()
        yield old, new, went


@given(partition=partitions(), minimum=st.integers(0, 12), seed=st.integers(0, 2**32))
@many
def test_protected_moves_take_surplus_alone(partition, minimum, seed):
    num_clusters = partition[0]
    for old, new, went in moves(partition, minimum, seed, movable=surplus_members):
        large = old >= minimum
        assert (new[large] >= minimum).all()
        surplus, missing = np.maximum(old - minimum, 0).sum(), np.maximum(minimum - old, 0).sum()
        assert went.sum() == min(surplus, missing)  # what is needed or all there is, nobody else
        if num_clusters * minimum <= old.sum():
            assert (new >= minimum).all()


@given(partition=partitions(), minimum=st.integers(1, 12), seed=st.integers(0, 2**32))
@many
def test_as_printed_anybody_in_a_cluster_of_b_may_be_drawn(partition, minimum, seed):
    for old, _, went in moves(partition, minimum, seed, movable=large_members):
        pool, missing = old[old >= minimum].sum(), np.maximum(minimum - old, 0).sum()
        assert went.sum() == min(pool, missing)


@pytest.mark.parametrize("movable", [surplus_members, large_members])
@given(partition=partitions(), minimum=st.integers(1, 12), seed=st.integers(0, 2**32), coins=st.randoms())
@settings(max_examples=100)
def test_moves_follow_from_labels_and_coins(movable, partition, minimum, seed, coins):
    """Two worlds with the same noisy labels and coins have the same partition: the lemma of rr-slot needs it."""
    num_clusters, labels = partition

    def run(labels):
        return move_members(labels, num_clusters, minimum, np.random.default_rng(seed), movable=movable)

    np.testing.assert_array_equal(run(labels), run(labels.copy()))
    # What happens in one draw does not depend on another draw's labels.
    other = labels.copy()
    other[1:] = coins.randrange(num_clusters)
    np.testing.assert_array_equal(run(labels)[0], run(other)[0])
