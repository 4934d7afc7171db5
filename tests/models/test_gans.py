"""The GANs of PPFC-GAN against its Tables A.5 to A.7, and its autoencoder against Table A.8."""

import numpy as np
import pytest
import torch
from kit.tables import for_rows
from torch import nn

from coterie.models import GANS, ModelError, autoencoder, build_gan, check_gan, gan_for, num_parameters
from coterie.models.autoencoder import ENCODERS, WIDTHS, Autoencoder, Labeller, folded

GREY, COLOUR, PEN = (1, 28, 28), (3, 32, 32), (16,)
SHAPES = {"gan-mnist": GREY, "gan-fashion": GREY, "gan-cifar": COLOUR, "gan-pendigits": PEN}
K = 10


def shape_of(name):
    return SHAPES[name.removesuffix("-gn")]


def made(name, shape=None, n=3, k=K):
    """A GAN, and what its generator makes of random latent vectors."""
    torch.manual_seed(0)
    gan = build_gan(name, shape or shape_of(name), k)
    return gan, gan["generator"](torch.randn(n, GANS[name].normals + k)).detach()


def test_each_gan_is_listed_with_its_variant():
    assert sorted(GANS) == sorted([*SHAPES, *(f"{name}-gn" for name in SHAPES)])
    for name, info in GANS.items():
        assert (info.name, info.records_apart) == (name, name.endswith("-gn"))
        assert (info.lr, info.betas) == ((6e-4, 2e-4), (0.5, 0.999))  # the optimisers of all three tables
        assert ("GroupNorm" in info.title) is info.records_apart
    assert {info.normals + K for info in GANS.values() if info.shape} == {72}
    assert GANS["gan-pendigits"].normals + K == 15


# Weights and biases of the linear layers and convolutions, and two numbers for every feature that is normalised.
GREY_GENERATOR = [72 * 1024 + 3 * 1024, 1024 * 6272 + 3 * 6272, 128 * 64 * 16 + 3 * 64, 64 * 16 + 1]
COUNTS = {
    "gan-mnist": (
        GREY_GENERATOR,
        [16 * 64 + 3 * 64, 64 * 128 * 16 + 3 * 128, 128 * 256 * 16 + 3 * 256, 2304 * 1024 + 3 * 1024, 1024 + 1],
    ),
    "gan-fashion": (GREY_GENERATOR, [16 * 64 + 3 * 64, 64 * 128 * 16 + 3 * 128, 6272 * 1024 + 3 * 1024, 1024 + 1]),
    "gan-cifar": (
        [72 * 128 * 16 + 3 * 128, 128 * 64 * 16 + 3 * 64, 64 * 32 * 16 + 3 * 32, 32 * 3 * 16 + 3],
        [3 * 32 * 16 + 32, 32 * 64 * 16 + 3 * 64, 64 * 128 * 16 + 3 * 128, 128 * 16 + 1],
    ),
    "gan-pendigits": (
        [15 * 256 + 3 * 256, 256 * 256 + 3 * 256, 256 * 16 + 16],
        [16 * 256 + 3 * 256, 256 * 256 + 3 * 256, 256 + 1],
    ),
}


@for_rows("name", GANS)
def test_sizes_are_those_of_the_tables(name):
    gan = build_gan(name, shape_of(name), K)
    generator, discriminator = COUNTS[name.removesuffix("-gn")]
    assert num_parameters(gan["generator"]) == sum(generator)
    assert num_parameters(gan["discriminator"]) == sum(discriminator)
    normalised = {type(layer) for layer in gan.modules() if "Norm" in type(layer).__name__}
    assert normalised == {nn.GroupNorm} if name.endswith("-gn") else normalised <= {nn.BatchNorm1d, nn.BatchNorm2d}
    assert list(gan.buffers()) == []  # all that travels is parameters
    assert {layer.negative_slope for layer in gan.modules() if isinstance(layer, nn.LeakyReLU)} == {0.2}


@for_rows(
    ("name", "generator", "discriminator"),
    [
        ("gan-mnist", 3 * ["ReLU"] + ["Sigmoid"], 4 * ["LeakyReLU"]),
        ("gan-fashion", 3 * ["ReLU"] + ["Sigmoid"], 3 * ["LeakyReLU"]),
        ("gan-cifar", 3 * ["ReLU"] + ["Tanh"], 3 * ["LeakyReLU"]),
        ("gan-pendigits", 2 * ["LeakyReLU"] + ["Sigmoid"], 2 * ["LeakyReLU"]),
    ],
)
@for_rows("variant", ["", "-gn"])
def test_nonlinearities_are_those_of_the_tables(name, generator, discriminator, variant):
    gan = build_gan(name + variant, shape_of(name), K)
    for part, expected in (("generator", generator), ("discriminator", discriminator)):
        found = [type(layer).__name__ for layer in gan[part]]
        assert [kind for kind in found if kind in ("ReLU", "LeakyReLU", "Sigmoid", "Tanh")] == expected


@for_rows("name", GANS)
def test_what_they_make_and_how_they_judge_it(name):
    gan, x = made(name)
    assert x.shape == (3, *shape_of(name))
    assert GANS[name].low <= float(x.min()) < float(x.max()) <= 1
    assert gan["discriminator"](x).shape == (3, 1)


@pytest.mark.parametrize("shape", [(4,), (1, 8, 8), (2, 3, 5)])
def test_that_of_vectors_takes_any_shape(shape):
    gan, x = made("gan-pendigits", shape, k=3)
    assert x.shape == (3, *shape)
    assert gan["discriminator"](x).shape == (3, 1)


