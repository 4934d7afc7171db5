"""A network that cannot be trained is refused before anything starts, with one line that names the layer."""

import pytest
import torch
from commands import assert_refused
from torch import nn

from coterie.models import MODELS, ModelError, check_network

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


NETWORKS = {
    "good": lambda shape, classes: nn.Sequential(nn.Linear(6, 5), nn.GroupNorm(1, 5), nn.ReLU(), nn.Linear(5, classes)),
    "constant": lambda shape, classes: flat(nn.Linear(6, classes), Scaled()),
    "batch_norm": lambda shape, classes: flat(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, classes)),
    "mixing": lambda shape, classes: Mixing(),
    "dropout": lambda shape, classes: flat(nn.Linear(6, 50), nn.Dropout(0.5), nn.Linear(50, classes)),
    "wide": lambda shape, classes: flat(nn.Linear(6, classes + 3)),
    "wrong_input": lambda shape, classes: flat(nn.Linear(7, classes)),
    "empty": lambda shape, classes: flat(),
    "lazy": lambda shape, classes: flat(nn.LazyLinear(classes)),
    "tuple": lambda shape, classes: nn.LSTM(6, classes, batch_first=True),
    "number": lambda shape, classes: flat(nn.Linear(6, 1), nn.Flatten(0)),
    "seven": lambda shape, classes: flat(nn.Linear(6, 7)),
    "infinite": lambda shape, classes: flat(nn.Linear(6, classes), Scaled(float("inf"))),
}


class Scaled(nn.Module):
    """Multiplies by a constant buffer, which no example changes."""

    def __init__(self, factor=2.0):
        super().__init__()
        self.register_buffer("factor", torch.tensor(factor))

    def forward(self, x):
        return self.factor * x


@pytest.fixture
def network(monkeypatch):
    import sys
    import types

    module = types.ModuleType("networks_of_a_user")
    vars(module).update(NETWORKS)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return lambda name: f"{module.__name__}:{name}"


@pytest.mark.parametrize("name", ["good", "constant"])
def test_a_network_of_the_contract_passes(network, name):
    state = torch.get_rng_state()
    check_network(network(name), (6,), CLASSES, "vectors")
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("batch_norm", r"layer '2' \(BatchNorm1d\) mixes the examples of a batch.* use GroupNorm"),
        ("mixing", "output 0 of an example changes with one other example; replace batch normalisation"),
        ("dropout", "two calls with the same examples differ; remove dropout"),
        ("wide", r"returns \(16, 7\) for 16 examples; expected \(16, 4\), one logit for each of 4 classes"),
        ("wrong_input", r"fails on examples of shape 6: RuntimeError: .*shapes cannot be multiplied"),
        ("empty", "has no parameters to train"),
        ("lazy", r"layer '1' \(LazyLinear\) has no shape before its first call"),
        ("tuple", "returns tuple for 16 examples"),
        ("infinite", "initial outputs are not finite"),
    ],
)
def test_what_is_wrong_is_named(network, name, message):
    with pytest.raises(ModelError, match=message):
        check_network(network(name), (6,), CLASSES, "vectors")


def test_a_network_for_real_targets_returns_one_number(network):
    check_network(network("number"), (6,), 0, "vectors")
    with pytest.raises(ModelError, match=r"returns \(16, 7\) for 16 examples; expected \(16,\), one number for each"):
        check_network(network("seven"), (6,), 0, "vectors")


def test_built_in_networks_satisfy_the_contract(monkeypatch):
    """They are not checked in runs; here they are."""
    from coterie.models import checks

    monkeypatch.setattr(checks, "MODELS", {})
    shapes = {"images": (1, 16, 16), "vectors": (6,), "tokens": (9,)}
    for name, info in MODELS.items():
        for kind in info.takes:
            check_network(name, shapes[kind], 0 if info.outputs == "number" else 30, kind)


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
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "class Tied(nn.Module):\n"
        "    def __init__(self, classes):\n"
        "        super().__init__()\n"
        "        self.inner = nn.Linear(64, classes)\n"
        "    def forward(self, x):\n"
        "        return x.flatten(1) @ self.inner.weight.T + self.inner.bias\n"
        "def make(shape, classes):\n"
        "    return Tied(classes)\n"
    )
    answer = coterie(
        "run", "--strategy", "f-cdpfl", "--model", "mine:make", "--clients", 10, "--set", "samples-per-client=30"
    )
    assert_refused(answer, "DP-SGD: ")
    assert not (tmp_path / "runs").exists()
