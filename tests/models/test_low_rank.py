"""Adapters: what trains and travels, exactness of DP-SGD, merging, and refusals."""

import copy

import numpy as np
import pytest
import torch
from kit.tables import for_rows
from torch import nn

from coterie.client.dpsgd import DPSGD, clipped_gradients
from coterie.fields.settings import ConfigError
from coterie.models import (
    ModelError,
    NetworkSpec,
    build,
    check_network,
    constants,
    constants_of,
    fingerprint,
    initialise,
    merged,
    num_parameters,
    trainable,
    with_lora,
)
from coterie.models.adapters import LoRA
from coterie.models.settings import TrainingSettings


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens):
        return self.head(self.block(self.embedding(tokens)).mean(1))


def moved(network):
    """The network with adapters that do something."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in trainable(network).values():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return network


def test_only_the_adapters_and_the_modules_named_train():
    network = with_lora(mlp(), rank=2, layers=["0"], train=["4"])
    assert list(trainable(network)) == ["0.down.weight", "0.up.weight", "4.weight", "4.bias"]
    assert num_parameters(network) == 2 * 6 + 16 * 2 + 16 * 3 + 3
    assert list(trainable(with_lora(mlp(), rank=1, train=["4"]))) == [
        f"{layer}.{part}.weight" for layer in (0, 2) for part in ("down", "up")
    ] + ["4.weight", "4.bias"]


def test_adapters_start_as_the_network_that_they_adapt_and_leave_it_unchanged():
    network, x = mlp(), torch.randn(5, 6)
    torch.testing.assert_close(with_lora(network, rank=2)(x), network(x))
    assert all(parameter.requires_grad for parameter in network.parameters())


@pytest.mark.parametrize(("make", "x"), [(mlp, torch.randn(5, 6)), (Encoder, torch.arange(20).reshape(4, 5) % 7)])
def test_merged_networks_compute_the_same_with_the_layers_of_the_original(make, x):
    adapted = moved(with_lora(make(), rank=2, alpha=3.0))
    whole = merged(adapted)
    for mode in (True, False):  # transformer layers read weights in evaluation
        with torch.no_grad():
            torch.testing.assert_close(whole.train(mode)(x), adapted.train(mode)(x), rtol=1e-5, atol=1e-6)
    assert [(name, value.shape) for name, value in whole.named_parameters()] == [
        (name, value.shape) for name, value in make().named_parameters()
    ]


@pytest.mark.parametrize(
    ("make", "x"), [(mlp, torch.randn(9, 6)), (Encoder, torch.arange(45).reshape(9, 5) % 7)], ids=["mlp", "encoder"]
)
def test_dpsgd_of_adapters_by_ghost_norms_equals_opacus_and_leaves_the_rest_alone(make, x):
    network = moved(with_lora(make(), rank=2))
    before = fingerprint(constants(network))
    sums = {}
    for ghost in (True, False):
        used = copy.deepcopy(network)
        settings = DPSGD(num_examples=9, batch_size=9, epochs=1, lr=0.1, clip_norm=0.05, noise_multiplier=1.0)
        sums[ghost] = clipped_gradients(used, x, lambda out, _: out.exp().sum(1), settings, ghost=ghost)
        assert fingerprint(constants(used)) == before
    np.testing.assert_allclose(sums[True], sums[False], atol=1e-5)
    assert sums[True].norm() > 0.1


@for_rows(
    ("network", "given", "words"),
    [
        (mlp(), {"layers": ["1"]}, "layer '1' is ReLU, not nn.Linear; choose from 0, 2, 4"),
        (mlp(), {"layers": ["out"]}, "no layer 'out'; it has 0, 2, 4"),
        (mlp(), {"train": ["out"]}, "no layer 'out'"),
        (mlp(), {"rank": 3}, "at least 1 and below 3, the smaller side of layer '4', not 3; choose other layers"),
        (mlp(), {"rank": 0}, "at least 1 and below 6"),
        (mlp(), {"layers": ["block*"]}, "no layer 'block\\*'; it has 0, 2, 4"),
        (mlp(), {"train": ["block*"]}, "no layer 'block\\*'"),
        (nn.Sequential(nn.Conv2d(1, 2, 3)), {}, "no linear layer"),
        (Encoder(), {"layers": ["block.self_attn.out_proj"]}, "is NonDynamicallyQuantizableLinear, not nn.Linear"),
    ],
)
def test_adapters_that_cannot_be_are_refused(network, given, words):
    with pytest.raises(ModelError, match=words):
        with_lora(network, **{"rank": 2, **given})


def test_a_single_layer_can_be_adapted():
    adapted = moved(with_lora(nn.Linear(3, 2), rank=1))
    x = torch.randn(4, 3)
    torch.testing.assert_close(merged(adapted)(x), adapted(x))
    assert isinstance(merged(adapted), nn.Linear)


# ---- the setting ------------------------------------------------------------------------------------------


@for_rows(
    ("text", "expected"),
    [
        ("none", None),
        ("lora", LoRA()),
        ("lora:rank=2", LoRA(2)),
        ("lora:alpha=4,rank=2", LoRA(2, 4.0)),
        ("lora:layers=a.*+b,train=head,std=0", LoRA(layers=("a.*", "b"), train=("head",), std=0.0)),
    ],
)
def test_adapters_as_a_text(text, expected):
    assert LoRA.parse(text) == expected
    assert TrainingSettings(adapters=text).network == NetworkSpec("mlp-32", text)


@for_rows(
    "text",
    ["", "lor", "lora:rank", "lora:rank=", "lora:rank=0", "lora:rank=1.5", "lora:rnk=2", "lora:rank=2,rank=3",
     "lora:alpha=0", "lora:alpha=nan", "lora:alpha=inf", "lora:layers=", "lora:layers=a+", "lora:std=-1",
     "peft:rank=2"],
)  # fmt: skip
def test_other_texts_are_refused_in_one_line(text):
    with pytest.raises(ConfigError, match=r"training.adapters = .*: must be none or lora:rank=R") as refused:
        TrainingSettings(adapters=text)
    assert "\n" not in str(refused.value)


def test_built_in_networks_have_adapters_beside_the_same_frozen_parameters_at_every_build():
    spec = NetworkSpec("mlp-32", "lora:rank=2,layers=hidden,train=output")
    check_network(spec, (1, 4, 4), 3, "images")
    trains = ["hidden.down.weight", "hidden.up.weight", "output.weight", "output.bias"]
    assert list(initialise(spec, (1, 4, 4), 3, 0)) == trains
    frozen = [fingerprint(constants_of(spec, (1, 4, 4), 3)) for _ in range(2)]
    assert frozen[0] == frozen[1] != fingerprint({})
    one, other = (initialise(spec, (1, 4, 4), 3, seed) for seed in (0, 1))
    assert all((one[name] != other[name]).any() for name in ("hidden.down.weight", "hidden.up.weight"))


def test_the_state_of_the_generator_does_not_depend_on_adapters():
    states = []
    for adapters in ("lora:rank=1,layers=hidden,std=0", "lora:rank=1,layers=hidden"):
        torch.manual_seed(3)
        build(NetworkSpec("mlp-32", adapters), (1, 4, 4), 3)
        states.append(constants_of(NetworkSpec("mlp-32", adapters), (1, 4, 4), 3)["hidden.base.weight"])
    assert torch.equal(*states)


@for_rows(
    ("model", "adapters", "words"),
    [
        ("mlp-32", "lora:rank=3", r"model 'mlp-32': adapters: rank must be .* below 3, .* 'output'"),
        ("mlp-32", "lora:layers=conv", "no layer 'conv'; it has hidden, output"),
        ("regression", "lora:rank=1", "below 1, the smaller side of layer 'output'"),
        ("plugged_networks:locked", "lora", r"cannot be copied: .*pickle"),
    ],
)
def test_adapters_that_do_not_fit_a_model_are_refused_in_one_line(model, adapters, words):
    shape, classes = ((4,), 0) if model == "regression" else ((1, 8, 8), 3)
    with pytest.raises(ModelError, match=words) as refused:
        build(NetworkSpec(model, adapters), shape, classes)
    assert "\n" not in str(refused.value)


def test_models_of_peft_work_like_adapters():
    pytest.importorskip("peft")
    check_network("plugged_networks:of_peft", (6,), 3, "vectors")
    network = moved(build("plugged_networks:of_peft", (6,), 3))
    assert {name.split(".")[-3] for name in trainable(network)} == {"lora_A", "lora_B"}
    x = torch.randn(5, 6)
    torch.testing.assert_close(merged(network)(x), network(x))
    assert [name for name, _ in merged(network).named_parameters()] == [name for name, _ in mlp().named_parameters()]
