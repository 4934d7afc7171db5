import numpy as np
import pytest
from kit.tables import for_rows

from coterie.datasets import LINES, SHIFTS, DataError

RNG = np.random.default_rng(0)
X = RNG.random((6, 2, 9, 9), dtype=np.float32)
Y = RNG.integers(10, size=6)


def shifted(name, group, num_groups, *, x=X, y=Y, num_classes=10, seed=0):
    return SHIFTS[name](x, y, group, num_groups, num_classes, seed)


@for_rows("name", sorted(set(SHIFTS) - {"lines"}))
def test_group_zero_is_untouched_and_inputs_stay(name):
    x, y = X.copy(), Y.copy()
    for group in (0, 3):
        new_x, new_y = shifted(name, group, 4, x=x, y=y)
        assert (new_x.dtype, new_y.dtype) == (np.float32, np.int64)
        assert (new_x.shape, new_y.shape) == (X.shape, Y.shape)
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(y, Y)
    zero_x, zero_y = shifted(name, 0, 4)
    np.testing.assert_array_equal(zero_x, X)
    np.testing.assert_array_equal(zero_y, Y)


def test_quarter_turns_are_exact_and_counter_clockwise():
    image = np.array([[1, 2], [3, 4]], np.float32)[None, None]
    turned = [shifted("rotation", g, 4, x=image, y=Y[:1])[0][0, 0].tolist() for g in range(4)]
    assert turned == [[[1, 2], [3, 4]], [[2, 4], [1, 3]], [[4, 3], [2, 1]], [[3, 1], [4, 2]]]
    half, labels = shifted("rotation", 1, 2, x=image, y=Y[:1])
    assert half[0, 0].tolist() == [[4, 3], [2, 1]]
    np.testing.assert_array_equal(labels, Y[:1])


def test_other_angles_turn_the_same_way_about_the_centre():
    """A dot right of the centre goes to the upper right by 360/8 = 45 degrees, to the upper left by 360/3."""
    image = np.zeros((1, 1, 21, 21), np.float32)
    image[0, 0, 9:12, 16:19] = 1
    for group, num_groups, degrees in ((1, 8, 45), (1, 3, 120), (2, 3, 240)):
        turned = shifted("rotation", group, num_groups, x=image, y=Y[:1])[0][0, 0]
        rows, columns = np.mgrid[:21, :21] - 10
        centre = np.array([(turned * columns).sum(), -(turned * rows).sum()]) / turned.sum()
        angle = np.radians(degrees)
        np.testing.assert_allclose(centre, [7 * np.cos(angle), 7 * np.sin(angle)], atol=0.1)
        np.testing.assert_allclose(turned.sum(), 9, rtol=0.05)


def test_quarter_turns_of_oblong_images_keep_the_frame():
    oblong = RNG.random((2, 1, 4, 6), dtype=np.float32)
    assert shifted("rotation", 1, 4, x=oblong, y=Y[:2])[0].shape == oblong.shape
    np.testing.assert_array_equal(shifted("rotation", 2, 4, x=oblong, y=Y[:2])[0], oblong[:, :, ::-1, ::-1])


def test_rotation_90_ignores_the_number_of_groups():
    for group in range(3):
        np.testing.assert_array_equal(shifted("rotation-90", group, 3)[0], shifted("rotation", group, 4)[0])
    with pytest.raises(DataError, match="4 distinct groups, not 5"):
        shifted("rotation-90", 0, 5)


def test_label_permutations_are_distinct_fixed_by_the_seed_and_independent_of_the_group_asked_first():
    labels = np.arange(10)
    images = np.zeros((10, 1, 1, 1), np.float32)
    maps = [tuple(shifted("label-permutation", g, 6, x=images, y=labels, seed=3)[1]) for g in range(6)]
    assert maps[0] == tuple(range(10))
    assert len(set(maps)) == 6
    assert all(sorted(m) == list(range(10)) for m in maps)
    assert maps == [tuple(shifted("label-permutation", g, 6, x=images, y=labels, seed=3)[1]) for g in range(6)]
    assert maps[1:] != [tuple(shifted("label-permutation", g, 6, x=images, y=labels, seed=4)[1]) for g in range(1, 6)]


def test_label_permutations_use_up_all_there_are_and_no_more():
    """Three classes have 3! = 6 permutations: independent draws would almost surely repeat one."""
    labels, images = np.arange(3), np.zeros((3, 1, 1, 1), np.float32)
    arguments = {"x": images, "y": labels, "num_classes": 3}
    assert len({tuple(shifted("label-permutation", g, 6, **arguments)[1]) for g in range(6)}) == 6
    with pytest.raises(DataError, match="fewer than 7 permutations"):
        shifted("label-permutation", 0, 7, **arguments)


def test_label_shift_wraps():
    images = np.zeros((4, 1, 1, 1), np.float32)
    assert shifted("label-shift", 3, 4, x=images, y=np.array([0, 6, 7, 9]))[1].tolist() == [3, 9, 0, 2]
    with pytest.raises(DataError, match="10 distinct groups, one per class, not 11"):
        shifted("label-shift", 0, 11)


def test_lines_are_added_to_the_targets():
    x, noise = np.array([[-1], [0], [0.5]], np.float32), np.array([0.25, 0, -1], np.float32)
    for group, (slope, intercept) in enumerate(LINES):
        new_x, y = shifted("lines", group, 4, x=x, y=noise, num_classes=0)
        np.testing.assert_array_equal(new_x, x)
        np.testing.assert_array_equal(y, [intercept - slope + 0.25, intercept, intercept + slope / 2 - 1])
        assert y.dtype == np.float32
    assert noise.tolist() == [0.25, 0, -1]


@for_rows(
    ("name", "arguments", "complaint"),
    [
        ("rotation", {"x": np.zeros((6, 4), np.int64)}, r"'rotation' requires images, not examples of shape \(4,\)"),
        ("rotation-90", {"x": np.zeros((6, 4), np.float32)}, "'rotation-90' requires images"),
        ("label-shift", {"num_classes": 0}, "'label-shift' requires labels of classes"),
        ("label-permutation", {"num_classes": 0}, "'label-permutation' requires labels"),
        ("lines", {}, r"'lines' requires points with real targets, .* not examples of shape \(2, 9, 9\) in 10 classes"),
        ("lines", {"x": np.zeros((6, 2), np.float32), "num_classes": 0}, r"'lines' .* of shape \(2,\) in 0 classes"),
        ("lines", {"x": np.zeros((6, 1), np.float32)}, r"'lines' .* of shape \(1,\) in 10 classes"),
        (
            "lines",
            {"x": X[:, 0, 0, :1], "y": X[:, 0, 0, 0], "num_classes": 0, "num_groups": 5},
            "shift 'lines' has 4 distinct groups, not 5",
        ),
    ],
)
def test_a_shift_that_does_not_fit_the_data_is_refused(name, arguments, complaint):
    with pytest.raises(DataError, match=complaint):
        shifted(name, 0, **{"num_groups": 1, **arguments})


def test_labels_of_tokens_can_be_shifted():
    tokens = np.zeros((6, 4), np.int64)
    x, y = shifted("label-shift", 1, 2, x=tokens)
    assert x is tokens
    np.testing.assert_array_equal(y, (Y + 1) % 10)


def test_rotation_and_permutation_combines_both():
    for group in range(6):
        x, y = shifted("rotation-and-permutation", group, 6, seed=3)
        np.testing.assert_array_equal(x, shifted("rotation", group, 6)[0])
        np.testing.assert_array_equal(y, shifted("label-permutation", group, 6, seed=3)[1])
