"""Networks of the field as own models: each trains, is predicted with and exported, or is refused in one line."""

import json
import re

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from kit.own_networks import own_network
from safetensors.numpy import save_file
from torch import nn
from torch.nn.functional import cross_entropy, max_pool2d, relu, scaled_dot_product_attention
from torch.utils.data import DataLoader, TensorDataset

from coterie.client.backend import train
from coterie.client.dpsgd import DPSGD, train_privately
from coterie.client.gradients import check_supported
from coterie.client.scores import accuracies
from coterie.client.sgd import LocalTrainingConfig
from coterie.datasets import Shard, TestSet
from coterie.engine.in_process import LocalGrid
from coterie.guard import Guard
from coterie.inference import InferenceError, load
from coterie.models import (
    ModelError,
    Part,
    build,
    call,
    check_network,
    constants,
    fingerprint,
    float32_arrays,
    initialise,
    set_training,
    trainable,
    with_inputs,
    with_lora,
    without_batch_norm,
)
from coterie.server.checkpoints import constants_content
from coterie.tasks import task_of
from coterie.wire import trainable_arrays
from coterie.wire.messages import Layout, unpack_models

CLASSES = 5
IMAGES, VECTORS, TOKENS = ("images", (3, 16, 16)), ("vectors", (6,)), ("tokens", (7,))


class LeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 5, padding=2), nn.Conv2d(6, 8, 3)
        self.fc1, self.fc2 = nn.Linear(8 * 3 * 3, 20), nn.Linear(20, CLASSES)

    def forward(self, x):
        x = max_pool2d(relu(self.conv1(x)), 2)
        x = max_pool2d(relu(self.conv2(x)), 2)
        return self.fc2(relu(self.fc1(x.flatten(1))))


class UNet(nn.Module):
    """Two levels with a connection between them; the mean of the map of each class is its logit."""

    def __init__(self):
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 8, 3, padding=1, padding_mode="circular")
        self.norm, self.up = nn.GroupNorm(2, 8), nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.out = nn.Conv2d(12, CLASSES, 1)

    def forward(self, x):
        first = relu(self.down1(x))
        second = relu(self.norm(self.down2(max_pool2d(first, 2))))
        return self.out(torch.cat([first, self.up(second)], 1)).mean((2, 3))


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.embedding, self.inner = nn.Embedding(CLASSES, 6), kind(6, 8, batch_first=True, **options)
        self.out = nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.out(self.inner(self.embedding(x))[0][:, -1])


class Attention(nn.Module):
    """Causal attention of linear layers, with the mask as a buffer."""

    def __init__(self, width):
        super().__init__()
        self.both, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("mask", torch.ones(TOKENS[1][0], TOKENS[1][0], dtype=torch.bool).tril(), persistent=False)

    def forward(self, x):
        return self.out(scaled_dot_product_attention(*self.both(x).chunk(3, dim=-1), attn_mask=self.mask))


class Tied(nn.Module):
    """A transformer whose embedding of tokens is its last layer."""

    def __init__(self, inner):
        super().__init__()
        self.tokens, self.places = nn.Embedding(CLASSES, 8), nn.Embedding(TOKENS[1][0], 8)
        self.inner, self.norm, self.out = inner, nn.LayerNorm(8), nn.Linear(8, CLASSES, bias=False)
        self.out.weight = self.tokens.weight
        self.register_buffer("ids", torch.arange(TOKENS[1][0]))

    def forward(self, x):
        hidden = self.tokens(x) + self.places(self.ids.expand(x.shape[0], -1))
        return self.out(self.norm(hidden + self.inner(hidden))[:, -1])


class ViT(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.patches, self.inner = nn.Conv2d(3, 8, 4, stride=4), inner
        self.token, self.places = nn.Parameter(torch.zeros(1, 1, 8)), nn.Parameter(torch.randn(1, 17, 8) / 50)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, CLASSES)

    def forward(self, x):
        x = self.patches(x).flatten(2).mT
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        return self.head(self.norm(self.inner(x))[:, 0])


