"""Ghost clipping: autograd on one record after the other is the oracle of layers, Opacus that of whole networks."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.tables import for_rows
from torch import nn
from torch.nn.functional import cross_entropy

from coterie import models as networks
from coterie.client import dpsgd, ghost
from coterie.client.backend import Examples
from coterie.client.clipper import clip_factors
from coterie.client.dpsgd import DPSGD, clipped_gradients
from coterie.client.gradients import clipper_of
from coterie.models import ModelError

ONE = DPSGD(100, 100, 1, 1.0, 1.0, 0.0)
SIZES = st.integers(1, 3)


def squared(output, targets):
    """A loss whose gradients are of every size."""
    return output.flatten(1).square().sum(1)


def first_class(output, targets):
    return cross_entropy(output, torch.zeros(len(output), dtype=torch.int64), reduction="none")


def one_by_one(model, x, loss):
    """(m, d) float64 gradients by autograd on a copy of the network in float64, a record at a time."""
    model = copy.deepcopy(model).double()
    x = x.double() if x.is_floating_point() else x
    rows = [torch.autograd.grad(loss(model(one[None]), None).sum(), list(model.parameters())) for one in x]
    return torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])


def clipped(gradients, clip_norm):
    """(d,) sum in units of the clipping norm."""
    norms = torch.linalg.vector_norm(gradients, dim=1, keepdim=True)
    return (gradients / norms.clamp(min=clip_norm)).sum(0)


def clipping(model, x, loss=squared):
    """Ghost clipping of the network; None if it is clipped in another way, or not at all."""
    try:
        examples = Examples(x.shape[1:], x.dtype, torch.float32, "cpu")
        clipper = clipper_of(model, examples, loss, batched=False, ghost=True, units=False)
    except ModelError:
        return None
    return clipper if isinstance(clipper, ghost.GhostClipping) else None


def assert_close(found, wanted, tolerance=1e-5):
    assert found.dtype == torch.float64
    assert float((found - wanted).norm()) <= tolerance * float(wanted.norm())


def check(model, x, loss=squared):
    """Half of the records are longer than the clipping norm."""
    rows = one_by_one(model, x, loss)
    clip_norm = min(max(float(rows.norm(dim=1).median()), 1e-6), 1e6)
    assert clipping(model, x, loss) is not None
    found = clipped_gradients(model, x, loss, DPSGD(100, 100, 1, 1.0, clip_norm, 0.0))
    assert_close(found, clipped(rows, clip_norm))


@st.composite
def convolutions(draw):
    dims = draw(SIZES)
    groups = draw(st.integers(1, 3))
    kernel, stride, dilation = (tuple(draw(SIZES) for _ in range(dims)) for _ in range(3))
    padding = draw(st.sampled_from(["valid", "same", "numbers"]))
    if padding == "same":
        stride = (1,) * dims
    if padding == "numbers":
        padding = tuple(draw(st.integers(0, 2)) for _ in range(dims))
    layer = [nn.Conv1d, nn.Conv2d, nn.Conv3d][dims - 1](
        groups * draw(SIZES), groups * draw(SIZES), kernel, stride, padding, dilation, groups, draw(st.booleans())
    )
    least = [span * (size - 1) + 1 for span, size in zip(dilation, kernel, strict=True)]
    return layer, torch.randn(3, layer.in_channels, *(size + draw(st.integers(0, 4)) for size in least))


@pytest.fixture
def form(request, monkeypatch):
    """Overrides the choice by cost."""
    if request.param != "cheapest":
        monkeypatch.setattr(ghost, "_products_are_cheaper", lambda *sizes: request.param == "products")
    return request.param


forms = pytest.mark.parametrize("form", ["cheapest", "products", "rows"], indirect=True)


@forms
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_convolutions(form):
    @settings(max_examples=60)
    @given(convolutions(), st.integers(0, 9))
    def equal(case, seed):
        layer, x = case
        torch.manual_seed(seed)
        check(nn.Sequential(layer), torch.randn(x.shape))

    equal()


@for_rows("mode", ["circular", "reflect", "replicate"])
@for_rows("padding", [1, "same"])
@for_rows("layer", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
def test_convolutions_that_do_not_pad_by_zeros(layer, padding, mode):
    torch.manual_seed(1)
    dims = [nn.Conv1d, nn.Conv2d, nn.Conv3d].index(layer) + 1
    conv = layer(2, 4, 3, padding=padding, dilation=1 + (padding == "same"), groups=2, padding_mode=mode)
    check(nn.Sequential(conv), torch.randn(3, 2, *(5, 6, 7)[:dims]))


@forms
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7,), (5, 7), (2, 3, 7)])
def test_linear_layers_on_vectors_and_sequences(form, bias, shape):
    torch.manual_seed(1)
    check(nn.Sequential(nn.Linear(7, 4, bias=bias), nn.Tanh(), nn.Linear(4, 3)), torch.randn(6, *shape))


@pytest.mark.parametrize("padding", [None, 2])
def test_embeddings(padding):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(6, 3, padding_idx=padding), nn.Tanh(), nn.Linear(3, 2))
    check(model, torch.randint(6, (5, 9)))  # tokens repeat within a record and between records
    check(model, torch.randint(6, (5, 2, 3)))


@for_rows(
    ("layer", "shape"),
    [
        (nn.GroupNorm(2, 4), (4,)), (nn.GroupNorm(2, 4), (4, 5)), (nn.GroupNorm(4, 4), (4, 3, 2)),
        (nn.LayerNorm(4), (4,)), (nn.LayerNorm(4, bias=False), (3, 4)), (nn.LayerNorm((3, 4)), (2, 3, 4)),
        (nn.LayerNorm((3, 4)), (3, 4)),
    ],
)  # fmt: skip
def test_normalisation(layer, shape):
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    check(nn.Sequential(layer), 1 + 2 * torch.randn(5, *shape))


class Text(nn.Module):
    def __init__(self, **options):
        super().__init__()
        from opacus.layers import DPLSTM

        self.embedding, self.lstm = nn.Embedding(9, 4), DPLSTM(4, 5, batch_first=True, **options)
        self.output = nn.Linear(10 if options.get("bidirectional") else 5, 3)

    def forward(self, tokens):
        return self.output(self.lstm(self.embedding(tokens))[0][:, -1])


class Residual(nn.Module):
    """Two blocks that share their layers, and channels that are normalised."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(2, 4, 3, stride=2, bias=False), nn.GroupNorm(2, 4)
        self.block, self.relu = nn.Conv2d(4, 4, 3, padding=1, groups=2), nn.ReLU(inplace=True)
        self.output = nn.Linear(4, 3)

    def forward(self, x):
        x = self.relu(self.norm(self.stem(x)))
        for _ in range(2):
            x = self.relu(x + self.norm(self.block(x)))
        return self.output(x.mean((2, 3)))


