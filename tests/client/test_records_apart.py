"""A record's gradient is that of a batch of one: networks that mix records move no clipped sum by more than c."""

import copy
import time

import numpy as np
import pytest
import torch
from mixing_networks import APART, IMAGES, MIXING, TOKENS, VECTORS, FirstBatch, Net
from torch import nn
from torch.nn import functional
from torch.nn.functional import cross_entropy

from coterie import models as networks
from coterie.client import dpsgd, records_apart
from coterie.client.backend import Examples
from coterie.client.dpsgd import DPSGD, BatchesOfOne, check_supported, train_privately
from coterie.client.ghost import GhostClipping
from coterie.client.record_level import _apart, held_out_counts
from coterie.client.records_apart import apart, traced
from coterie.client.scores import example_losses
from coterie.datasets import Shard, TestSet, Units
from coterie.models import ModelError, float32_arrays, set_training, trainable
from coterie.tasks import task_of
from coterie.wire.messages import Layout

CLASSES = 4
#: Numbers of records beside the one that is added.
SIZES = (1, 2, 4, 16)
#: Small enough that every gradient is clipped, whatever the network makes of it.
CLIP = 1e-4
ALL = {**{name: (make, VECTORS) for name, make in MIXING.items()}, **APART}


def built(name):
    torch.manual_seed(1)
    make, shape = ALL[name]
    return make(), shape


def examples_of(shape):
    return Examples(shape, torch.int64 if shape == TOKENS else torch.float32, torch.int64, "cpu")


def records(shape, size, seed):
    """Records of several scales, two of them equal, and their classes."""
    drawn = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (size,), generator=drawn)
    if shape == TOKENS:
        return torch.randint(CLASSES, (size, *shape), generator=drawn), y
    x = torch.randn(size, *shape, generator=drawn) * 3.0 ** (torch.arange(size) % 3 - 1).reshape(-1, *[1] * len(shape))
    x[-1] = x[0]
    return x, y


def loss_of(outputs, y):
    """Cross-entropy with the class of a record; of a critic, a function of its output."""
    return cross_entropy(outputs, y, reduction="none") if outputs.shape[1] > 1 else outputs.flatten().square()


def clipper_of(network, shape):
    return dpsgd._clipper(network, examples_of(shape), loss_of, True)