class LenOfBatch(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.out = nn.Parameter(torch.zeros(1, 2)), nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.out(torch.cat([x, self.token.expand(len(x), -1)], 1))


class Tables(nn.Module):
    """Embeds the first column, which holds categories."""

    def __init__(self):
        super().__init__()
        self.embedding, self.numbers = nn.Embedding(4, 3), nn.Linear(5, 8)
        self.out = nn.Sequential(nn.LayerNorm(11), nn.ReLU(), nn.Linear(11, CLASSES))

    def forward(self, x):
        category = x[:, 0].abs().clamp(max=3).long()
        return self.out(torch.cat([self.embedding(category), self.numbers(x[:, 1:])], 1))


class TwoInputs(nn.Module):
    def __init__(self, bilinear):
        super().__init__()
        self.left, self.right = nn.Linear(2, 8), nn.Linear(4, 8)
        self.out = nn.Bilinear(8, 8, CLASSES) if bilinear else nn.Linear(16, CLASSES)

    def forward(self, x):
        both = [relu(layer(part)) for layer, part in zip((self.left, self.right), x.split([2, 4], 1), strict=True)]
        return self.out(*both) if isinstance(self.out, nn.Bilinear) else self.out(torch.cat(both, 1))


class Fused(nn.Module):
    """Takes images and a category, as two tensors, by name, or nested in one argument."""

    def __init__(self):
        super().__init__()
        self.conv, self.kind = nn.Conv2d(1, 4, 2), nn.Embedding(4, 3)
        self.numbers, self.out = nn.Linear(1, 2), nn.Linear(9, CLASSES)

    def forward(self, image, kind, rest=None):
        parts = [relu(self.conv(image)).flatten(1), self.kind(kind)]
        rest = image.new_zeros(len(kind), 1) if rest is None else rest["more"][0]
        return self.out(torch.cat([*parts, self.numbers(rest)], 1))


class OfDict(Fused):
    def forward(self, inputs):
        return super().forward(**inputs)


IMAGE, KIND, ONE = Part((1, 2, 2)), Part(categories=4), Part((1,))


class Contrastive(nn.Module):
    """CLIP's logit scale, a 0-d parameter."""

    def __init__(self):
        super().__init__()
        self.body, self.classes = nn.Linear(6, 8), nn.Linear(8, CLASSES, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.logit_scale.exp() * self.classes(nn.functional.normalize(self.body(x), dim=1, eps=1e-3))


class Half(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.body, self.head = nn.Linear(6, 8, dtype=kind), nn.Linear(8, CLASSES, dtype=kind)

    def forward(self, x):
        return self.head(relu(self.body(x.to(self.body.weight.dtype))))


def pretrained(network):
    """The same values at every build."""
    drawn = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in network.parameters():
            value.copy_(torch.randn(value.shape, generator=drawn) / max(value[0].numel(), 1) ** 0.5)
    return network


def adapted():
    layers = nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, CLASSES)
    return with_lora(pretrained(nn.Sequential(*layers)), rank=2, train=["4"])


def convolutional():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
    )


def backbone():
    """Frozen convolutions with the statistics of batch normalisation, and a head that trains."""
    return nn.Sequential(pretrained(convolutional()).requires_grad_(False).eval(), nn.Linear(32, CLASSES))


def normalised_in_groups():
    return without_batch_norm(nn.Sequential(convolutional(), nn.Linear(32, CLASSES)))


def resnet():
    from torchvision.models import resnet18

    network = resnet18(num_classes=CLASSES, norm_layer=lambda channels: nn.GroupNorm(32, channels))
    network.conv1, network.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    return network


def encoder(width):
    layer = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)


def private_lstm():
    from opacus.layers import DPLSTM

    return Recurrent(DPLSTM)


WORKS = None
#: What a refusal to export says.
EXPORTED = {"tied-attention": "cannot export model .* only 4D query", "len-of-batch": "x.shape.0. in place of len"}
#: What a site's log says of a network that Opacus does not train; others train under the guard.
GUARDED = {
    "lstm": "do not support nn.LSTM",
    "gru": "do not support nn.GRU",
    "tied-transformer": "do not support nn.MultiheadAttention",
    "vit": "do not support nn.MultiheadAttention",
    "bilinear": "TypeError: Bilinear.forward",
    "resnet18-gn": "RuntimeError: Output 0 of BackwardHookFunction is a view and is being modified inplace",
    "bfloat16": "GuardError: 'body.weight' has half precision",
}
#: The network; its data; what happens at record level: it works, or what the refusal says.
NETWORKS = {
    "lenet": (LeNet, IMAGES, WORKS),
    "resnet18-gn": (resnet, IMAGES, WORKS),
    "unet": (UNet, IMAGES, WORKS),
    "lstm": (lambda: Recurrent(nn.LSTM), TOKENS, WORKS),
    "gru": (lambda: Recurrent(nn.GRU), TOKENS, WORKS),
    "dp-lstm": (private_lstm, TOKENS, WORKS),
    "tied-transformer": (lambda: Tied(encoder(8)), TOKENS, WORKS),
    "tied-attention": (lambda: Tied(Attention(8)), TOKENS, WORKS),
    "vit": (lambda: ViT(encoder(8)), IMAGES, WORKS),
    "tables": (Tables, VECTORS, WORKS),
    "two-inputs": (lambda: TwoInputs(False), VECTORS, WORKS),
    "bilinear": (lambda: TwoInputs(True), VECTORS, WORKS),
    "several-inputs": (lambda: with_inputs(Fused(), IMAGE, KIND, {"more": [ONE]}), VECTORS, WORKS),
    "named-inputs": (lambda: with_inputs(Fused(), kind=KIND, image=IMAGE, rest={"more": (ONE,)}), VECTORS, WORKS),
    "dict-input": (
        lambda: with_inputs(OfDict(), {"image": IMAGE, "rest": {"more": [ONE]}, "kind": KIND}),
        VECTORS,
        WORKS,
    ),
    "len-of-batch": (LenOfBatch, VECTORS, WORKS),
    "logit-scale": (Contrastive, VECTORS, WORKS),
    "bfloat16": (lambda: Half(torch.bfloat16), VECTORS, "'body.weight' of Half is bfloat16"),
    "float64": (lambda: Half(torch.float64), VECTORS, WORKS),
    "lora": (adapted, VECTORS, WORKS),
    "frozen-backbone": (backbone, IMAGES, WORKS),
    "without-batch-norm": (normalised_in_groups, IMAGES, WORKS),
}


