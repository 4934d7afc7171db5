"""A network that cannot be trained is refused before anything starts, with one line that names the layer."""

import threading

import pytest
import torch
import torch.nn.utils.prune
from kit.commands import assert_refused
from kit.own_networks import own_network
from torch import nn

from coterie.models import ModelError, check_network

CLASSES = 4


class Mixing(nn.Module):
    """Subtracts the mean of the batch."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.inner(x - x.mean(dim=0))


def flat(*layers):
    return nn.Sequential(nn.Flatten(), *layers)


class Own(nn.Module):
    """A layer with something beside it, and outputs that may use it."""

    def __init__(self, beside, use=lambda out, beside: out):
        super().__init__()
        self.inner, self.use = nn.Linear(6, CLASSES), use
        self.beside = beside

    def forward(self, x):
        return self.use(self.inner(x), self.beside)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, CLASSES)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x):
        if torch.is_grad_enabled():
            self.calls += 1
        return self.inner(x)


class Slow(nn.Module):
    """Half the outputs in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.inner(x) / (1 if self.training else 2)


class Fourier(nn.Module):
    def __init__(self, persistent, seeded):
        super().__init__()
        generator = torch.Generator().manual_seed(0) if seeded else None
        self.register_buffer("matrix", torch.randn(6, 8, generator=generator), persistent=persistent)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.head((x @ self.matrix).cos())


def two_views():
    network = flat(nn.Linear(6, 6), nn.Linear(6, CLASSES), nn.Linear(CLASSES, CLASSES))
    network[2].bias = nn.Parameter(network[3].bias.data)
    return network


def frozen(*layers, seeded=True):
    """The first layer is frozen."""
    network = flat(nn.Linear(6, 6), *layers, nn.Linear(6, CLASSES))
    if seeded:
        nn.init.eye_(network[1].weight)
        nn.init.zeros_(network[1].bias)
    network[1].requires_grad_(False)
    return network


def random_width():
    width = int(torch.randint(3, 90, ()))
    return flat(nn.Linear(6, width), nn.Linear(width, CLASSES))


def with_frozen_statistics():
    network = frozen(nn.BatchNorm1d(6).requires_grad_(False).eval())
    network[2].running_mean.fill_(0.5)
    return network


def with_buffer(value):
    network = Own(None)
    network.register_buffer("held", value)
    return network


SAME = flat(nn.Linear(6, CLASSES))

