"""Frozen parameters and buffers of a user's network: kept once, hashed into the certificate, the same everywhere."""

import json
import sys

import numpy as np
import pytest
import torch
from kit.commands import assert_refused
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_tensors
from safetensors.torch import save_file
from sklearn.datasets import load_digits

import coterie as package
from coterie.client.cohort import _network
from coterie.inference import InferenceError
from coterie.models import ModelError, NetworkSpec, constants, constants_of, fingerprint

SOURCE = """
import torch
from torch import nn
SEED = 1
class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.body, self.first, self.second = nn.Linear(64, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.second.weight = self.first.weight
        self.head, self.scale = nn.Linear(16, classes), nn.Parameter(torch.tensor(1.0))
        drawn = torch.Generator().manual_seed(SEED)
        with torch.no_grad():
            self.body.weight.copy_(torch.randn(16, 64, generator=drawn) / 8)
            self.body.bias.zero_()
        self.body.requires_grad_(False)
        self.register_buffer("kept", torch.arange(10, 10 + classes))
        self.register_buffer("turn", torch.tensor([1 + 1j]), persistent=False)
        self.register_buffer("mask", torch.ones(16, dtype=torch.bool))
    def forward(self, x):
        hidden = self.body(x.flatten(1)).relu() * self.mask
        hidden = self.second(self.first(hidden).relu()).relu()
        return self.head(hidden) * self.scale + self.kept / self.kept * self.turn.real
def net(shape, classes):
    return Net(classes)
"""
TRAINABLE = ["first.bias", "first.weight", "head.bias", "head.weight", "scale", "second.bias"]


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Name of the network in a module of this test, and a function that changes what it builds."""
    name = f"mine_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(SOURCE)

    def change(seed):
        monkeypatch.setattr(sys.modules[name], "SEED", seed)

    yield f"{name}:net", change
    sys.modules.pop(name, None)
    _network.cache_clear()


def start(coterie, model, *more, unit="client"):
    words = ["--strategy", "fedavg", "--clusters", 1, "--clients", 8, "--rounds", 2, "--seed", 0, "--out", "run"]
    settings = ["--set", f"privacy-unit={unit}", "--set", "train-alone=0", *more]
    return coterie("run", "--model", model, *words, *settings)


def built(model):
    name, _, function = model.partition(":")
    return getattr(sys.modules[name], function)((1, 8, 8), 10)


def test_constants_are_kept_once_and_are_no_part_of_models(coterie, mine, tmp_path):
    model, change = mine
    assert start(coterie, model)[0] == 0
    run = tmp_path / "run"
    found = load_tensors(run / "models" / "constants.safetensors")
    wanted = constants(built(model))
    assert fingerprint(found) == fingerprint(wanted)
    assert {*found} == {"body.weight", "body.bias", "kept", "turn", "mask"}
    assert sorted(load_file(run / "models" / "cluster-0.safetensors")) == TRAINABLE
    certificate = json.loads((run / "privacy.json").read_text())
    assert certificate["public_inputs"]["constants"] == fingerprint(wanted)

    one = package.load(run, trust_code=True)
    assert one.card.constants == fingerprint(wanted)
    digits = torch.tensor(load_digits().images[:20, None], dtype=torch.float32) / 8 - 1
    outputs = one.outputs(digits.numpy(), 0)
    change(2)
    again = package.load(run, trust_code=True)
    np.testing.assert_array_equal(again.outputs(digits.numpy(), 0), outputs)
    assert torch.equal(again[0].second.weight, again[0].first.weight)

    (run / "models" / "constants.safetensors").unlink()
    with pytest.raises(InferenceError, match=r"other frozen parameters or buffers here.*put constants.safetensors"):
        package.load(run, trust_code=True)
    change(1)
    np.testing.assert_array_equal(package.load(run, trust_code=True).outputs(digits.numpy(), 0), outputs)
    for values in (found | {"mask": ~found["mask"]}, {name: found[name] for name in ("kept", "mask")}):
        save_file(values, run / "models" / "constants.safetensors")
        with pytest.raises(InferenceError, match=r"constants.safetensors is damaged, or of another run"):
            package.load(run, trust_code=True)


def test_a_resumed_run_has_the_same_constants(coterie, mine, tmp_path):
    model, change = mine
    assert start(coterie, model, "--set", "stop-after=1", unit="none")[0] == 0
    file = tmp_path / "run" / "models" / "constants.safetensors"
    before = file.read_bytes()
    change(2)
    answer = coterie("run", "--resume", "--out", "run", "--set", "stop-after=0")
    assert_refused(answer, "has other frozen parameters or buffers than at the start of the run; nothing was charged")
    change(1)
    assert coterie("run", "--resume", "--out", "run", "--set", "stop-after=0")[0] == 0
    assert file.read_bytes() == before
    assert fingerprint(constants(built(model))) == fingerprint(load_tensors(file))


def test_a_client_that_builds_others_says_so(coterie, mine):
    model, change = mine
    assert start(coterie, model, unit="none")[0] == 0
    spec, expected = (model, (1, 8, 8), 10, False), fingerprint(constants(built(model)))
    assert fingerprint(constants(_network(*spec, expected))) == expected
    _network.cache_clear()
    change(2)
    with pytest.raises(ModelError, match=r"other frozen parameters or buffers here than at the server \(body.weight"):
        _network(*spec, expected)


def test_networks_without_constants_have_no_such_file(coterie, tmp_path):
    assert start(coterie, "linear", unit="none")[0] == 0
    assert [file.name for file in (tmp_path / "run" / "models").iterdir()] == ["cluster-0.safetensors"]
    assert "constants" not in json.loads((tmp_path / "run" / "privacy.json").read_text()).get("public_inputs", {})


def test_machines_that_build_other_constants_agree_by_a_file(mine, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    name, change = mine
    examples, path = ((1, 8, 8), 10), str(tmp_path / "frozen.safetensors")
    built = constants_of(NetworkSpec(name), *examples)
    save_file({key: value for key, value in built.items() if key.startswith("body.")}, path)
    there, plain = NetworkSpec(name, pretrained=path), NetworkSpec(name)
    digest = fingerprint(constants_of(there, *examples))
    assert digest == fingerprint(built)
    change(2)
    with pytest.raises(ModelError, match=r"has other frozen parameters or buffers here .*a run with a file of them"):
        _network(plain, *examples, False, digest)
    assert fingerprint(constants(_network(there, *examples, False, digest))) == digest