WHOLE = {
    "cnn-tiny": (lambda: networks.build("cnn-tiny", (1, 8, 8), 3), (1, 8, 8)),
    "cnn-small": (lambda: networks.build("cnn-small", (3, 8, 8), 3), (3, 8, 8)),
    "lenet": (lambda: networks.build("lenet", (1, 12, 12), 3), (1, 12, 12)),
    "lstm-char": (lambda: networks.build("lstm-char", (6,), 9), (6,)),
    "text": (Text, (7,)),
    "text, two layers": (lambda: Text(num_layers=2), (7,)),
    "residual": (Residual, (2, 9, 9)),
    "mlp-32": (lambda: networks.build("mlp-32", (1, 4, 4), 3), (1, 4, 4)),
    "gan-cifar-gn": (lambda: networks.build_gan("gan-cifar-gn", (3, 32, 32), 2)["discriminator"], (3, 32, 32)),
    "resnet18-gn": (lambda: networks.build("resnet18-gn", (1, 16, 16), 3), (1, 16, 16)),
}


def example(name, size, seed=1):
    torch.manual_seed(seed)
    make, shape = WHOLE[name]
    model = make()
    return model, torch.randn(size, *shape) if len(shape) > 1 else torch.randint(9, (size, *shape))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "resnet18-gn" else name for name in WHOLE]
)
def test_whole_networks_are_equal_to_opacus(name, monkeypatch):
    size = 3 if name == "resnet18-gn" else 8
    model, x = example(name, size)
    loss = squared if name == "gan-cifar-gn" else first_class
    norms = one_by_one(model, x, loss).norm(dim=1)
    own = DPSGD(100, 100, 1, 1.0, float(norms.median()), 0.0)
    plain = clipped_gradients(model, x, loss, own, ghost=False)
    assert clipping(model, x, loss) is not None
    monkeypatch.setattr(ghost, "_BLOCK", 5000)  # a few records
    for chunk in (256, size - 1 if size == 3 else 3):
        monkeypatch.setattr(dpsgd, "_MAX_RECORDS", chunk)
        assert_close(clipped_gradients(model, x, loss, own), plain)


def test_a_direction_that_does_not_reach_the_output_has_zero_gradients():
    # Opacus refuses it: its hook is never called there.
    torch.manual_seed(1)
    check(Text(bidirectional=True), torch.randint(9, (4, 5)), first_class)


@pytest.mark.parametrize("name", ["cnn-tiny", "lstm-char", "residual"])
def test_an_empty_batch_adds_nothing(name):
    model, x = example(name, 0)
    found = clipped_gradients(model, x, first_class, ONE)
    assert found.shape == (networks.num_parameters(model),)
    assert not found.any()


