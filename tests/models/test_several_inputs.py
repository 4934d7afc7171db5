"""Networks of several and nested inputs: each part of an example arrives where it belongs."""

import numpy as np
import pytest
import torch
from kit.own_networks import own_network
from kit.tables import for_rows
from torch import nn

from coterie.client.personal import personalised
from coterie.client.sgd import LocalTrainingConfig
from coterie.datasets import Shard, TestSet
from coterie.models import ModelError, Part, check_network, float32_arrays, trainable, with_inputs
from coterie.wire.messages import Layout

X = torch.arange(14.0).reshape(2, 7)


class Recorder(nn.Module):
    """Keeps its arguments."""

    def __init__(self):
        super().__init__()
        self.seen, self.scale = None, nn.Parameter(torch.ones(()))

    def forward(self, *arguments, **named):
        self.seen = arguments, named
        return torch.zeros(2, 3) * self.scale


def received(*inputs, x=X, **named):
    network = Recorder()
    with_inputs(network, *inputs, **named)(x)
    return network.seen


def same(found, wanted):
    assert type(found) is type(wanted)
    if isinstance(wanted, dict):
        assert list(found) == list(wanted)
        found, wanted = list(found.values()), list(wanted.values())
    if isinstance(wanted, list | tuple):
        for one, other in zip(found, wanted, strict=True):
            same(one, other)
    else:
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)


@for_rows(
    ("inputs", "named", "wanted"),
    [
        ([Part((7,))], {}, ((X,), {})),
        ([Part((2, 3)), Part()], {}, ((X[:, :6].reshape(2, 2, 3), X[:, 6]), {})),
        ([Part((1,))], {"b": Part((6,))}, ((X[:, :1],), {"b": X[:, 1:]})),
        ([], {"b": Part((6,)), "a": Part()}, ((), {"b": X[:, :6], "a": X[:, 6]})),
        ([{"b": Part((3,)), "a": [Part(), (Part((3,)),)]}], {}, (({"b": X[:, :3], "a": [X[:, 3], (X[:, 4:],)]},), {})),
        ([Part((4,), categories=3), Part((3,))], {}, ((X[:, :4].clamp(0, 2).long(), X[:, 4:]), {})),
    ],
)
def test_parts_arrive_in_order_and_structure(inputs, named, wanted):
    same(received(*inputs, **named), wanted)
    same(received(*inputs, x=X.reshape(2, 1, 7, 1), **named), wanted)


def test_categories_are_whole_numbers_in_range():
    x = torch.tensor([[-3.0, 1.4, 1.6, float("nan"), float("inf"), 9e9, 2.0]])
    ((found,), _) = received(Part((7,), categories=4), x=x)
    assert found.tolist() == [[0, 1, 2, 0, 3, 3, 2]]
    ((found,), _) = received(Part((7,), categories=4), x=torch.tensor([[-1, 0, 1, 2, 3, 4, 5]]))
    assert found.tolist() == [[0, 0, 1, 2, 3, 3, 3]]
    ((kept,), _) = received(Part((7,)), x=torch.arange(7)[None])
    assert kept.dtype == torch.int64


@for_rows(
    ("make", "text"),
    [
        (lambda: with_inputs(Recorder()), "name the parts of an example"),
        (lambda: with_inputs(Recorder(), {}, []), "name the parts of an example"),
        (lambda: with_inputs(Recorder(), (1, 8, 8)), "1 is no Part, nor a dict, list or tuple of parts"),
        (lambda: with_inputs(Recorder(), None, a=Part()), "None is no Part"),
        (lambda: Part((0,)), "sizes above 0"),
        (lambda: Part((2.5,)), "sizes above 0"),
        (lambda: Part((), categories=-1), "categories at least 0"),
    ],
)
def test_wrong_parts_are_refused(make, text):
    with pytest.raises(ModelError, match=text):
        make()


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.head = nn.Linear(2, 5), nn.Linear(9, 3)

    def forward(self, left, right):
        return self.head(torch.cat([self.left(left).relu(), right], 1))


MAKES = {
    "bare": Two,
    "short": lambda: with_inputs(Two(), Part((2,)), Part((3,))),
    "long": lambda: with_inputs(Two(), Part((2,)), Part((4,)), Part()),
    "good": lambda: with_inputs(Two(), Part((2,)), Part((4,))),
}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("bare", "missing 1 required positional argument: 'right'; an example is one array: .*with_inputs"),
        ("short", "the parts of with_inputs have 5 numbers, an example has 6"),
        ("long", "the parts of with_inputs have 7 numbers, an example has 6"),
        ("good", ""),
    ],
)
def test_the_check_of_a_network_names_the_way_out(name, text, monkeypatch):
    network = own_network(monkeypatch, lambda shape, classes: MAKES[name]())
    if not text:
        assert check_network(network, (6,), 3, "vectors") == []
        return
    with pytest.raises(ModelError, match=text):
        check_network(network, (6,), 3, "vectors")


@pytest.mark.parametrize("method", ["last-layer", "prior", "all"])
def test_a_client_fits_it_to_its_own_records(method):
    torch.manual_seed(0)
    network = MAKES["good"]()
    layout = Layout.of(trainable(network))
    start = layout.flatten(float32_arrays(network))
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((30, 6), np.float32), np.repeat([0, 0, 1], 10)
    shard = Shard(0, 0, x, y, TestSet(x, y))
    config = LocalTrainingConfig(1, 10, 0.1)
    own = personalised(network, layout, start[None], [shard], method, config, [rng], lambda: start)
    assert (own.models[0] != start).any()
