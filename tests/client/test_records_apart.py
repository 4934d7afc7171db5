"""A record's gradient is that of a batch of one: networks that mix records move no clipped sum by more than c."""

import copy
import operator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kit.mixing_networks import APART, IMAGES, MIXING, TOKENS, VECTORS, FirstBatch, Net
from kit.tables import for_rows
from torch import nn
from torch.nn import functional
from torch.nn.functional import cross_entropy

from coterie import models as networks
from coterie.client import gradients, record_level, records_apart
from coterie.client.backend import Examples
from coterie.client.dpsgd import DPSGD, train_privately
from coterie.client.ghost import GhostClipping
from coterie.client.gradients import BatchesOfOne, Opacus
from coterie.client.record_level import held_out_counts
from coterie.client.records_apart import apart, traced
from coterie.datasets import Shard, TestSet
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


def clipper_of(network, shape, loss=loss_of, units=False):
    return gradients.clipper_of(network, examples_of(shape), loss, batched=False, ghost=True, units=units)


def moves(clipper, shape):
    """By how much one record, also an extreme one, moves clipped sums in units of c, for batches of several sizes."""
    for size in SIZES:
        for seed, factor in ((1, 1.0), (4, 1e8)):
            x, y = records(shape, size + 1, seed)
            if x.is_floating_point():
                x[size // 2] *= factor
            others = torch.arange(size + 1) != size // 2
            sums = [clipper.clipped_sum(x[chosen], y[chosen], CLIP)[0] for chosen in (others, others | True)]
            yield float((sums[0] - sums[1]).norm())


#: Networks that mix and are refused, and why. All others that mix have the gradient of a batch of one.
REFUSED = {
    "batch normalisation": "no gradient for a batch of one record: Expected more than 1 value",
    "records as channels": "no gradient for a batch of one record: Expected more than 1 spatial element",
    "running mean, a buffer": "'hidden.mean' of Net changes in training",
    "layer of batch normalisation": r"layer '1' \(BatchNorm1d\) mixes the records",
}


@for_rows("name", ALL)
def test_a_record_moves_no_clipped_sum_by_more_than_c(name):
    """Through any client that accepts the network; together, over a hundred networks take seconds."""
    network, shape = built(name)
    if name in REFUSED:
        with pytest.raises(ModelError, match=REFUSED[name]):
            clipper_of(network, shape)
        return
    assert max(moves(clipper_of(network, shape), shape)) <= 1 + 1e-5


@for_rows("name", [name for name in ALL if name not in REFUSED])
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
BY_HOOKS = {"parametric ReLU", "root mean square", "upward"}
IN_BATCHES_OF_ONE = {
    "quantile", "one after the other", "heads of attention", "own parameter", "own gradient", "reshaped",
    "norm of a weight", "bilinear", "several inputs", "recurrent", "gated", "tied", "normalised layer",
    "cumulative sum", "sorted", "rank of a number", "largest numbers", "of length one", "best expert", "einsum",
    "constant matrix", "gathered", "padded", "normalised images",
}  # fmt: skip


@for_rows("name", APART)
def test_the_fast_ways_are_those_of_known_layers(name):
    kinds = {**dict.fromkeys(BY_HOOKS, Opacus), **dict.fromkeys(IN_BATCHES_OF_ONE, BatchesOfOne)}
    assert type(clipper_of(*built(name))) is kinds.get(name, GhostClipping)


def test_a_network_that_remembers_outside_of_itself_is_refused():
    memory = [torch.zeros(8)]

    def centred(x):
        memory.append(x.mean(0).detach())
        return x - torch.stack(memory).mean(0)

    with pytest.raises(ModelError, match="without state between calls"):
        clipper_of(Net(centred), VECTORS)


# ---- rounds -----------------------------------------------------------------------------------------------


def shard(size, units=None):
    x, y = (part.numpy() for part in records(VECTORS, size, 3))
    return Shard(0, 0, x, y, TestSet(x[:0], y[:0]), units=units)


def layout_of(network):
    arrays = float32_arrays(network)
    layout = Layout.of(arrays)
    return layout, layout.flatten(arrays)[None]


ROUNDS = ("neighbours", "from three records on", "8 bits, one scale", "more capacity of experts", "last batch")


@for_rows("name", ROUNDS)
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


@for_rows("name", ROUNDS)
def test_a_unit_moves_a_sum_by_its_own_gradient(name):
    """A unit's records are a batch of their own, in which they may mix."""
    network = built(name)[0]
    clipper = clipper_of(network, VECTORS, task_of(CLASSES), units=True)
    clipper.set_values({key: value.detach() for key, value in trainable(network).items()})
    x, y = records(VECTORS, 12, 4)
    x, y = x.reshape(4, 3, 6), y.reshape(4, 3)
    every, others = (clipper.clipped_sum(x[chosen], y[chosen], CLIP)[0] for chosen in (slice(None), slice(1, None)))
    assert float((every - others).norm()) <= 1 + 1e-5
    lone = lone_gradient(network, x[0], y[0])
    assert float((every - others - lone / lone.norm()).norm()) < 1e-3


# ---- losses and scores ------------------------------------------------------------------------------------


@for_rows("name", [name for name in ALL if name not in REFUSED and name != "critic"])
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
    cohort = SimpleNamespace(
        clients=[None], shard=lambda client: data, network=network, layers=SimpleNamespace(whole=layout), models=model,
        local_training=SimpleNamespace(device="cpu"), task=task_of(CLASSES),
    )  # fmt: skip
    losses = record_level._losses(cohort, 0)._PerUnit__values[:, 0]
    np.testing.assert_allclose(losses, lone, rtol=1e-3, atol=1e-4)


def without_noise(counts):
    """Return exact counts of scores: at this epsilon, the noise is zero."""
    return counts.noisy(1e6, np.random.default_rng(0))


def test_a_histogram_counts_the_scores_of_batches_of_one():
    """A record must not move the scores of others."""
    torch.manual_seed(1)
    network = nn.Sequential(Net(lambda x: x - x.mean(0)), nn.Linear(4, 2))
    layout, model = layout_of(network)
    x, y = (part.numpy() for part in records(VECTORS, 9, 7))
    whole, *single = (
        without_noise(held_out_counts(network, layout, model, Shard(0, 0, x, y % 2, TestSet(x[held], y[held] % 2))))
        for held in (slice(9), *(slice(i, i + 1) for i in range(9)))
    )
    np.testing.assert_array_equal(whole, sum(single))


def test_a_network_that_is_known_is_evaluated_as_it_is():
    network = networks.build("cnn-tiny", IMAGES, CLASSES)
    assert apart(network, examples_of(IMAGES)) is network
    outside = built("neighbours")[0]
    assert apart(outside, examples_of(VECTORS)) is apart(outside, examples_of(VECTORS))


# ---- the trace --------------------------------------------------------------------------------------------

ONES, SOME = torch.ones, torch.tensor([0, 1])
#: Arguments after the first of functions that broadcast. Texts stand for values of the batch.
OPERANDS = [
    (), (0.5,), (2,), (1, True), (-1.0, 1.0), ("x",), ("x", "x"), ("x", 0.5), ("mask", 0.5), ("mask", "x"), ("n",),
    (ONES(8),), (ONES(1, 8),), (ONES(3, 8),), (ONES(3, 4, 2),), (ONES(8), ONES(8)), ("x", ONES(8)), (torch.float64,),
    (torch.tensor(2.0),), ("lower", "x"),
]  # fmt: skip
#: Those of all others.
ARGUMENTS = [
    (), (0,), (1,), (-1,), (-2,), (2,), (3,), ((0, 1),), ((1, 2),), ((-1, -2),), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1),
    (2, -1), (1, -1), (0, 1, 2), (0, 2, 1), (1, 0, 2), (0, 3, 2, 1), (1, 0, 2, 3), (1, 1, 2), (0, 1, 2), (1, 1, 3),
    (slice(None),), ((slice(None), 1),), ((slice(1), 1),), ((..., 0),), ((..., None),), ((0, slice(None)),),
    ((slice(None), [0, 1]),), (([0, 1, 2], slice(None)),), ((slice(None), None),), (None,), ((None, slice(None)),),
    ((slice(None), SOME),), ((slice(None), 0, slice(None), SOME),), ((..., ONES(3, 8).bool()),), (SOME,), ("mask",),
    (1, SOME), (0, SOME), (1, "ranks"), (0, "ranks"), (1, (2, 4)), (0, (1, 3)), ("n", -1), ("n", 8), ("n", 4, 2),
    (("n", 8), 2.0), (-1, 4), (-1, 8), (8, -1), (-1, 2), ("n", 2, -1), ("n", -1, -1), (-1, 1, -1), (3, 8), (2, 1, 1, 1),
    ([1, 1],), ([1, 1, 1, 1],), ([1, 1, 1, 1, 1, 1],), ((8,),), ((3, 8),), ((4, 2),), ((3, 4, 2),), (0.0, False),
    (0.5, True), (0.5, False), ("x",), ("x", "x"), ("x", 0), ("x", 1), (ONES(8, 8),), (ONES(2, 2),), (ONES(3, 3),),
    (ONES(3, 8, 8),), (ONES(8),), ("turned",),
]  # fmt: skip
NAMED = [{}, {"dim": 0}, {"dim": 1}, {"start_dim": 1}, {"end_dim": 1}, {"num_classes": 9}]
NAMED += [{"axis": -1, "keepdim": True}]
#: Shapes of a record: of layers' outputs, sequences, and images of one to three dimensions.
SHAPES = [(8,), (4, 2), (4, 2, 2), (4, 2, 2, 2)]


