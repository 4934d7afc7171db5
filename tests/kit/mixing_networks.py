"""Networks of 6 numbers, or of images or tokens, to 4 classes: some mix the records of a batch, others do not."""

import torch
from torch import nn
from torch.nn import functional

from coterie import models as networks


class Net(nn.Module):
    """Linear layers with a function of the hidden layer, and of the outputs."""

    def __init__(self, hidden=None, output=None, zero=False):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)
        self.hidden, self.output = hidden or nn.Identity(), output or nn.Identity()
        if zero:
            nn.init.zeros_(self.second.weight)

    def forward(self, x):
        return self.output(self.second(self.hidden(self.first(x))))


class FirstBatch(nn.Module):
    """Normalises by the mean of the first batch that it sees."""

    mean = None

    def forward(self, x):
        self.mean = x.mean(0).detach() if self.mean is None else self.mean
        return x - self.mean


class Float32(nn.Module):
    """A layer that fails in float64."""

    def __init__(self, then=lambda x: x):
        super().__init__()
        self.then = then

    def forward(self, x):
        if x.dtype != torch.float32:
            raise TypeError("float32 only")
        return self.then(x)


SCALE = torch.tensor([1e6, 1.0, 1.0, 1e-6])


def smallest(x):
    return torch.cat([x[:, :3] * 1e6, x[:, 3:] + 1e-3 * x[:, 3:].mean()], dim=1)


#: Networks that the check of a network before a run refuses, for their outputs.
FOUND_BY_OUTPUTS = {
    "a small output": lambda: Net(output=smallest),
    "a small output, in float32 only": lambda: Net(Float32(), smallest),
    "faint": lambda: Net(output=lambda x: x + 1e-8 * x.mean(0)),
    "batch normalisation": lambda: Net(lambda x: functional.batch_norm(x, None, None, training=True)),
    "before a layer of zeros": lambda: Net(lambda x: x - x.mean(0), zero=True),
    "batch size": lambda: Net(lambda x: x / len(x)),
    "position": lambda: Net(output=lambda x: x + torch.arange(len(x))[:, None]),
    "neighbours": lambda: Net(lambda x: x + x.roll(1, 0)),
    "softmax over the batch": lambda: Net(output=lambda x: x.softmax(0)),
    "only beside an extreme example": lambda: Net(lambda x: x / 2 if x.abs().max() > 50 else x),
}


class RunningMean(nn.Module):
    """Subtracts a mean over all batches, held as a buffer or as an attribute."""

    def __init__(self, buffer):
        super().__init__()
        mean = torch.zeros(8)
        if buffer:
            self.register_buffer("mean", mean)
        else:
            self.mean = mean

    def forward(self, x):
        with torch.no_grad():
            self.mean.mul_(0.5).add_(0.5 * x.mean(0))
        return x - self.mean


class LastBatch(nn.Module):
    """Adds the mean of the batch before."""

    last = 0.0

    def forward(self, x):
        last, self.last = self.last, x.mean(0).detach()
        return x + last


class Counting(nn.Module):
    """Mixes from the third call on."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return x - x.mean(0) if self.calls > 2 else x


class MixedBackward(torch.autograd.Function):
    """The identity, whose gradient is centred over the batch."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient - gradient.mean(0)


class Capacity(nn.Module):
    """Experts that take three records each; a record beyond them passes none."""

    def __init__(self, most):
        super().__init__()
        self.gate, self.experts, self.most = nn.Linear(8, 2), nn.ModuleList(nn.Linear(8, 8) for _ in range(2)), most

    def forward(self, x):
        shares = self.gate(x).softmax(1)
        chosen = functional.one_hot(shares.argmax(1), 2)
        taken = chosen * (chosen.cumsum(0) <= self.most)
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        return 20 * (outputs * (taken * shares)[:, :, None]).sum(1)


class OverRecords(nn.Module):
    """A recurrent layer whose sequence are the records."""

    def __init__(self):
        super().__init__()
        self.inner = nn.LSTM(8, 8)

    def forward(self, x):
        return self.inner(x)[0]


class HeadsOverRecords(nn.Module):
    """Attention between records."""

    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2)

    def forward(self, x):
        return self.inner(x, x, x)[0]


def rounded_to_8_bits(x, scale):
    """Fake quantisation with a straight-through gradient."""
    return x + ((x / scale).round() * scale - x).detach()


