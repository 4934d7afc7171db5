"""Features and networks treat every record by itself: functions that mix records are refused, others pass."""

import time

import numpy as np
import pytest
import torch
from kit.mixing_networks import APART, FOUND_BY_OUTPUTS, FirstBatch, Net
from kit.tables import for_rows
from kit.tiers import mark_slow
from torch import nn

from coterie.models import FEATURES, MODELS, ModelError, build, checks, features, initialise
from coterie.models.fixed import CustomFeatures

SHAPE = (2, 5, 6)


def rows(x):
    return x.reshape(len(x), -1)


def beside(x, columns):
    """The images, and (n, m) columns behind them, as float32 features (n, C', 1, 1)."""
    return np.concatenate([rows(x), np.asarray(columns, x.dtype).reshape(len(x), -1)], axis=1)[:, :, None, None]


def blank(x):
    return (rows(x) == 0).all(axis=1).sum()


def last(x):
    return rows(x).mean(axis=1)


class RunningMean:
    """Subtracts a mean over all images of all calls."""

    def __init__(self):
        self.total, self.count = 0.0, 0

    def __call__(self, x):
        self.total, self.count = self.total + x.sum(axis=0), self.count + len(x)
        return (x - self.total / self.count).astype(x.dtype)


class OtherBatches:
    """Adds the mean of the last batch of another size, so two equal calls in a row agree."""

    def __init__(self):
        self.own = self.other = np.zeros(1)

    def __call__(self, x):
        if len(x) != len(self.own):
            self.own, self.other = x, self.own
        self.own = x
        return beside(x, np.full(len(x), self.other.mean()))


def noise(x):
    return x + np.random.default_rng().random(x.shape).astype(x.dtype)


def small_batch_mean(x):
    return beside(x * x.dtype.type(1e6), last(x) + x.mean())


def clipped(x):
    return np.minimum(x, np.quantile(x, 0.97)).astype(x.dtype)


def whitened(x):
    centred = rows(x) - rows(x).mean(axis=0)
    return np.linalg.svd(centred, full_matrices=False)[0].astype(x.dtype)[:, :4, None, None] * 1


def softmax(x):
    power = np.exp(x)
    return power / power.sum(axis=0)


def copies(x):
    return beside(x, [(rows(x) == row).all(axis=1).sum() for row in rows(x)])


def float32_batch_mean(x):
    values = torch.as_tensor(x, dtype=torch.float32)
    return torch.cat([1e6 * values, values + values.mean(0)], dim=1).numpy()


def faint_in_float64(x):
    """A share of 1e-7 of other images' mean, which rounding hides in float32."""
    return beside(x, last(x) + 2 + 1e-7 * x.mean())


MIXING = {
    "a batch mean in a small column": small_batch_mean,
    "the same, in float32 only": float32_batch_mean,
    "a faint batch mean": faint_in_float64,
    "batch normalisation": lambda x: (x - x.mean(axis=(0, 2, 3), keepdims=True)) / x.std(axis=(0, 2, 3), keepdims=True),
    "batch normalisation by torch": lambda x: nn.functional.batch_norm(
        torch.as_tensor(x), None, None, training=True
    ).numpy(),
    "rank": lambda x: beside(x, last(x).argsort().argsort()),
    "maximum of the batch": lambda x: x / np.abs(x).max(),
    "batch size": lambda x: beside(x, np.full(len(x), len(x))),
    "position": lambda x: beside(x, np.arange(len(x))),
    "cumulative sum": lambda x: x.cumsum(axis=0),
    "difference of neighbours": lambda x: x - np.roll(x, 1, axis=0),
    "difference to the next": lambda x: beside(x, np.append(np.diff(last(x)), 0)),
    "number of copies": copies,
    "first of its copies": lambda x: beside(x, np.isin(np.arange(len(x)), np.unique(rows(x), True, axis=0)[1])),
    "clipped at a quantile": clipped,
    "only beside a bright image": lambda x: x * x.dtype.type(0.5 if x.mean(axis=(1, 2, 3)).max() > 0.9 else 1),
    "only beside a blank image": lambda x: x * x.dtype.type(0.5 if blank(x) else 1),
    "softmax over the batch": softmax,
    "whitened": whitened,
    "one element of the batch": lambda x: beside(x, np.broadcast_to(x[0, 0, 0, 0], len(x))),
    "alone": lambda x: x * x.dtype.type(0.5 if len(x) == 1 else 1),
    "in pairs": lambda x: x * x.dtype.type(0.5 if len(x) == 2 else 1),
    "position in blocks of eight": lambda x: beside(x, (np.arange(len(x)) % 8 == 1) & (len(x) > 7)),
    "beside one blank image": lambda x: x * x.dtype.type(0.5 if blank(x) == 1 else 1),
    "beside three blank images": lambda x: x * x.dtype.type(0.5 if blank(x) > 2 else 1),
    "NaN beside a blank image": lambda x: x * x.dtype.type(np.nan if blank(x) else 1),
    "shared exponent": lambda x: x / 2 ** np.ceil(np.log2(np.abs(x).max())),
    "a batch mean beside a large offset": lambda x: beside(x, last(x) + x.dtype.type(1e6) + x.mean() / 100),
    "only in large batches": lambda x: x - x.mean(axis=0) if len(x) > 17 else x,
}