def calls_of(name):
    """Functions of a batch: everything that has this name, with all arguments."""
    if name == "cat":
        for dims in ((), (0,), (1,), (-1,), (-2,)):
            yield from (lambda x, dims=dims, y=y: torch.cat([x, y(x)], *dims) for y in (torch.sin, ones_of))
    places = [place for place in (torch, functional, records_apart.operator) if hasattr(place, name)]
    functions = [getattr(place, name) for place in places]
    if hasattr(torch.Tensor, name):
        functions.append(lambda x, *args, **kwargs: getattr(x, name)(*args, **kwargs))
    broadcasts = name in records_apart._BY_NUMBER
    for function in functions:
        for args in OPERANDS if broadcasts else ARGUMENTS:
            for kwargs in NAMED if not args and not broadcasts else [{}]:
                yield lambda x, function=function, args=args, kwargs=kwargs: called(function, x, args, kwargs)


def ones_of(x):
    return ONES(tuple(x.shape[1:]) if isinstance(x, torch.Tensor) else x.sample.shape)


def called(function, x, args, kwargs):
    symbols = {"x": lambda: x, "n": lambda: x.shape[0], "ranks": lambda: x.argsort(1), "mask": lambda: x > 0,
               "lower": lambda: x[:, 0], "turned": lambda: x.transpose(-1, -2)}  # fmt: skip

    def value_of(argument):
        if isinstance(argument, tuple):
            return tuple(map(value_of, argument))
        return symbols[argument]() if isinstance(argument, str) else argument

    return function(x, *map(value_of, args), **kwargs)