def hooked(x):
    """The gradient is divided by its length over the batch."""
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient / (gradient.norm() + 1e-6))
    return x * 1


def first_as_last(x):
    x = x * 1
    x[0] = x[-1]
    return x


def beyond(limit):
    """Rescales all records if one is beyond a limit."""
    return lambda x: x * torch.where(x.abs().max() > limit, limit / x.abs().max(), torch.ones(()))


#: All networks that mix.
MIXING = {
    **FOUND_BY_OUTPUTS,
    "first batch": lambda: Net(FirstBatch()),
    "running mean, a buffer": lambda: Net(RunningMean(True)),
    "running mean, an attribute": lambda: Net(RunningMean(False)),
    "last batch": lambda: Net(LastBatch()),
    "from the third call on": lambda: Net(Counting()),
    "from three records on": lambda: Net(lambda x: x - x.mean(0) if len(x) > 2 else x),
    "from 17 records on": lambda: Net(lambda x: 50 * (x - x.mean(0)) if x.shape[0] > 16 else x),
    "five records": lambda: Net(lambda x: 9 * x if len(x) == 5 else x),
    "an even number of records": lambda: Net(lambda x: -x if len(x) % 2 else x),
    "8 bits, one scale": lambda: Net(lambda x: rounded_to_8_bits(x, x.abs().max().detach() / 127)),
    "3 bits, one scale of outputs": lambda: Net(output=lambda x: rounded_to_8_bits(x, x.abs().max().detach() / 3)),
    "capacity of experts": lambda: Net(Capacity(1)),
    "more capacity of experts": lambda: Net(Capacity(3)),
    "rank": lambda: Net(lambda x: x * x.argsort(0).argsort(0)),
    "sorted over records": lambda: Net(lambda x: x.sort(0).values),
    "cumulative sum over records": lambda: Net(lambda x: x.cumsum(0)),
    "cumulative maximum": lambda: Net(lambda x: x + 5 * x.cummax(0).values),
    "quantile of the batch": lambda: Net(lambda x: torch.minimum(x, x.quantile(0.7))),
    "above the median": lambda: Net(lambda x: x * (x > x.median(0).values)),
    "columns of length one": lambda: Net(lambda x: x / (x.T @ x + torch.eye(8)).diagonal().sqrt()),
    "rescales above 1e6": lambda: Net(beyond(1e6)),
    "rescales above 10": lambda: Net(beyond(10.0)),
    "a share of 1e-6, magnified": lambda: Net(lambda x: 1e6 * torch.sin(x + 1e-6 * x.mean(0))),
    "rounding of a large sum": lambda: Net(lambda x: x + (x + 1e7 * x.sum(0) - 1e7 * x.sum(0))),
    "attention over records": lambda: Net(lambda x: (x @ x.T).softmax(1) @ x),
    "heads of attention over records": lambda: Net(HeadsOverRecords()),
    "recurrent over records": lambda: Net(OverRecords()),
    "contrast": lambda: Net(lambda x: x / (x @ x.T).exp().sum(1, keepdim=True)),
    "number of copies": lambda: Net(lambda x: x * (x[:, None] == x[None]).all(2).sum(1)[:, None]),
    "distinct records": lambda: Net(lambda x: x / len(x.unique(dim=0))),
    "maximum of the batch": lambda: Net(lambda x: x / x.abs().max()),
    "a condition on the batch": lambda: Net(lambda x: x / 9 if x.max() > 2 else x),
    "a number of the batch": lambda: Net(lambda x: x * float(x.mean())),
    "a list of the batch": lambda: Net(lambda x: x * max(x.flatten().tolist())),
    "gradient centred over the batch": lambda: Net(MixedBackward.apply),
    "gradient of one length": lambda: Net(hooked),
    "columns over records": lambda: Net(lambda x: x + x.T.softmax(-1).T),
    "softmax of all numbers": lambda: Net(lambda x: 9 * x.flatten().softmax(0).reshape(x.shape)),
    "records as channels": lambda: Net(lambda x: functional.instance_norm(x[None].transpose(1, 2)).transpose(1, 2)[0]),
    "records as one group": lambda: Net(lambda x: functional.layer_norm(x, x.shape)),
    "convolved over records": lambda: Net(
        lambda x: functional.conv1d(x.T[None], torch.ones(8, 8, 3) / 9, padding=1)[0].T
    ),
    "mixed up with the next": lambda: Net(lambda x: 0.6 * x + 0.4 * x.flip(0)),
    "in place": lambda: Net(first_as_last),
    "beside a marked record": lambda: Net(lambda x: x / 2 if bool((x[:, 0] > 5).any()) else x),
    "NaN beside a large record": lambda: Net(lambda x: x * torch.where(x.max() > 1e6, torch.nan, torch.ones(()))),
    "number of large records": lambda: Net(lambda x: x * (x.norm(dim=1) > 2).sum()),
    "layer of batch normalisation": lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)),
    "mean over a wrong dimension": lambda: Net(lambda x: x - x[:, None].mean((0, 1))),
    "one scale of noise": lambda: Net(lambda x: x + x.std() * torch.linspace(-1, 1, 8)),
    "loop over other records": lambda: Net(lambda x: torch.stack([row - x.mean(0) for row in x])),
}