#: Networks of the contract.
GOOD = {
    "good": lambda: nn.Sequential(nn.Linear(6, 5), nn.GroupNorm(1, 5), nn.ReLU(), nn.Linear(5, CLASSES)),
    "constant": lambda: flat(nn.Linear(6, CLASSES), Scaled()),
    "frozen": frozen,
    "frozen_statistics": with_frozen_statistics,
    "fourier": lambda: Fourier(True, True),
    "fourier_hidden": lambda: Fourier(False, True),
    "weight_norm": lambda: flat(nn.utils.parametrizations.weight_norm(nn.Linear(6, CLASSES))),
    "unused": lambda: Own(nn.Linear(3, 3)),
    "scalar": lambda: Own(nn.Parameter(torch.tensor(2.0)), lambda out, beside: out * beside),
    "double": lambda: nn.Sequential(Typed(torch.float64), nn.Linear(6, CLASSES).double()),
    "half": lambda: nn.Sequential(Typed(torch.bfloat16), nn.Linear(6, CLASSES).bfloat16()),
    "float8": lambda: Own(
        nn.Parameter(torch.ones(3).to(torch.float8_e4m3fn), requires_grad=False),
        lambda out, beside: out + beside.float().sum(),
    ),
    "int_parameter": lambda: Own(
        nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False), lambda out, beside: out + beside.sum()
    ),
    "no_numbers": lambda: Own(nn.Parameter(torch.empty(0)), lambda out, beside: out + beside.sum()),
    "no_buffer": lambda: with_buffer(None),
    "nan_buffer": lambda: with_buffer(torch.tensor([float("nan")])),
    "expanded_buffer": lambda: with_buffer(torch.arange(4).expand(3, 4)),
    "sparse_gradient": lambda: Own(
        nn.Embedding(3, CLASSES, sparse=True),
        lambda out, beside: out + beside(torch.zeros(len(out), dtype=torch.int64)),
    ),
}
#: Networks that break the contract, and what the refusal says.
REFUSED = {
    "batch_norm": (
        lambda: flat(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, CLASSES)),
        r"layer '2' \(BatchNorm1d\) mixes the examples of a batch.*models.without_batch_norm\(network\)",
    ),
    "mixing": (Mixing, "output 0 of an example changes with one other example; replace batch normalisation"),
    "dropout": (
        lambda: flat(nn.Linear(6, 50), nn.Dropout(0.5), nn.Linear(50, CLASSES)),
        "two calls with the same examples differ; remove dropout",
    ),
    "wide": (
        lambda: flat(nn.Linear(6, 7)),
        r"returns \(16, 7\) for 16 examples; expected \(16, 4\), one logit for each of 4 classes",
    ),
    "wrong_input": (
        lambda: flat(nn.Linear(7, CLASSES)),
        r"fails on examples of shape 6: RuntimeError: .*shapes cannot be multiplied",
    ),
    "empty": (lambda: flat(), "has no parameters to train"),
    "lazy": (lambda: flat(nn.LazyLinear(CLASSES)), r"layer '1' \(LazyLinear\) has no shape before its first call"),
    "tuple": (lambda: nn.LSTM(6, CLASSES, batch_first=True), "returns tuple for 16 examples"),
    "frozen_at_random": (
        lambda: frozen(seeded=False),
        "frozen parameter '1.weight' differs between two builds; .*same at every build.*Generator",
    ),
    "random_buffer": (lambda: Fourier(True, False), "buffer 'matrix' differs between two builds"),
    "random_hidden_buffer": (lambda: Fourier(False, False), "buffer 'matrix' differs between two builds"),
    "random_attribute": (
        lambda: Own([torch.randn(CLASSES)], lambda out, beside: out * beside[0]),
        "another build of the same parameters computes other outputs; hold every tensor as",
    ),
    "counting": (Counting, "buffer 'calls' changes in a step of training; frozen"),
    "spectral": (
        lambda: flat(nn.utils.spectral_norm(nn.Linear(6, CLASSES))),
        "buffer '1.weight_[uv]' (differs between two builds|changes in a step)",
    ),
    "all_frozen": (lambda: flat(nn.Linear(6, CLASSES)).requires_grad_(False), "no parameters to train: all are frozen"),
    "complex": (
        lambda: Own(nn.Parameter(torch.ones(CLASSES, dtype=torch.complex64)), lambda out, beside: (out * beside).real),
        "parameter 'beside' is complex64; messages hold real numbers",
    ),
    "meta": (lambda: flat(nn.Linear(6, CLASSES, device="meta")), "'1.weight' has no values"),
    "parallel": (lambda: nn.DataParallel(flat(nn.Linear(6, CLASSES))), "returns DataParallel; return its module"),
    "script": (
        lambda: torch.jit.trace(flat(nn.Linear(6, CLASSES)), torch.zeros(2, 6)),
        "returns TorchScript; return the torch.nn.Module",
    ),
    "compiled": (
        lambda: torch.compile(flat(nn.Linear(6, CLASSES))),
        "returns a network of torch.compile; return the torch.nn.Module",
    ),
    "views": (two_views, "'2.bias' and '3.bias' share memory"),
    "same": (lambda: SAME, "build a new network at each call"),
    "random_width": (random_width, "parameter '1.weight' has another name or shape at the next build"),
    "slow": (Slow, "in evaluation mode it computes other outputs than in training"),
    "detached": (
        lambda: Own(None, lambda out, beside: out.detach()),
        "its outputs depend on none of its trainable parameters: inner.weight, inner.bias",
    ),
    "locked": (lambda: Own(threading.Lock()), "cannot be copied: cannot pickle .*lock.*; hold no locks"),
    "pruned": (
        lambda: flat(nn.utils.prune.custom_from_mask(nn.Linear(6, CLASSES), "weight", torch.eye(CLASSES, 6))),
        "cannot be copied: .*in place of torch.nn.utils.weight_norm or prune",
    ),
    "computed": (lambda: Own(torch.ones(3, requires_grad=True) * 2), "cannot be copied: "),
    "expanded": (
        lambda: Own(nn.Parameter(torch.ones(1).expand(3))),
        "'beside' is sparse, expanded, or of inference mode; .*clone",
    ),
    "inference": (
        lambda: torch.inference_mode()(lambda: flat(nn.Linear(6, CLASSES)))(),
        "'1.weight' is sparse, expanded, or of inference mode",
    ),
    "sparse_parameter": (lambda: Own(nn.Parameter(torch.eye(3).to_sparse())), "'beside' is sparse"),
    "sparse_buffer": (lambda: with_buffer(torch.eye(3).to_sparse()), "'held' is sparse"),
    "meta_buffer": (lambda: with_buffer(torch.ones(3, device="meta")), "'held' has no values"),
    "infinite": (lambda: flat(nn.Linear(6, CLASSES), Scaled(float("inf"))), "initial outputs are not finite"),
}


