"""Public initial parameters from a file, frozen layers, and refusals of what does not fit."""

import os
import re

import pytest
import torch
from safetensors.torch import save_file

from coterie.models import (
    ModelError,
    NetworkSpec,
    build,
    check_network,
    constants,
    constants_of,
    file_hash,
    initialise,
    trainable,
)

SHAPE, CLASSES = (1, 4, 4), 3


@pytest.fixture
def write(tmp_path):
    """Writes a file of parameters of a built-in network, changed by arguments; returns its path."""

    def make(model="mlp-32", drop=(), **changes):
        torch.manual_seed(5)
        tensors = {name: value.clone() for name, value in build(model, SHAPE, CLASSES).state_dict().items()}
        tensors |= {name.replace("__", "."): value for name, value in changes.items()}
        save_file({name: value for name, value in tensors.items() if name not in drop}, tmp_path / "base.safetensors")
        return str(tmp_path / "base.safetensors")

    return make


def values(network):
    return {name.replace(".base", ""): value for name, value in network.state_dict().items()}


@pytest.mark.parametrize(
    ("adapters", "frozen", "trains"),
    [
        ("none", "", ["hidden.weight", "hidden.bias", "output.weight", "output.bias"]),
        ("none", "hidden", ["output.weight", "output.bias"]),
        ("none", "hid*", ["output.weight", "output.bias"]),
        ("none", "hidden.weight+output.b*", ["hidden.bias", "output.weight"]),
        ("lora:rank=1", "", ["hidden.down.weight", "hidden.up.weight", "output.down.weight", "output.up.weight"]),
        ("lora:rank=1,train=output", "", ["hidden.down.weight", "hidden.up.weight", "output.weight", "output.bias"]),
    ],
)
def test_a_file_gives_the_initial_parameters_and_the_frozen_ones(write, adapters, frozen, trains):
    path = write()
    spec = NetworkSpec("mlp-32", adapters, frozen, path)
    check_network(spec, SHAPE, CLASSES, "images")
    network = build(spec, SHAPE, CLASSES)
    assert list(trainable(network)) == trains
    torch.manual_seed(5)
    for name, value in build("mlp-32", SHAPE, CLASSES).state_dict().items():
        assert torch.equal(values(network)[name], value)
    assert {*values(network)} >= {name.replace(".base", "") for name in constants_of(spec, SHAPE, CLASSES)}


def test_frozen_layers_without_a_file_are_the_same_at_every_build_and_others_are_drawn():
    spec = NetworkSpec("mlp-32", frozen="hidden")
    check_network(spec, SHAPE, CLASSES, "images")
    networks = [build(spec, SHAPE, CLASSES) for _ in range(2)]
    assert torch.equal(networks[0].hidden.weight, networks[1].hidden.weight)
    assert not torch.equal(networks[0].output.weight, networks[1].output.weight)
    one, other = (initialise(spec, SHAPE, CLASSES, seed) for seed in (0, 1))
    assert (one["output.bias"] != other["output.bias"]).all()


def test_a_head_that_the_file_lacks_is_new(write):
    path = write(drop=["output.weight", "output.bias"])
    network = build(NetworkSpec("mlp-32", frozen="hidden", pretrained=path), SHAPE, CLASSES)
    assert list(trainable(network)) == ["output.weight", "output.bias"]
    build(NetworkSpec("mlp-32", "lora:rank=2,train=output", pretrained=path), SHAPE, CLASSES)


def test_buffers_come_from_the_file_too(tmp_path):
    save_file({"ids": torch.tensor([0, 1, 2]), "body.bias": torch.zeros(12)}, tmp_path / "base.safetensors")
    spec = NetworkSpec("plugged_networks:careful", pretrained=str(tmp_path / "base.safetensors"))
    check_network(spec, (4,), CLASSES, "vectors")
    assert constants(build(spec, (4,), CLASSES))["ids"].tolist() == [0, 1, 2]


def test_the_hash_is_that_of_the_content(write):
    path = write()
    before = file_hash(path)
    assert file_hash(path) == before
    assert re.fullmatch("[0-9a-f]{64}", before)
    write(output__bias=torch.ones(3))
    os.utime(path, ns=(0, 1))  # the clock of files may not have moved
    assert file_hash(path) != before
    assert torch.equal(build(NetworkSpec("mlp-32", pretrained=path), SHAPE, CLASSES).output.bias, torch.ones(3))


@pytest.mark.parametrize(
    ("changes", "spec", "words"),
    [
        ({"output__bias": torch.ones(4)}, {}, r"output.bias has shape \(4,\), and \(3,\) in the network"),
        ({"head__bias": torch.ones(3)}, {}, "the network has no head.bias; it has hidden.weight"),
        ({"model": "linear"}, {}, "output.weight has shape"),
        ({"drop": ["hidden.bias"]}, {"frozen": "hidden"}, "lacks hidden.bias, which the run freezes"),
        ({"drop": ["output.bias"]}, {"adapters": "lora:rank=1"}, "lacks output.bias, which the run freezes"),
        ({}, {"frozen": "body"}, "frozen: the network has no layer or parameter 'body'; it has hidden.weight"),
        ({}, {"frozen": "hid"}, "no layer or parameter 'hid'"),
        ({}, {"frozen": "hidden", "adapters": "lora:rank=1"}, "leave frozen out"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(write, changes, spec, words):
    with pytest.raises(ModelError, match=words) as refused:
        build(NetworkSpec("mlp-32", pretrained=write(**changes), **spec), SHAPE, CLASSES)
    assert "\n" not in str(refused.value)
    assert "model 'mlp-32': " in str(refused.value)


def test_everything_frozen_is_refused():
    with pytest.raises(ModelError, match="no parameters to train: all are frozen"):
        check_network(NetworkSpec("mlp-32", frozen="*"), SHAPE, CLASSES, "images")


@pytest.mark.parametrize("content", [None, b"", b"PK\x03\x04 a pickle", b"\xff" * 64])
def test_files_that_cannot_be_read_are_refused(tmp_path, content):
    path = tmp_path / "base.safetensors"
    if content is not None:
        path.write_bytes(content)
    words = r"pretrained.*base.safetensors'?( cannot be read: | is no file of safetensors)"
    with pytest.raises(ModelError, match=words):
        build(NetworkSpec("mlp-32", pretrained=str(path)), SHAPE, CLASSES)