_LARGE = pytest.param("resnet18-gn", marks=pytest.mark.slow)


@pytest.fixture(params=[_LARGE if name == "resnet18-gn" else name for name in NETWORKS])
def own(request, monkeypatch):
    """Name of a network, its kind, shape, and what happens at record level."""
    make, (kind, shape), private = NETWORKS[request.param]
    return own_network(monkeypatch, lambda shape, classes: make()), kind, shape, private


@pytest.fixture
def exported(own, request):
    """What a refusal to export the network says; None: it is exported."""
    return EXPORTED.get(request.node.callspec.params["own"])


def shards(kind, shape):
    rng = np.random.default_rng(1)
    found = []
    for client in range(2):
        drawn = rng.integers(CLASSES, size=(6, *shape)), rng.standard_normal((6, *shape), np.float32)
        x, y = drawn[kind != "tokens"], rng.integers(CLASSES, size=6)
        found.append(Shard(client, 0, x, y, TestSet(x, y)))
    return found


def written(folder, name, kind, shape, model, network):
    """A folder of one model, as a run leaves it."""
    folder.mkdir()
    card = {"strategy": "fedavg", "dataset": "own", "model": name, "features": "none", "kind": kind, "shape": shape}
    card |= {"num-classes": CLASSES, "cluster": 0, "clusters": 1, "scaling": "none", "rounds": 1, "unit": "none"}
    card |= {"certificate": "0" * 64, "version": "0"}
    if held := constants(network):
        card["constants"] = fingerprint(held)
        (folder / "constants.safetensors").write_bytes(constants_content(held))
    save_file(model, folder / "cluster-0.safetensors", metadata={"about": json.dumps(card)})
    return folder


def started(name, shape):
    network = build(name, shape, CLASSES)
    arrays = initialise(name, shape, CLASSES, 3)
    layout = Layout.of(arrays)
    return network, layout, np.stack([layout.flatten(arrays)] * 2)


def test_it_trains_and_is_predicted_with(own, tmp_path):
    name, kind, shape, _ = own
    check_network(name, shape, CLASSES, kind)
    network, layout, start = started(name, shape)
    before, data = fingerprint(constants(network)), shards(kind, shape)
    rngs = [np.random.default_rng(i) for i in range(2)]
    models = start + train(network, layout, start, data, rngs, LocalTrainingConfig(1, 6, 0.1))
    assert np.isfinite(models).all()
    assert (models != start).any()
    assert fingerprint(constants(network)) == before
    # one message, the library's door, and the file of a model
    assert unpack_models(trainable_arrays(network))[1] == layout
    arrays = {key: values.copy() for key, values in layout.split(models[0]).items()}
    loaded = load(written(tmp_path / "run", name, kind, shape, arrays, network), trust_code=True)
    x = data[0].x
    with torch.no_grad():
        wanted = call(network, {key: torch.tensor(value) for key, value in arrays.items()}, torch.tensor(x)).float()
    np.testing.assert_allclose(loaded.outputs(x, 0), wanted.numpy(), rtol=1e-3, atol=1e-4)
    score = accuracies(network, layout, models[:1], x, data[0].y)[0]
    assert score == pytest.approx(float((loaded.predict(x, 0) == data[0].y).mean()))
    kinds = {key: value.dtype for key, value in network.named_parameters()}
    assert {key: value.dtype for key, value in loaded[0].named_parameters()} == kinds