@for_rows("name", GANS)
def test_a_record_changes_the_logit_of_another_only_by_batch_normalisation(name):
    gan, x = made(name, n=4)
    with torch.no_grad():
        before = gan["discriminator"](x)
        other = x.clone()
        other[0] = other[0].flip(-1) * 0.1
        moved = (gan["discriminator"](other) - before)[:, 0].abs() > 1e-5
    assert moved.tolist() == ([True, False, False, False] if name.endswith("-gn") else [True] * 4)


@for_rows("name", GANS)
def test_opacus_accepts_the_variants_alone(name):
    from opacus.validators import ModuleValidator

    discriminator = build_gan(name, shape_of(name), K)["discriminator"]
    assert (ModuleValidator.validate(discriminator, strict=False) == []) is name.endswith("-gn")


@for_rows(
    ("shape", "private", "name"),
    [
        (GREY, False, "gan-mnist"),
        (GREY, True, "gan-mnist-gn"),
        (COLOUR, False, "gan-cifar"),
        (COLOUR, True, "gan-cifar-gn"),
        (PEN, False, "gan-pendigits-gn"),
        ((1, 8, 8), True, "gan-pendigits-gn"),
    ],
)
def test_which_one_suits(shape, private, name):
    assert gan_for(shape, private=private) == name
    check_gan(name, shape)


def test_wrong_shapes_and_names_are_refused():
    words = r"'gan-mnist-gn' generates .* \(1, 28, 28\), not \(16,\); use 'gan-pendigits-gn'"
    with pytest.raises(ModelError, match=words):
        build_gan("gan-mnist-gn", PEN, K)
    with pytest.raises(ModelError, match=r"'gan-cifar' generates .* use 'gan-mnist'"):
        check_gan("gan-cifar", GREY)
    with pytest.raises(ModelError, match=r"gan-mnits.*gan-mnist"):
        check_gan("gan-mnits", GREY)


# ---- autoencoder -----------------------------------------------------------------------------------------------------


def widths(layers):
    return [(layer.in_features, layer.out_features) for layer in layers if isinstance(layer, nn.Linear)]


def kinds(layers):
    return [type(layer).__name__ for layer in layers]


@pytest.mark.parametrize("linear", [False, True])
def test_the_autoencoder_is_table_a8(linear):
    network = Autoencoder(16, linear_code=linear)
    assert widths(network.encoder) == [(16, 500), (500, 500), (500, 2000), (2000, 10)]
    assert widths(network.decoder) == [(10, 2000), (2000, 500), (500, 500), (500, 16)]
    normalised = ["Linear", "BatchNorm1d", "ReLU"]
    every = ["Linear", "ReLU", *3 * normalised]
    assert kinds(network.encoder) == (every[:-2] if linear else every)
    assert kinds(network.decoder) == [*3 * normalised, "Linear"]
    x = torch.rand(5, 16)
    codes, again = network(x)
    assert (codes.shape, again.shape) == ((5, 10), (5, 16))
    assert torch.equal(again, network.decoder(codes))


@pytest.mark.parametrize("linear", [False, True])
def test_batch_normalisation_folds_into_the_linear_layers(monkeypatch, linear):
    monkeypatch.setattr(autoencoder, "WIDTHS", (8, 7, 5))
    torch.manual_seed(0)
    encoder = Autoencoder(6, linear_code=linear).encoder
    for layer in encoder:
        if isinstance(layer, nn.BatchNorm1d):
            nn.init.normal_(layer.weight)
            nn.init.normal_(layer.bias)
    for _ in range(20):
        encoder(torch.randn(50, 6) * 3 + 1)  # statistics far from 0 and 1
    x = torch.randn(9, 6)
    expected = encoder.eval()(x)
    *first, last = folded(encoder)
    assert len(first) == 2
    found = x
    for layer in first:
        found = torch.relu(layer(found))
    found = last(found) if linear else torch.relu(last(found))
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("encoder", "linear"), ENCODERS.items())
def test_a_labeller_scores_by_squared_distance_of_codes(monkeypatch, encoder, linear):
    assert WIDTHS == (500, 500, 2000, 10)
    monkeypatch.setattr(autoencoder, "WIDTHS", (5, 2))
    torch.manual_seed(0)
    labeller = Labeller((2, 3), 4, encoder)
    nn.init.normal_(labeller.centroids)
    assert widths(labeller.encoder) == [(6, 5), (5, 2)]
    x = torch.randn(7, 2, 3)
    first, second = (layer for layer in labeller.encoder if isinstance(layer, nn.Linear))
    codes = second(torch.relu(first(x.flatten(1))))
    assert codes.min() < 0
    codes = codes if linear else torch.relu(codes)
    expected = -((codes[:, None] - labeller.centroids) ** 2).sum(dim=2)
    torch.testing.assert_close(labeller(x), expected, atol=1e-4, rtol=1e-4)


def test_without_an_encoder_records_are_their_own_codes():
    labeller = Labeller((2,), 2, "none")
    labeller.centroids.data = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
    assert labeller(torch.tensor([[0.0, 0.0], [3.0, 0.0]])).tolist() == pytest.approx(
        np.array([[0, -25], [-9, -16]]), abs=1e-5
    )
    assert [name for name, _ in labeller.named_parameters()] == ["centroids"]