@forms
@pytest.mark.parametrize("name", ["cnn-tiny", "residual", "mlp-32"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
def test_a_record_that_is_not_finite_contributes_nothing(name, bad, form):
    model, x = example(name, 4)
    spoiled = x.clone()
    spoiled[1, 0, 2, 2] = bad
    rest = clipped_gradients(model, x[[0, 2, 3]], first_class, ONE)
    found = clipped_gradients(model, spoiled, first_class, ONE)
    assert rest.norm() > 0.1
    if math.isfinite(bad):
        assert float((found - rest).norm()) <= 1 + 1e-6  # clipped, if it does not overflow
    else:
        assert_close(found, rest, 1e-6)


def test_a_token_s_row_that_is_not_finite_stays_with_its_record():
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 2))
    with torch.no_grad():
        model[0].weight[3] = math.nan
    x = torch.tensor([[0, 1, 0], [1, 3, 2], [2, 2, 2]])
    assert_close(clipped_gradients(model, x, squared, ONE), clipped_gradients(model, x[[0, 2]], squared, ONE))


@forms
@pytest.mark.parametrize("name", ["cnn-tiny", "lstm-char", "residual"])
def test_one_record_moves_the_sum_by_at_most_the_clipping_norm(name, form):
    model, x = example(name, 200)
    own = clipping(model, x, first_class)
    found = own.gradients(x, torch.zeros(200)).values()
    squares = sum(each.squares for each in found)
    weights, kept = clip_factors(squares.sqrt(), 1e-3)
    assert kept.all()
    less = kept.clone()
    less[17] = False
    moved = torch.cat([(each.sum(weights, kept) - each.sum(weights.where(less, 0), less)).flatten() for each in found])
    assert moved.dtype == torch.float64
    assert 1 - 2e-6 < float(moved.norm()) <= 1


def cancelling(scale, small):
    """A layer, and a record of 3 positions whose gradient has two parts of ``scale`` that cancel, and a small one."""
    layer = nn.Linear(64, 128, bias=False)
    rng = torch.Generator().manual_seed(3)
    big, rest = torch.randn(64, generator=rng), torch.randn(64, generator=rng)
    factors = torch.randn(3, 128, generator=rng)
    factors[1] = small * factors[1] / factors[1].norm() / rest.norm()
    factors[2] = -factors[0]

    def loss(output, targets):
        return (output * factors).sum((1, 2))

    return layer, torch.stack([scale * big, rest, scale * big])[None], loss


@pytest.mark.parametrize("scale", [10.0**power for power in range(0, 38, 2)])
@pytest.mark.parametrize("copies", [1, 7])
def test_positions_that_cancel_cannot_hide_from_the_norm(scale, copies, monkeypatch):
    monkeypatch.setattr(ghost, "_products_are_cheaper", lambda *sizes: True)
    layer, x, loss = cancelling(scale, 1e3)
    own = ghost.GhostClipping(copy.deepcopy(layer), loss)
    x = torch.cat([x] * copies)
    found = own.clipped_sum(x, torch.zeros(copies), 1.0)[0]
    assert float(found.norm()) <= copies


def test_a_gradient_that_cancels_is_clipped_to_less(monkeypatch):
    monkeypatch.setattr(ghost, "_products_are_cheaper", lambda *sizes: True)
    layer, x, loss = cancelling(1.0, 1e-3)  # far below the clipping norm, and √spread / 100 above it
    own = ghost.GhostClipping(copy.deepcopy(layer), loss)
    (gradients,) = own.gradients(x, torch.zeros(1)).values()
    limit = float(gradients.spread.sqrt()) / ghost._MAX_CANCELLATION
    assert limit > 1
    found = own.clipped_sum(x, torch.zeros(1), 1.0)[0]
    assert float(found.norm()) == pytest.approx(1e-3 / limit, rel=1e-4)


class Borrowing(nn.Module):
    """Uses a layer's weight outside of the layer too."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) + x @ self.layer.weight


class Folded(nn.Module):
    """Has positions as rows of a layer's input."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, x):
        return self.layer(x.reshape(-1, 2)).reshape(len(x), -1)


