"""Apps that send the parameters that train alone, such as adapters of PEFT; all others are constants at the site."""

import copy

import numpy as np
import pytest
import torch
from federation import QUIET, TERMS, context, epoch, message, private
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from coterie.guard import Guard
from coterie.models import trainable, with_lora

pytestmark = QUIET


class Shift(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.tensor([0.5, 0.5]), persistent=False)

    def forward(self, x):
        return x + self.shift


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.value = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return x * self.value


class Scaled(nn.Module):
    """A 0-d parameter, a buffer outside ``state_dict``, and adapters."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        layers = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
        self.layers, self.scale = with_lora(layers, rank=2, train=["2"]), Scale()
        self.shift = Shift()

    def forward(self, x):
        return self.scale(self.shift(self.layers(x)))


def plain(name):
    return name


def renamed(name):
    """As ``get_peft_model_state_dict`` names them."""
    return f"base_model.model.{name.replace('lora_', 'default.lora_')}"


def answered(site, train, names=plain, sent=None, make=Scaled):
    """Answer of a guarded site, and the arrays that it received."""
    app = ClientApp(mods=[Guard()])
    arrays = {names(name): value.detach().numpy().copy() for name, value in trainable(make()).items()}
    arrays = arrays if sent is None else sent(arrays)

    @app.train()
    def _(message, context):
        model = make()
        received = message.content["arrays"].to_torch_state_dict()
        with torch.no_grad():
            for name, value in trainable(model).items():
                if names(name) in received:
                    value.copy_(received[names(name)])
        trained = train(model)
        found = {name: dict(trained.named_parameters()) for name in arrays}
        values = {names(name): value.detach().numpy() for name, value in trainable(trained).items()}
        assert found
        record = ArrayRecord({name: Array(values.get(name, arrays[name])) for name in arrays})
        return Message(RecordDict({"arrays": record}), reply_to=message)

    question = message()
    question.content["arrays"] = ArrayRecord({name: Array(value) for name, value in arrays.items()})
    return app(question, context(**site)), arrays


def honest(model):
    epoch(*private(model))
    return model


@pytest.fixture
def site(tmp_path):
    return TERMS | {"state-dir": str(tmp_path / "site")}


@pytest.mark.parametrize("names", [plain, renamed])
def test_adapters_alone_travel(site, names, caplog):
    caplog.set_level("INFO", logger="flwr")
    reply, sent = answered(site, honest, names)
    assert not reply.has_error()
    found = {name: array.numpy() for name, array in reply.content["arrays"].items()}
    assert [(name, value.shape) for name, value in found.items()] == [(name, v.shape) for name, v in sent.items()]
    assert not any(np.array_equal(found[name], sent[name]) for name in found if "lora_a" not in name.lower())
    assert "must be public: they are constants here, of SHA-256" in caplog.text


def base_changes(model):
    parts = private(model)
    with torch.no_grad():
        next(value for value in model.parameters() if not value.requires_grad).add_(1.0)
    epoch(*parts)
    return model


def buffer_changes(model):
    parts = private(model)
    model.shift.shift += 1.0
    epoch(*parts)
    return model


def base_unfrozen_before(model):
    for value in model.parameters():
        value.requires_grad_(True)
    return honest(model)


def base_unfrozen_after(model):
    parts = private(model)
    for value in model.parameters():
        value.requires_grad_(True)
    epoch(*parts)
    return model


def other_start(model):
    with torch.no_grad():
        model.scale.value.add_(1.0)
    return honest(model)


def replaced_base(model):
    parts = private(model)
    name = next(name for name, value in model.named_parameters() if not value.requires_grad)
    layer, _, key = name.rpartition(".")
    setattr(model.get_submodule(layer), key, nn.Parameter(torch.zeros_like(model.get_parameter(name)), False))
    epoch(*parts)
    return model


def sends_another(model):
    trained = copy.deepcopy(honest(model))
    with torch.no_grad():
        trained.scale.value.add_(1.0)
    return trained


@pytest.mark.parametrize(
    ("train", "text"),
    [
        (base_changes, "changed other than by a private step"),
        (buffer_changes, "'shift.shift' changed other than by a private step"),
        (base_unfrozen_before, "other parameters than the message"),
        (base_unfrozen_after, "was frozen or unfrozen after make_private"),
        (replaced_base, "is another parameter than at make_private"),
        (other_start, "'scale.value' differs from the message"),
        (sends_another, "not those that private training produced"),
    ],
)
def test_what_is_no_constant_is_refused(site, train, text, caplog):
    reply, _ = answered(site, train)
    assert reply.has_error()
    assert text in caplog.text


def without(arrays, count=1):
    return dict(list(arrays.items())[count:])


@pytest.mark.parametrize(
    "sent",
    [
        without,
        lambda arrays: {**arrays, "more": np.zeros(1, np.float32)},
        lambda arrays: {f"strange.{name}": value for name, value in without(arrays).items()},
    ],
)
def test_a_message_of_other_parameters_is_refused(site, sent, caplog):
    reply, _ = answered(site, honest, sent=sent)
    assert reply.has_error()
    assert "other parameters than the message" in caplog.text