def moves(clipper, shape):
    """By how much one record, also an extreme one, moves clipped sums in units of c, for batches of several sizes."""
    for size in SIZES:
        for seed, factor in ((1, 1.0), (2, 0.0), (4, 1e8)):
            x, y = records(shape, size + 1, seed)
            if x.is_floating_point():
                x[size // 2] *= factor
            others = torch.arange(size + 1) != size // 2
            sums = [clipper.clipped_sum(x[chosen], y[chosen], CLIP)[0] for chosen in (others, others | True)]
            yield float((sums[0] - sums[1]).norm())


def test_there_are_forty_networks_of_either_kind():
    assert len(MIXING) >= 40
    assert len(APART) >= 40


#: Networks that mix and are refused, and why. All others that mix have the gradient of a batch of one.
REFUSED = {
    "batch normalisation": "no gradient for a batch of one record: Expected more than 1 value",
    "records as channels": "no gradient for a batch of one record: Expected more than 1 spatial element",
    "running mean, a buffer": "'hidden.mean' of Net changes in training",
    "layer of batch normalisation": r"layer '1' \(BatchNorm1d\) mixes the records",
}


@pytest.mark.parametrize("name", ALL)
def test_a_record_moves_no_clipped_sum_by_more_than_c(name):
    """Through any client that accepts the network."""
    network, shape = built(name)
    if name in REFUSED:
        with pytest.raises(ModelError, match=REFUSED[name]):
            clipper_of(network, shape)
        return
    assert max(moves(clipper_of(network, shape), shape)) <= 1 + 1e-5


@pytest.mark.parametrize("name", [name for name in ALL if name not in REFUSED])
def test_the_gradient_of_a_record_is_that_of_a_batch_of_one(name):
    network, shape = built(name)
    x, y = records(shape, 5, 5)
    clipper = clipper_of(network, shape)
    clipper.set_values({key: value.detach() for key, value in trainable(network).items()})
    rows = torch.stack([lone_gradient(network, x[i : i + 1], y[i : i + 1]) for i in range(len(x))])
    norms = rows.norm(dim=1)
    clip_norm = max(float(norms.median()), 1e-6)
    expected = (rows / norms.clamp(min=clip_norm)[:, None]).sum(0)
    total = clipper.clipped_sum(x, y, clip_norm)[0]
    assert float((total - expected).norm()) <= 1e-3 * float(expected.norm()) + 1e-6


def lone_gradient(network, x, y):
    """(d,) float64 gradient of a batch, by autograd on a new copy of the network."""
    network = copy.deepcopy(network)
    set_training(network)
    values = list(trainable(network).values())
    gradients = torch.autograd.grad(loss_of(network(x), y).sum(), values, allow_unused=True, materialize_grads=True)
    return torch.cat([gradient.flatten() for gradient in gradients]).double()


#: How networks that treat records apart are clipped, but for those that are traced, and known to ghost norms.
BY_HOOKS = {"parametric ReLU", "root mean square", "normalised images", "upward"}
IN_BATCHES_OF_ONE = {
    "quantile", "one after the other", "heads of attention", "own parameter", "own gradient", "reshaped",
    "norm of a weight", "bilinear", "several inputs", "recurrent", "gated", "tied",
}  # fmt: skip


@pytest.mark.parametrize("name", APART)
def test_the_fast_ways_are_those_of_known_layers(name):
    kinds = {**dict.fromkeys(BY_HOOKS, dpsgd._Opacus), **dict.fromkeys(IN_BATCHES_OF_ONE, BatchesOfOne)}
    assert type(clipper_of(*built(name))) is kinds.get(name, GhostClipping)


def test_dropout_is_refused():
    """A network that is not traced, and has randomness that a vectorised pass does not allow."""
    with pytest.raises(ModelError, match="without dropout"):
        clipper_of(Net(nn.Dropout()), VECTORS)


def test_a_network_that_remembers_outside_of_itself_is_refused():
    memory = [torch.zeros(8)]

    def centred(x):
        memory.append(x.mean(0).detach())
        return x - torch.stack(memory).mean(0)

    with pytest.raises(ModelError, match="without state between calls"):
        clipper_of(Net(centred), VECTORS)


@pytest.mark.parametrize("name", ["mlp-200", "cnn-small", "lstm-char", "recurrent", "gated", "8 bits, one scale"])
def test_a_check_takes_less_than_two_seconds(name):
    clipper_of(*built("own parameter"))  # imports what torch.func needs
    network, shape = built(name)
    start = time.process_time()
    check_supported(network, shape, task_of(CLASSES), "tokens" if shape == TOKENS else "vectors")
    assert time.process_time() - start < 2  # 0.1 s on an idle machine


# ---- rounds -----------------------------------------------------------------------------------------------


def shard(size, units=None):
    x, y = (part.numpy() for part in records(VECTORS, size, 3))
    return Shard(0, 0, x, y, TestSet(x[:0], y[:0]), units=units)


def layout_of(network):
    arrays = float32_arrays(network)
    layout = Layout.of(arrays)
    return layout, layout.flatten(arrays)[None]


ROUNDS = ("neighbours", "from three records on", "8 bits, one scale", "more capacity of experts", "last batch")


@pytest.mark.parametrize("name", ROUNDS)
def test_a_round_of_a_network_that_mixes_is_that_of_batches_of_one(name):
    network, data = built(name)[0], shard(6)
    layout, start = layout_of(network)
    rngs = [np.random.default_rng(0)], [np.random.default_rng(1)]
    settings = DPSGD(6, 6, 1, 1.0, CLIP, 0.0, task=task_of(CLASSES))
    (moved,) = train_privately(network, layout, start, [data], *rngs, [settings], batched=True)
    gradients = [
        lone_gradient(network, *(torch.tensor(part[i : i + 1]) for part in (data.x, data.y))).numpy() for i in range(6)
    ]
    expected = -sum(gradient * CLIP / np.linalg.norm(gradient) for gradient in gradients) / 6
    np.testing.assert_allclose(moved, expected, atol=1e-3 * CLIP)


@pytest.mark.parametrize("name", ROUNDS)
def test_a_unit_moves_a_sum_by_its_own_gradient(name):
    """A unit's records are a batch of their own, in which they may mix."""
    network = built(name)[0]
    clipper = dpsgd._clipper(network, examples_of(VECTORS), task_of(CLASSES), True, True)
    clipper.set_values({key: value.detach() for key, value in trainable(network).items()})
    x, y = records(VECTORS, 12, 4)
    x, y = x.reshape(4, 3, 6), y.reshape(4, 3)
    every, others = (clipper.clipped_sum(x[chosen], y[chosen], CLIP)[0] for chosen in (slice(None), slice(1, None)))
    assert float((every - others).norm()) <= 1 + 1e-5
    lone = lone_gradient(network, x[0], y[0])
    assert float((every - others - lone / lone.norm()).norm()) < 1e-3


# ---- losses and scores ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in ALL if name not in REFUSED and name != "critic"])
def test_the_loss_of_a_record_is_that_of_a_batch_of_one(name):
    """A choice among models, and losses that leave the client, clip the loss of each record."""
    network, shape = built(name)
    layout, model = layout_of(network)
    x, y = (part.numpy() for part in records(shape, 7, 6))
    with torch.no_grad():
        lone = [
            float(cross_entropy(copy.deepcopy(network)(torch.tensor(x[i : i + 1])), torch.tensor(y[i : i + 1])))
            for i in range(7)
        ]
    data = Shard(0, 0, x, y, TestSet(x, y))
    losses = example_losses(_apart(network, data, "cpu"), layout, model, data, "cpu", task_of(CLASSES))
    np.testing.assert_allclose(losses[:, 0], lone, rtol=1e-3, atol=1e-4)


def test_a_histogram_counts_the_scores_of_batches_of_one():
    """One record moved the scores of all others, each by a cell of the histogram."""
    network = nn.Sequential(Net(lambda x: x - x.mean(0)), nn.Linear(4, 2))
    layout, model = layout_of(network)
    x, y = (part.numpy() for part in records(VECTORS, 9, 7))
    counts = [
        held_out_counts(network, layout, model, Shard(0, 0, x, y % 2, TestSet(x[held], y[held] % 2)))
        for held in (slice(0, 9), slice(0, 8))
    ]
    assert np.abs(counts[0] - counts[1]).sum() == 1


def test_a_network_that_is_known_is_evaluated_as_it_is():
    network = networks.build("cnn-tiny", IMAGES, CLASSES)
    assert apart(network, examples_of(IMAGES)) is network
    outside = built("neighbours")[0]
    assert apart(outside, examples_of(VECTORS)) is apart(outside, examples_of(VECTORS))


# ---- the trace --------------------------------------------------------------------------------------------


def trace(hidden, shape=VECTORS):
    """The trace of a network with this function between two layers; None if it has none."""
    torch.manual_seed(1)
    return traced(nn.Sequential(nn.Linear(shape[-1], 8), Function(hidden)), examples_of(shape))


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


ONES = torch.ones
#: Arguments after the first of a function, or a method.
ARGUMENTS = [
    (), (0,), (1,), (-1,), (-2,), (2,), ((0, 1),), (1, 0), (1, 2), (2, 0), (2, 1), (0, 1, 2), (1, 1, 2), (-1, 8),
    (0.5,), (-1.0, 1.0), (1, True), ("x",), ("x", "x"), (ONES(8),), (ONES(1, 8),), (ONES(3, 8),), (ONES(8, 8),),
    (ONES(8), ONES(8)), ("x", ONES(8)), (torch.tensor(2.0),), (slice(None),), ((slice(None), 1),), ((slice(1), 1),),
    ((..., 0),), ((slice(None), [0, 2]),), ((slice(None), None),), ((None,),), ((slice(None), ONES(8).bool()),),
    (1, torch.tensor([0, 1])), (0, torch.tensor([0, 1])), (1, "ranks"), (0, "ranks"), (1, (2, 4)), ("n", -1), ("n", 8),
    ("n", 4, 2), (-1, 4), (8, -1), (torch.float64,), ([1, 1],), ([1, 1, 1, 1],), ((8,),), ((5, 8),), (0.0, False),
    (0.5, True), (1, 1, 3), (0, 1, 3), (3, 1, 1), (1, -1), (0, 3, 2, 1), (0, 1, 3, 2), (1, 0, 2, 3),
]  # fmt: skip
#: Further arguments by name.
KEYWORDS = [{}, {"dim": 0}, {"dim": 1}, {"dim": -1}, {"keepdim": True, "dim": 1}, {"start_dim": 1}]
#: What hidden values (n, 8) become before a function sees them.
SHAPES = [(8,), (4, 2), (2, 2, 2), (8, 1, 1)]


def calls_of(name):
    """Calls of everything that has this name, with all arguments."""
    places = [place for place in (torch, functional, torch.linalg, records_apart.operator) if hasattr(place, name)]
    functions = [getattr(place, name) for place in places]
    if hasattr(torch.Tensor, name):
        functions.append(lambda x, *args, **kwargs: getattr(x, name)(*args, **kwargs))
    for function in functions:
        for args in ARGUMENTS:
            for kwargs in KEYWORDS if len(args) < 2 else [{}]:
                for shape in SHAPES:
                    yield lambda x, function=function, args=args, kwargs=kwargs, shape=shape: called(
                        function, x.reshape(x.shape[0], *shape), args, kwargs
                    )


def called(function, x, args, kwargs):
    symbols = {"x": lambda: x, "n": lambda: x.shape[0], "ranks": lambda: x.argsort(1)}
    if args[:1] == ("list",):
        return function([x, x], *args[1:], **kwargs)
    result = function(x, *(symbols[arg]() if type(arg) is str else arg for arg in args), **kwargs)
    return result[0] if isinstance(result, tuple | list) else result