class OneAfterTheOther(nn.Module):
    """Follows a condition on each record by itself."""

    def forward(self, x):
        return torch.stack([row / 2 if row.max() > 1 else row for row in x])


class Experts(nn.Module):
    """Each record takes its best expert."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 3), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        shares = self.gate(x).softmax(1)
        best = functional.one_hot(shares.argmax(1), 3) * shares
        return (torch.stack([expert(x) for expert in self.experts], 1) * best[:, :, None]).sum(1)


class Heads(nn.Module):
    """Attention between positions of a record."""

    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        x = x.reshape(len(x), 2, 4)
        return self.inner(x, x, x)[0].flatten(1)


class Positions(nn.Module):
    """Attention of linear layers between positions of a record."""

    def __init__(self):
        super().__init__()
        self.all = nn.Linear(4, 12)

    def forward(self, x):
        query, key, value = self.all(x.view(x.shape[0], 2, 4)).chunk(3, dim=-1)
        return ((query @ key.transpose(1, 2) / 2).softmax(-1) @ value).reshape(x.size(0), -1)


class Scaled(nn.Module):
    """Has a parameter outside of a layer."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x * self.scale


class Fourier(nn.Module):
    """Multiplies by a constant matrix."""

    def __init__(self):
        super().__init__()
        self.register_buffer("matrix", torch.linspace(-1, 1, 64).reshape(8, 8))

    def forward(self, x):
        return (x @ self.matrix).sin()


class Text(nn.Module):
    def __init__(self, kind, width=8):
        super().__init__()
        self.tokens, self.inner, self.output = nn.Embedding(4, 6), kind(6, width), nn.Linear(width, 4)

    def forward(self, x):
        hidden, _ = self.inner(self.tokens(x))
        return self.output(hidden[:, -1])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.output = nn.Embedding(4, 8), nn.Linear(8, 4, bias=False)
        self.output.weight = self.tokens.weight

    def forward(self, x):
        return self.output(self.tokens(x).mean(1))


class TwoParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.output = nn.Linear(2, 5), nn.Linear(4, 5), nn.Bilinear(5, 5, 4)

    def forward(self, x):
        return self.output(self.left(x[:, :2]), self.right(x[:, 2:]))


