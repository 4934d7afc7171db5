"""The trainable part of a network, its constants, and networks without batch normalisation."""

import numpy as np
import torch
from kit.tables import for_rows
from torch import nn

from coterie.models import (
    constants,
    differing,
    fingerprint,
    float32_arrays,
    num_parameters,
    set_trainable,
    trainable,
    without_batch_norm,
)


def network():
    layers = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2, dtype=torch.bfloat16))
    layers[0].requires_grad_(False)
    layers[1].register_buffer("ids", torch.arange(3))
    layers[1].register_buffer("turn", torch.tensor(1j), persistent=False)
    return layers


def test_frozen_parameters_are_no_part_of_it():
    assert [*trainable(network())] == ["1.weight", "1.bias", "2.weight", "2.bias"]
    assert num_parameters(network()) == 4 * 4 + 4 + 4 * 2 + 2
    assert [*constants(network())] == ["0.weight", "0.bias", "1.ids", "1.turn"]


def test_tied_parameters_have_one_name():
    layers = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
    layers[1].weight = layers[0].weight
    assert [*trainable(layers)] == ["0.weight", "1.bias"]


def test_values_return_in_their_own_types():
    one, other = network(), network()
    values = float32_arrays(one)
    assert {value.dtype for value in values.values()} == {np.dtype(np.float32)}
    values["1.weight"] = np.full((4, 4), 1 / 3, np.float32)
    set_trainable(other, values)
    assert other[2].weight.dtype == torch.bfloat16
    assert torch.equal(other[2].weight, one[2].weight)
    np.testing.assert_array_equal(float32_arrays(other)["1.weight"], values["1.weight"])
    values["2.bias"][:] = 9
    assert not (other[2].bias == 9).any(), "arrays are copies"


def test_a_fingerprint_covers_names_types_shapes_and_bits():
    base = {"a": torch.zeros(4), "b": torch.tensor(1)}
    others = [
        {"a": torch.zeros(4), "c": torch.tensor(1)},
        {"a": torch.zeros(2, 2), "b": torch.tensor(1)},
        {"a": torch.zeros(4, dtype=torch.int32), "b": torch.tensor(1)},
        {"a": torch.tensor([0.0, 0, 0, -0.0]), "b": torch.tensor(1)},
        {"a": torch.zeros(4)},
    ]
    found = [fingerprint(values) for values in (base, *others)]
    assert len({*found}) == 6
    assert fingerprint({"b": torch.tensor(1), "a": torch.zeros(4)}) == found[0]
    assert fingerprint({"a": torch.zeros(4, 2)[:, 0], "b": torch.tensor(1)}) == found[0], "not contiguous"
    assert fingerprint({}) is None
    assert differing(base, others[0]) == ["b", "c"]
    assert differing(base, others[3]) == ["a"]
    assert differing(base, dict(base)) == []


@for_rows(
    ("layer", "shape", "groups"),
    [
        (nn.BatchNorm2d(64), (2, 64, 3, 3), 32),
        (nn.BatchNorm2d(12), (2, 12, 3, 3), 6),
        (nn.BatchNorm2d(1), (2, 1, 3, 3), 1),
        (nn.BatchNorm1d(8), (2, 8), 1),
        (nn.BatchNorm3d(6, affine=False), (2, 6, 2, 2, 2), 3),
        (nn.SyncBatchNorm(7), (2, 7, 3), 1),
    ],
)
def test_group_norm_replaces_batch_norm(layer, shape, groups):
    before = nn.Sequential(nn.Identity(), nn.ModuleDict({"norm": layer}))
    after = without_batch_norm(before)[1]["norm"]
    assert isinstance(before[1]["norm"], type(layer)), "the network is not changed"
    assert after.num_groups == groups
    assert after.affine == layer.affine
    assert not [*after.buffers()]
    x = torch.randn(shape)
    assert torch.allclose(after(x)[:1], after(x[:1]), atol=1e-6)
    assert after(x).std() > 0.5
    assert isinstance(without_batch_norm(layer), nn.GroupNorm)


def test_instance_norm_loses_its_statistics():
    after = without_batch_norm(nn.Sequential(nn.InstanceNorm2d(3, track_running_stats=True)))
    assert not [*after.buffers()]
    assert after(torch.randn(2, 3, 4, 4)).shape == (2, 3, 4, 4)