class Typed(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        return x.to(self.kind)


class Scaled(nn.Module):
    """Multiplies by a constant buffer, which no example changes."""

    def __init__(self, factor=2.0):
        super().__init__()
        self.register_buffer("factor", torch.tensor(factor))

    def forward(self, x):
        return self.factor * x


@pytest.fixture
def network(monkeypatch):
    return lambda make: own_network(monkeypatch, lambda shape, classes: make())


@pytest.mark.parametrize("make", GOOD.values(), ids=GOOD)
def test_a_network_of_the_contract_passes(network, make):
    state = torch.get_rng_state()
    check_network(network(make), (6,), CLASSES, "vectors")
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_wrong_is_named(network, make, message):
    with pytest.raises(ModelError, match=message):
        check_network(network(make), (6,), CLASSES, "vectors")


def test_unused_parameters_are_named(network):
    assert check_network(network(GOOD["unused"]), (6,), CLASSES, "vectors") == ["beside.weight", "beside.bias"]
    assert check_network(network(GOOD["frozen"]), (6,), CLASSES, "vectors") == []


def test_a_network_for_real_targets_returns_one_number(network):
    check_network(network(lambda: flat(nn.Linear(6, 1), nn.Flatten(0))), (6,), 0, "vectors")
    with pytest.raises(ModelError, match=r"returns \(16, 7\) for 16 examples; expected \(16,\), one number for each"):
        check_network(network(lambda: flat(nn.Linear(6, 7))), (6,), 0, "vectors")


def test_the_command_ends_in_one_line_before_a_folder_is_made(coterie, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def make(shape, classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, classes))\n"
    )
    for unit in ("client", "none"):
        answer = coterie("run", "--model", "mine:make", "--set", f"privacy-unit={unit}", "--out", "here")
        assert_refused(answer, "model 'mine:make': layer '2' (BatchNorm1d)")
    assert not (tmp_path / "here").exists()


def test_a_network_without_per_record_gradients_is_refused_at_record_level(coterie, tmp_path):
    (tmp_path / "mine_rows.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Half(nn.Module):\n"
        "    def __init__(self, shape, classes):\n"
        "        super().__init__()\n"
        "        self.inner = nn.Linear(torch.Size(shape).numel(), classes, dtype=torch.bfloat16)\n"
        "    def forward(self, x):\n"
        "        return self.inner(x.flatten(1).bfloat16()).float()\n"
        "def make(shape, classes):\n"
        "    return Half(shape, classes)\n"
    )
    answer = coterie(
        "run", "--strategy", "f-cdpfl", "--model", "mine_rows:make", "--clients", 10, "--set", "samples-per-client=30"
    )
    assert_refused(answer, "DP-SGD: 'inner.weight' of Half is bfloat16")
    assert not (tmp_path / "runs").exists()