def first_tensor(result):
    return result if isinstance(result, torch.Tensor) or not hasattr(result, "__len__") else result[0]


def accepted(function, batch):
    """Whether the trace knows that a function treats these records apart."""
    tracer = records_apart._Tracer({})
    try:
        result = function(tracer._add("placeholder", "x", (), {}, batch))
        return isinstance(result, records_apart._Value) and not isinstance(result.sample, int)
    except Exception:  # of the trace, or of PyTorch about the arguments
        return False


@pytest.mark.parametrize("name", records_apart._RULES)
@pytest.mark.filterwarnings("ignore")  # of PyTorch, about what it will no longer do
def test_what_the_trace_accepts_treats_records_apart(name):
    """Every function that it knows, with many arguments, is compared with itself on each record alone."""
    drawn, count = torch.Generator().manual_seed(1), 0
    whole_numbers = torch.randint(8, (3, *SHAPES[0]), generator=drawn)
    for batch in (whole_numbers, *(torch.randn(3, *shape, generator=drawn) for shape in SHAPES)):
        batch[2] = batch[1]
        for function in calls_of(name):
            if not accepted(function, batch):
                continue
            count += 1
            together = first_tensor(function(batch))
            alone = torch.cat([first_tensor(function(batch[i : i + 1])) for i in range(3)])
            torch.testing.assert_close(together, alone, equal_nan=True, rtol=1e-5, atol=1e-5)
    assert count, "none of the calls was accepted"