@for_rows("function", MIXING.values(), ids=MIXING)
def test_features_that_mix_images_are_refused(function):
    message = r"the function is not row-wise: feature \(\d+, \d+, \d+\) of an image changes with .*: use"
    with pytest.raises(ModelError, match=message):
        CustomFeatures("a:f", function)(np.zeros((0, *SHAPE), np.float32))


@pytest.mark.parametrize("function", [noise, RunningMean(), OtherBatches()], ids=["noise", "running mean", "state"])
def test_features_that_change_between_calls_are_refused(function):
    with pytest.raises(ModelError, match=r"returns different values for equal images: .* no state between calls"):
        CustomFeatures("a:f", function)(np.zeros((0, *SHAPE), np.float32))


def test_the_message_names_the_feature():
    def second_of_three(x):
        return np.stack([x[:, 0] * 1e6, x[:, 1] + (np.arange(30) == 17).reshape(5, 6) * x.mean(), x[:, 0]], axis=1)

    with pytest.raises(ModelError, match=r"feature \(1, 2, 5\) of an image changes with one other image: use const"):
        CustomFeatures("a:f", lambda x: second_of_three(x).astype(x.dtype))(np.zeros((0, *SHAPE), np.float32))


def normalised(x):
    """Each image by itself; a constant one becomes NaN."""
    return (x - x.mean(axis=(1, 2, 3), keepdims=True)) / x.std(axis=(1, 2, 3), keepdims=True)


WEIGHTS = np.random.RandomState(1).standard_normal((60, 40))
KERNEL = torch.as_tensor(np.random.RandomState(2).standard_normal((9, 2, 3, 3)))


def float32_only(x):
    assert x.dtype == np.float32
    return (np.tanh(rows(x) @ WEIGHTS.astype(np.float32)) @ WEIGHTS[:40].astype(np.float32))[:, :, None, None]


def cast(x):
    """Computes in float32 and returns the type of its input."""
    return float32_only(x.astype(np.float32)).astype(x.dtype)


def partly_cast(x):
    return cast(x) + (rows(x) @ WEIGHTS.astype(x.dtype))[:, :, None, None]


def fixed_batch_norm(x):
    norm = nn.BatchNorm2d(2).to(torch.as_tensor(x).dtype).eval()
    norm.running_mean.fill_(0.3)
    with torch.no_grad():
        return norm(torch.as_tensor(x)).numpy()


def scales(x):
    return np.concatenate([np.tanh(1e4 * x[:, :1]), 1e6 * x, 1e-6 * x, 0 * x], axis=1).astype(x.dtype)


def deep(x):
    hidden = torch.as_tensor(x)
    hidden = nn.functional.conv2d(hidden, KERNEL.to(hidden.dtype), padding=1)
    for _ in range(12):
        hidden = nn.functional.conv2d(hidden.sin(), KERNEL[:, :1].to(hidden.dtype).repeat(1, 9, 1, 1), padding=1)
    return hidden.numpy()


