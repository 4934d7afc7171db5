import hashlib

import numpy as np
import pytest
from kit.tables import for_rows

from coterie.datasets import DATASETS, LINES, DataError, Partition, federate, load


@pytest.mark.parametrize(("name", "deviation"), [("lines-easy", 0.1), ("lines-hard", 1.0)])
def test_points_are_uniform_with_noise(name, deviation):
    """Means and deviations of 40,000 values are within 5 standard errors; the generator's stream is frozen."""
    source, info = load(name), DATASETS[name]
    assert (source.train_x.shape, source.test_x.shape) == ((info.train_size, 1), (info.test_size, 1))
    assert (source.train_x.dtype, source.train_y.dtype, source.num_classes) == (np.float32, np.float32, 0)
    x, y = source.train_x[:, 0].astype(float), source.train_y.astype(float)
    n = len(x)
    assert -1 <= x.min() < -0.999 < 0.999 < x.max() <= 1
    assert abs(x.mean()) < 5 / np.sqrt(3 * n)
    assert abs(y.mean()) < 5 * deviation / np.sqrt(n)
    assert abs(y.std() / deviation - 1) < 5 / np.sqrt(2 * n)
    assert abs(np.corrcoef(x, y)[0, 1]) < 5 / np.sqrt(n)
    assert not np.array_equal(x[: len(source.test_x)], source.test_x[:, 0])


def test_points_never_change():
    """Results are compared between versions."""
    assert hashlib.sha256(load("lines-easy").train_x.tobytes()).hexdigest()[:16] == "80bf6ff578e5bdd4"


@pytest.mark.parametrize("groups", ["4", "4:2:1:1"])
def test_each_group_has_its_line(groups):
    federation = federate("lines-easy", Partition(clients=16, groups=groups, shift="lines"))
    for i in range(16):
        shard = federation.shard(i)
        for part in (shard, shard.test):
            assert (part.x.dtype, part.y.dtype) == (np.float32, np.float32)
            slope, intercept = np.polyfit(part.x[:, 0], part.y, 1)
            np.testing.assert_allclose([slope, intercept], LINES[shard.group], atol=0.02)  # 5 standard errors: 0.018
    if groups == "4:2:1:1":
        assert np.bincount(federation.group_of).tolist() == [8, 4, 2, 2]


def test_lines_are_well_separated():
    for i, (slope, intercept) in enumerate(LINES):
        for other_slope, other_intercept in LINES[:i]:
            gap = (slope - other_slope) ** 2 / 3 + (intercept - other_intercept) ** 2  # mean squared, x in [-1, 1]
            assert gap >= 4


@for_rows(
    ("dataset", "shift", "groups", "complaint"),
    [
        ("lines-easy", "lines", "5", "shift 'lines' has 4 distinct groups, not 5"),
        ("digits", "lines", "4", "shift 'lines' requires points with real targets"),
        ("lines-easy", "rotation", "4", r"'rotation' requires images, not examples of shape \(1,\)"),
        ("lines-easy", "rotation-90", "1", "'rotation-90' requires images"),
        ("lines-hard", "label-shift", "4", "'label-shift' requires labels of classes"),
        ("lines-hard", "label-permutation", "4", "'label-permutation' requires labels"),
    ],
)
def test_shifts_that_do_not_fit_are_refused(dataset, shift, groups, complaint):
    with pytest.raises(DataError, match=complaint):
        federate(dataset, Partition(clients=20, shift=shift, groups=groups))