def test_it_trains_at_record_level_or_is_refused(own):
    name, kind, shape, refusal = own
    network, layout, start = started(name, shape)
    settings = DPSGD(6, 6, 1, 0.1, 1.0, 0.0)
    rngs = [np.random.default_rng(i) for i in range(2)]
    if refusal is not None:
        with pytest.raises(ModelError, match=refusal) as caught:
            check_supported(network, shape, task_of(CLASSES), kind)
        assert "\n" not in str(caught.value)
        return
    before = fingerprint(constants(network))
    check_supported(network, shape, task_of(CLASSES), kind)
    data = shards(kind, shape)
    updates = train_privately(network, layout, start, data, rngs, rngs, [settings] * 2, batched=True)
    norms = np.linalg.norm(updates.astype(np.float64), axis=1)
    assert ((0 < norms) & (norms <= 0.1 * 1.0 * (1 + 1e-4))).all(), "at most lr times the clipping norm"
    assert fingerprint(constants(network)) == before
    assert updates.shape == (2, sum(value.size for value in float32_arrays(network).values()))


def guarded(folder, network, kind, shape, adapters):
    """The answer of a guarded site that trains the network by Opacus, and the arrays that it received.

    The message holds all arrays, or those that train alone, as an app with PEFT sends them.
    """
    from opacus import PrivacyEngine

    terms = {"epsilon": 50.0, "delta": 1e-3, "num_examples": 6}
    app = ClientApp(mods=[Guard(state_dir=folder, **terms)])
    trains = list(trainable(network))
    half = torch.bfloat16  # which Flower does not send
    state = {
        key: value.float() if value.dtype == half else value
        for key, value in network.state_dict().items()
        if not adapters or key in trains
    }

    @app.train()
    def _(message, context):
        network.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=False)
        set_training(network)
        optimizer = torch.optim.SGD([value for value in network.parameters() if value.requires_grad], lr=0.1)
        data = shards(kind, shape)[0]
        loader = DataLoader(TensorDataset(torch.tensor(data.x), torch.tensor(data.y)), batch_size=6)
        parts = {"module": network, "optimizer": optimizer, "data_loader": loader}
        model, optimizer, loader = PrivacyEngine(accountant="rdp").make_private(
            noise_multiplier=1.0, max_grad_norm=1.0, **parts
        )
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x).float(), y).backward()
            optimizer.step()
        found = {key: value for key, value in network.state_dict().items() if key in state}
        return Message(RecordDict({"arrays": ArrayRecord(found)}), reply_to=message)

    LocalGrid(1)  # messages have a sender
    sent = ArrayRecord({key: value.detach().clone() for key, value in state.items()})
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
    return app(Message(RecordDict({"arrays": sent}), dst_node_id=1, message_type="train"), context), sent


@pytest.mark.parametrize("adapters", [False, True], ids=["all arrays", "adapters"])
@pytest.mark.filterwarnings("ignore")  # of Opacus
def test_it_trains_under_the_guard_or_is_refused(own, adapters, tmp_path, request, caplog):
    name, kind, shape, _ = own
    refusal = GUARDED.get(request.node.callspec.params["own"])
    network = build(name, shape, CLASSES)
    before = fingerprint(constants(network))
    answer, sent = guarded(tmp_path / "site", network, kind, shape, adapters)
    if refusal is not None:
        assert answer.has_error()
        assert re.search(refusal, caplog.text)
        charged = bool(list((tmp_path / "site").rglob("*.jsonl")))
        assert charged == refusal.startswith(("TypeError", "RuntimeError")), (
            "others are refused before a batch is drawn"
        )
        return
    arrays = answer.content.array_records["arrays"]
    assert [(key, value.shape) for key, value in arrays.items()] == [(key, value.shape) for key, value in sent.items()]
    moved = [key for key in arrays if not np.array_equal(arrays[key].numpy(), sent[key].numpy())]
    assert moved
    assert set(moved) <= {key for key, value in network.named_parameters(remove_duplicate=False) if value.requires_grad}
    assert fingerprint(constants(network)) == before


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of PyTorch's exporter
def test_it_is_exported_or_refused(own, exported, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    name, kind, shape, private = own
    network, layout, start = started(name, shape)
    arrays = {key: values.copy() for key, values in layout.split(start[0]).items()}
    loaded = load(written(tmp_path / "run", name, kind, shape, arrays, network), trust_code=True)
    if exported is not None:
        with pytest.raises(InferenceError, match=exported) as caught:
            loaded.export_onnx(tmp_path / "onnx")
        assert "\n" not in str(caught.value)
        return
    (file,) = loaded.export_onnx(tmp_path / "onnx")
    if "bfloat16" in str(private):
        return  # onnxruntime has no such products on a CPU
    x = shards(kind, shape)[0].x
    (found,) = onnxruntime.InferenceSession(file).run(None, {"examples": x})
    np.testing.assert_allclose(np.asarray(found, np.float32), loaded.outputs(x, 0), rtol=2e-2, atol=1e-3)