class Turned(nn.Module):
    """Has positions first."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(torch.stack([x, 2 * x])).sum(0)


class Overwriting(nn.Module):
    """Changes the output of a layer, and the input of another, in place."""

    def __init__(self, where):
        super().__init__()
        self.first, self.second, self.where = nn.Linear(4, 4), nn.Linear(4, 4), where

    def forward(self, x):
        hidden = self.second(torch.tanh(self.first(x)))
        if self.where == "output":
            hidden += hidden
            return hidden
        x = x * 1
        hidden = self.first(x) + hidden
        x *= 0
        return hidden


#: Networks beside those of test_records_apart.py, of vectors, or of tokens.
UNSUPPORTED = {
    "parameter outside of its layer": Borrowing(),
    "positions as rows": Folded(),
    "positions first": Turned(),
    "input in place": Overwriting("input"),
    "batch normalisation": nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)),
    "without parameters": nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, affine=False, track_running_stats=False)),
    "dropout": nn.Sequential(nn.Linear(4, 64), nn.Dropout()),
    "transposed": nn.Sequential(nn.Unflatten(1, (4, 1)), nn.ConvTranspose1d(4, 2, 3)),
    "recurrent": nn.Sequential(nn.Unflatten(1, (1, 4)), nn.LSTM(4, 3, batch_first=True)),
    "reparametrised": nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))),
    "frequencies of tokens": nn.Sequential(nn.Embedding(9, 4, scale_grad_by_freq=True), nn.Linear(4, 2)),
    "tokens that are changed": nn.Sequential(nn.Embedding(9, 4, max_norm=10.0), nn.Linear(4, 2)),
}
REFUSED = {
    "input in place": "DP-SGD",
    "batch normalisation": r"layer '1' \(BatchNorm1d\).*GroupNorm",
    "without parameters": "layer '1'.*GroupNorm",
    "dropout": "without dropout",
    "recurrent": "no gradient for a batch of one record: 'tuple'",
    "tokens that are changed": "max_norm",
}


@for_rows("name", UNSUPPORTED)
def test_other_networks_are_clipped_in_other_ways_or_refused(name):
    model = UNSUPPORTED[name]
    x = torch.randint(9, (4, 5)) if "tokens" in name else torch.randn(3, 4)
    assert clipping(model, x) is None
    for fast in (True, False):
        if name in REFUSED:
            with pytest.raises(ModelError, match=REFUSED[name]):
                clipped_gradients(model, x, squared, ONE, ghost=fast)
        else:
            found = clipped_gradients(model, x, squared, ONE, ghost=fast)
            assert found.any()
            assert_close(found, clipped(one_by_one(model, x, squared), 1.0))


def test_a_layer_whose_output_changes_in_place_is_traced_with_a_copy():
    check(Overwriting("output"), torch.randn(3, 4))


@pytest.mark.parametrize("fast", [True, False])
def test_the_network_is_left_alone_and_prepared_once(fast):
    model, x = example("cnn-tiny", 3)
    model = model.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state, misses = torch.random.get_rng_state(), clipper_of.cache_info().misses
    first = clipped_gradients(model, x, first_class, ONE, ghost=fast)
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(2)
    second = clipped_gradients(model, x, first_class, ONE, ghost=fast)
    assert float((first - second).norm()) > 0.01  # of the parameters of now
    assert clipper_of.cache_info().misses == misses + 1
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not model.training
    for layer in model.modules():
        assert not layer._forward_hooks
        assert not layer._backward_hooks
        assert not hasattr(layer, "activations")
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad
        assert not hasattr(parameter, "grad_sample")
        assert parameter.grad is None
        assert torch.equal(parameter, 2 * before[name])


@pytest.mark.parametrize("fast", [True, False])
def test_a_pass_that_was_broken_off_does_not_reach_the_next(fast):
    model, x = example("lstm-char", 3)
    broken = []

    def loss(output, targets):
        if broken:
            raise KeyboardInterrupt
        return first_class(output, targets)

    expected = clipped_gradients(model, x, loss, ONE, ghost=fast)
    broken.append(True)
    with pytest.raises(KeyboardInterrupt):
        clipped_gradients(model, x[:2], loss, ONE, ghost=fast)
    broken.clear()
    assert torch.equal(clipped_gradients(model, x, loss, ONE, ghost=fast), expected)


def test_what_is_held_for_a_record_sets_the_physical_batch():
    # Inputs and outputs of every layer, of which gradients are taken and converted; and all gradients.
    model, x = example("cnn-tiny", 4)
    numbers = clipping(model, x, first_class).numbers
    captured = (64 + 8 * 64) + (8 * 16 + 20 * 16) + (80 + 3)
    held = (72 + 8) + (20 * 72 + 20) + (3 * 80 + 3)
    assert numbers == 2 * captured + held
    sizes = np.array([clipping(*example(name, 2), first_class).numbers for name in ("resnet18-gn", "cnn-tiny")])
    assert np.all(dpsgd._physical_batch(int(sizes[0]), 16) < dpsgd._physical_batch(int(sizes[1]), 16))


def test_gradients_that_are_not_finite_do_not_count():
    norms = torch.tensor([math.inf, math.nan, 2.0, 0.25], dtype=torch.float64)
    factors, kept = clip_factors(norms, 0.5)
    assert kept.tolist() == [False, False, True, True]
    assert factors.tolist() == pytest.approx([0, 0, 0.5, 2], rel=2e-6)