#: Networks that are not traced, by what they do with a layer of 8 outputs.
NOT_TRACED = {
    "a condition on values": lambda x: x if x.amax(1) > 1 else -x,
    "a condition on a sum of all": lambda x: x if x.sum() > 0 else -x,
    "a condition on the number of records": lambda x: x if x.shape[0] > 2 else -x,
    "a number that depends on it": lambda x: x / x.shape[0],
    "as many numbers": lambda x: x * torch.arange(x.shape[0])[:, None],
    "one record": lambda x: x + x[0],
    "other records": lambda x: x.roll(1, 0),
    "without gradients": torch.no_grad()(lambda x: 2 * x),
    "in low precision": torch.autocast("cpu", torch.bfloat16)(lambda x: x @ ONES(8, 8)),
    "randomness": lambda x: x * torch.rand_like(x),
    "dropout": lambda x: functional.dropout(x, 0.5),
    "read after a change in place": lambda x: (y := x * 1, x.relu_(), y)[2],
    "a view that changes": lambda x: (y := x.flatten(1), functional.relu(x, inplace=True), y)[2],
    **{
        f"{name} in place": lambda x, name=name: getattr(operator, name)(x, 2.0)
        for name in ("isub", "imul", "itruediv", "ifloordiv", "imod", "ipow")
    },
    **{
        f"{name} in place": lambda x, name=name: x * getattr(operator, name)(x > 0, x > 1).float()
        for name in ("iand", "ior", "ixor")
    },
    "several outputs": lambda x: (x, x),
    "a number": lambda x: x.shape[0],
    "unknown": lambda x: torch.linalg.inv(x[:, :4].reshape(x.shape[0], 2, 2)).flatten(1),
    "to an array": lambda x: torch.tensor(x.detach().numpy()),
}


def of_function(function):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), Function(function))


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@for_rows("name", NOT_TRACED)
def test_what_is_not_known_ends_the_trace(name):
    assert traced(of_function(NOT_TRACED[name]), examples_of(VECTORS)) is None
    assert traced(of_function(torch.sin), examples_of(VECTORS)) is not None


class InContext(nn.Module):
    """Calls a layer in a context of PyTorch, which a trace does not hold."""

    def __init__(self, context):
        super().__init__()
        self.layer, self.head, self.context = nn.Linear(6, 6), nn.Linear(6, 4), context

    def forward(self, x):
        with self.context():
            x = self.layer(x)
        return self.head(x.float())