def rounding_noise(x):
    return beside(x, (rows(x) - rows(x).mean(axis=1, keepdims=True)).mean(axis=1))


ROW_WISE = {
    "linear": lambda x: (rows(x) @ WEIGHTS.astype(x.dtype))[:, :, None, None],
    "convolution": lambda x: nn.functional.conv2d(torch.as_tensor(x), KERNEL.to(torch.as_tensor(x).dtype)).numpy(),
    "channels of many scales": scales,
    "float32 only": float32_only,
    "cast to float32": cast,
    "partly cast to float32": partly_cast,
    "fixed batch normalisation": fixed_batch_norm,
    "constants": lambda x: np.where(np.arange(60).reshape(SHAPE) % 2, x, 0.1).astype(x.dtype),
    "each image by itself": normalised,
    "deep and steep": deep,
    "rounding noise": rounding_noise,
    "large offset": lambda x: beside(x, last(x) + x.dtype.type(1e6)),
    "rounded": lambda x: np.round(16 * x) / 16,
    "sorted": lambda x: np.sort(x, axis=3),
    "one image at a time": lambda x: np.array([np.linalg.svd(one, compute_uv=False) for one in x])[..., None],
}


@for_rows("function", ROW_WISE.values(), ids=ROW_WISE)
def test_features_that_treat_every_image_by_itself_pass(function):
    apply = CustomFeatures("a:f", function)
    x = np.random.RandomState(3).uniform(-1, 1, (7, *SHAPE)).astype(np.float32)
    np.testing.assert_array_equal(apply(x), function(x))


@for_rows("shape", [(1, 28, 28), (3, 32, 32), (1, 7, 9)])
@for_rows("name", FEATURES)
def test_built_in_features_pass(name, shape):
    start = time.process_time()
    assert CustomFeatures("a:f", features(name))(np.zeros((2, *shape), np.float32)).shape[0] == 2
    assert time.process_time() - start < 5  # a second on an idle machine


# ---- networks -------------------------------------------------------------------------------------------------------


@pytest.fixture
def check(monkeypatch):
    """Checks what a function builds as a user's network of 6 numbers and 4 classes."""

    def check(make):
        monkeypatch.setattr(checks, "build", lambda name, shape, classes: make())
        checks.check_network("a:f", (6,), 4, "vectors")

    return check


@pytest.mark.parametrize("make", FOUND_BY_OUTPUTS.values(), ids=FOUND_BY_OUTPUTS)
def test_networks_that_mix_examples_are_refused(check, make):
    with pytest.raises(ModelError, match=r"'a:f': output \d of an example changes with .*; replace batch norm"):
        check(make)


def test_a_network_that_keeps_its_first_batch_is_refused(check):
    with pytest.raises(ModelError, match=r"two calls with the same examples differ; .* state between calls"):
        check(lambda: Net(FirstBatch()))


PASSING = ("two layers", "float32 only", "of several scales", "steep", "normalised layer", "overflow", "cast")


@pytest.mark.parametrize("make", [APART[name][0] for name in PASSING], ids=PASSING)
def test_networks_that_treat_every_example_by_itself_pass(check, make):
    check(make)


BUILT_IN = [(name, kind) for name, info in MODELS.items() for kind in info.takes]


@pytest.mark.parametrize(("name", "kind"), mark_slow(BUILT_IN, {("resnet18-gn", "images")}))
def test_built_in_networks_pass_with_other_parameters_too(monkeypatch, name, kind):
    """They are not checked in runs; here they are."""
    shape = {"images": (3, 16, 16), "vectors": (6,), "tokens": (20,)}[kind]
    classes = 0 if MODELS[name].outputs == ("number",) else 10
    monkeypatch.setattr(checks, "is_tested", lambda name: False)
    start = time.process_time()
    checks.check_network(name, shape, classes, kind)
    assert time.process_time() - start < 20  # a second on an idle machine, 5 for resnet18-gn
    assert initialise(name, shape, classes, 1).keys() == dict(build(name, shape, classes).named_parameters()).keys()