class Doubled(torch.autograd.Function):
    """Twice the number, with a gradient of its own for each record."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return 2 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def lstm(width, hidden):
    from opacus.layers import DPLSTM

    return DPLSTM(width, hidden, batch_first=True)


def frozen_norm():
    network = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    network[:2].requires_grad_(False).eval()
    return network


def images(*layers, width):
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), *layers, nn.Flatten(), nn.Linear(width, 4))


VECTORS, IMAGES, TOKENS = (6,), (1, 12, 12), (5,)
#: Networks that treat records apart, and the shape of a record.
APART = {
    **{
        name: (lambda name=name, shape=shape: networks.build(name, shape, 4), shape)
        for name, shape in {
            "linear": IMAGES, "mlp-32": IMAGES, "mlp-200": VECTORS, "cnn-tiny": IMAGES, "cnn-cells": IMAGES,
            "cnn-small": IMAGES, "lenet": IMAGES, "lstm-char": TOKENS,
        }.items()
    },
    "two layers": (Net, VECTORS),
    "float32 only": (lambda: Net(Float32()), VECTORS),
    "of several scales": (lambda: Net(torch.sin, lambda x: x * SCALE.to(x.dtype)), VECTORS),
    "steep": (lambda: Net(lambda x: torch.sin(300 * x)), VECTORS),
    "normalised layer": (lambda: Net(lambda x: functional.layer_norm(x, (8,)), zero=True), VECTORS),
    "overflow": (lambda: Net(lambda x: x.exp()), VECTORS),
    "cast": (lambda: Net(lambda x: x.float().tanh().to(x.dtype)), VECTORS),
    "softmax": (lambda: Net(lambda x: x.softmax(1)), VECTORS),
    "cumulative sum": (lambda: Net(lambda x: x.cumsum(1)), VECTORS),
    "sorted": (lambda: Net(lambda x: x.sort(1).values), VECTORS),
    "rank of a number": (lambda: Net(lambda x: x * x.argsort(1).argsort(1)), VECTORS),
    "largest numbers": (lambda: Net(lambda x: x * (x >= x.topk(3).values[:, -1:])), VECTORS),
    "quantile": (lambda: Net(lambda x: torch.minimum(x, x.quantile(0.7, dim=1, keepdim=True))), VECTORS),
    "8 bits, own scale": (
        lambda: Net(lambda x: rounded_to_8_bits(x, x.abs().amax(1, keepdim=True).detach() / 127)), VECTORS,
    ),
    "rescales itself above 10": (
        lambda: Net(lambda x: x * (10 / x.abs().amax(dim=1, keepdim=True)).clamp(max=1)), VECTORS,
    ),
    "of length one": (lambda: Net(lambda x: functional.normalize(x, dim=1)), VECTORS),
    "best expert": (lambda: Net(Experts()), VECTORS),
    "one after the other": (lambda: Net(OneAfterTheOther()), VECTORS),
    "heads of attention": (lambda: Net(Heads()), VECTORS),
    "attention by hand": (lambda: Net(Positions()), VECTORS),
    "einsum": (lambda: Net(lambda x: torch.einsum("bi,bj->bij", x, x).sum(2)), VECTORS),
    "own parameter": (lambda: Net(Scaled()), VECTORS),
    "constant matrix": (lambda: Net(Fourier()), VECTORS),
    "own gradient": (lambda: Net(Doubled.apply), VECTORS),
    "reshaped": (lambda: Net(lambda x: x.view(-1, 4, 2).transpose(1, 2).reshape(len(x), -1)), VECTORS),
    "gathered": (lambda: Net(lambda x: x.gather(1, x.argsort(1))), VECTORS),
    "padded": (lambda: Net(lambda x: functional.pad(x, (1, 1))[:, 1:-1] + x.new_zeros(x.shape[0], 1)), VECTORS),
    "parametric ReLU": (lambda: Net(nn.PReLU(8)), VECTORS),
    "root mean square": (lambda: Net(nn.RMSNorm(8)), VECTORS),
    "norm of a layer": (lambda: Net(nn.LayerNorm(8)), VECTORS),
    "norm of a weight": (lambda: Net(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))), VECTORS),
    "frozen batch normalisation": (frozen_norm, VECTORS),
    "frozen layer": (lambda: Net(nn.Linear(8, 8).requires_grad_(False)), VECTORS),
    "adapters": (lambda: networks.with_lora(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)), 2), VECTORS),
    "bilinear": (TwoParts, VECTORS),
    "several inputs": (lambda: networks.with_inputs(TwoParts(), networks.Part((6,))), VECTORS),
    "groups": (lambda: images(nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2), width=144), IMAGES),
    "normalised images": (lambda: images(nn.InstanceNorm2d(4, affine=True), nn.AvgPool2d(3), width=64), IMAGES),
    "upward": (lambda: images(nn.ConvTranspose2d(4, 2, 2, 2), nn.AdaptiveAvgPool2d(3), width=18), IMAGES),
    "in circles": (lambda: images(nn.Conv2d(4, 2, 3, padding_mode="circular", padding=1), width=288), IMAGES),
    "changed in place": (lambda: images(nn.ReLU(inplace=True), nn.Upsample(scale_factor=2), width=2304), IMAGES),
    "recurrent": (lambda: Text(lambda *sizes: nn.LSTM(*sizes, batch_first=True)), TOKENS),
    "gated": (lambda: Text(lambda *sizes: nn.GRU(*sizes, batch_first=True)), TOKENS),
    "recurrent, of Opacus": (lambda: Text(lstm), TOKENS),
    "tied": (Tied, TOKENS),
    "critic": (lambda: networks.build_gan("gan-pendigits-gn", VECTORS, 2)["discriminator"], VECTORS),
}  # fmt: skip