@pytest.mark.parametrize("context", [torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_a_layer_within_a_context_ends_the_trace(context):
    assert traced(InContext(context), examples_of(VECTORS)) is None


class Writing(nn.Module):
    """Writes into a frozen parameter, from the second call on, where no check sees it."""

    def __init__(self):
        super().__init__()
        self.layer, self.frozen, self.calls = nn.Linear(6, 4), nn.Parameter(torch.zeros(4), requires_grad=False), 0

    def forward(self, x):
        x, self.calls = self.layer(x.reshape(len(x), -1)), self.calls + 1  # not traced
        if self.calls > 1:
            self.frozen += x.detach().mean(0)
        return x + self.frozen


def test_what_a_network_writes_is_gone_before_the_next_record():
    torch.manual_seed(1)
    network, (x, y) = Writing(), records(VECTORS, 5, 1)
    clipper = clipper_of(network, VECTORS)
    clipper.set_values({key: value.detach() for key, value in trainable(network).items()})
    first, second = (clipper.clipped_sum(x, y, CLIP)[0] for _ in range(2))
    assert torch.equal(first, second)


class Borrowing(nn.Module):
    """Uses a layer's parameter outside of the layer, in a way of choice."""

    def __init__(self, use):
        super().__init__()
        self.layer, self.use = nn.Linear(6, 6), use

    def forward(self, x):
        return self.layer(x) + self.use(self, x)


BORROWED = {
    "product": lambda own, x: x @ own.layer.weight,
    "detached": lambda own, x: x * own.layer.bias.detach(),
    "of all": lambda own, x: x * sum(value.detach().sum() for value in own.parameters()),
    "if there is one": lambda own, x: 0 * x if getattr(own.layer, "bias", None) is None else x * own.layer.bias,
    "state": lambda own, x: x * own.layer.state_dict()["bias"].sum(),
}


@for_rows("name", BORROWED)
def test_a_parameter_outside_of_its_layer_ends_the_trace(name):
    """The trace would hold its value of now."""
    network = Borrowing(BORROWED[name])
    before = dict(network.named_parameters())
    assert traced(network, examples_of(VECTORS)) is None
    assert dict(network.named_parameters()) == before
    assert network(torch.randn(2, 6)).shape == (2, 6)


class Subclass(nn.Linear):
    def forward(self, x):
        return super().forward(x) - super().forward(x).mean(0)


def replaced():
    layer = nn.Linear(6, 4)
    layer.forward = lambda x: x[:, :4] - x[:, :4].mean(0)
    return layer


def with_hook():
    layer = nn.Linear(6, 4)
    layer.register_forward_hook(lambda layer, inputs, output: output - output.mean(0))
    return layer


@for_rows("layer", [Subclass(6, 4), replaced(), with_hook()], ids=["subclass", "replaced", "hook"])
@for_rows("wrapped", [False, True])
def test_a_layer_with_code_of_its_own_is_not_known(layer, wrapped):
    network = nn.Sequential(layer) if wrapped else layer
    assert traced(copy.deepcopy(network), examples_of(VECTORS)) is None
    x, y = records(VECTORS, 3, 1)
    total = clipper_of(network, VECTORS).clipped_sum(x, y, CLIP)[0]
    assert float(total.norm()) <= 3


@for_rows(
    ("layer", "shape"),
    [
        (nn.Conv2d(1, 2, 3), (8, 8)),  # one image without channels
        (nn.Linear(1, 4), ()),
        (nn.LayerNorm((3, 6)), (6,)),
        (nn.InstanceNorm2d(2), (2, 5, 5)),
        (nn.BatchNorm1d(6), (6,)),
        (nn.BatchNorm1d(6, track_running_stats=False).eval(), (6,)),
        (nn.Embedding(4, 2, max_norm=1.0), TOKENS),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_a_layer_of_other_dimensions_or_options_is_not_known(layer, shape):
    assert traced(layer, examples_of(shape)) is None
    assert traced(nn.Sequential(nn.Identity(), layer), examples_of(shape)) is None


def test_a_traced_network_computes_by_its_trace():
    """What its code does later has no effect."""
    mixes = []
    network = traced(of_function(lambda x: x - x.mean(0) if mixes else x), examples_of(VECTORS))
    x = torch.randn(5, 6)
    before = network(x)
    mixes.append(True)
    assert torch.equal(network(x), before)
    again = copy.deepcopy(network)
    with torch.no_grad():
        again[0].weight.zero_()
    assert not torch.equal(again(x), before)
    assert torch.equal(network(x), before)


def test_a_network_that_keeps_its_first_batch_starts_again_for_each_record():
    network = Net(FirstBatch())
    x = torch.randn(4, 6)
    outputs = apart(network, examples_of(VECTORS))(x)
    assert network.hidden.mean is None
    torch.testing.assert_close(outputs, network.second(torch.zeros(4, 8)))
