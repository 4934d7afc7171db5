import subprocess
import sys

import numpy as np
import pytest
import torch
from kit.own_networks import own_network
from kit.tables import for_rows

from coterie.models import (
    FEATURES,
    MODELS,
    ModelError,
    build,
    check_kind,
    deskew,
    features,
    hog,
    hog2,
    initialise,
    num_parameters,
    random_conv,
)
from coterie.models.fixed import _filters

SHAPE = (1, 28, 28)
IMAGE_MODELS = sorted(name for name, info in MODELS.items() if "images" in info.takes)


def example(name, image=SHAPE, classes=10):
    """Shape and classes that a model is for; one of images gets the given ones."""
    return {"lstm-char": ((6,), 12), "regression": ((5,), 0)}.get(name, (image, classes))


@for_rows(
    ("name", "count"),
    [
        ("linear", 784 * 10 + 10),
        ("mlp-32", 784 * 32 + 32 + 32 * 10 + 10),
        ("mlp-200", 784 * 200 + 200 + 200 * 10 + 10),
        ("cnn-tiny", (9 * 8 + 8) + (9 * 8 * 20 + 20) + (20 * 49 * 10 + 10)),
        ("cnn-cells", (9 * 16 + 16) + (16 * 784 * 10 + 10)),
        ("cnn-small", (25 * 16 + 16) + (25 * 16 * 32 + 32) + (32 * 49 * 128 + 128) + (128 * 10 + 10)),
        ("resnet18-gn", 11_181_642 - 2 * 49 * 64),  # RC-DPFL, Figure 3, has three channels
        ("lenet", 61_706),  # LeCun et al. 1998 with full connections, as commonly counted
        ("lstm-char", 12 * 8 + (8 + 64 + 1) * 256 + (64 + 1) * 12),
        ("regression", 5 + 1),
    ],
)
def test_sizes(name, count):
    assert num_parameters(build(name, *example(name))) == count
    assert name in MODELS


def test_all_models_are_listed_with_their_facts():
    assert IMAGE_MODELS == ["cnn-cells", "cnn-small", "cnn-tiny", "lenet", "linear", "mlp-200", "mlp-32", "resnet18-gn"]
    assert sorted(set(MODELS) - set(IMAGE_MODELS)) == ["lstm-char", "regression"]
    assert all(info.name == name and info.title and info.source for name, info in MODELS.items())


@for_rows("shape", [(1, 28, 28), (3, 32, 32), (1, 14, 14), (1, 13, 15)])
@for_rows("name", IMAGE_MODELS)
def test_logits(name, shape):
    assert build(name, shape, 7)(torch.rand(3, *shape)).shape == (3, 7)


@pytest.mark.parametrize(("name", "side"), [("cnn-tiny", 4), ("cnn-small", 4), ("lenet", 12)])
def test_smallest_image(name, side):
    assert build(name, (1, side, side), 2)(torch.rand(1, 1, side, side)).shape == (1, 2)
    with pytest.raises(ModelError, match=f"'{name}' requires images of at least {side}×{side}, not {side}×{side - 1}"):
        build(name, (1, side, side - 1), 2)


def test_mlp_is_the_formula():
    model = build("mlp-32", (1, 2, 3), 4)
    w1, b1, w2, b2 = (p.detach().numpy().astype(float) for p in model.parameters())
    assert w1.shape == (32, 6)
    x = np.random.default_rng(0).random((5, 1, 2, 3), dtype=np.float32)
    expected = np.maximum(x.reshape(5, 6) @ w1.T + b1, 0) @ w2.T + b2
    np.testing.assert_allclose(model(torch.from_numpy(x)).detach().numpy(), expected, rtol=1e-4, atol=1e-5)


@for_rows("name", sorted(MODELS))
def test_opacus_accepts_it(name):
    from opacus.validators import ModuleValidator

    assert ModuleValidator.validate(build(name, *example(name)), strict=False) == []


@for_rows("name", sorted(MODELS))
def test_initial_parameters_are_torchs_under_the_seed(name):
    shape, classes = example(name)
    arrays = initialise(name, shape, classes, seed=7)
    torch.manual_seed(7)
    module = build(name, shape, classes)
    assert list(arrays) == [key for key, _ in module.named_parameters()]
    for key, value in module.named_parameters():
        assert arrays[key].dtype == np.float32
        np.testing.assert_array_equal(arrays[key], value.detach().numpy())
    other = initialise(name, shape, classes, seed=8)
    drawn = [key for key in arrays if np.ptp(arrays[key]) > 0]  # a normalisation starts as ones and zeros
    assert all(not np.array_equal(arrays[key], other[key]) for key in drawn)


def test_initialise_leaves_the_global_generator_alone():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    initialise("mlp-32", SHAPE, 10, seed=7)
    torch.testing.assert_close(torch.rand(3), expected, rtol=0, atol=0)


def test_unknown_names_get_the_nearest():
    with pytest.raises(ModelError, match=r"unknown model 'mlp32'; did you mean 'mlp-32'\? Available: cnn-cells, "):
        build("mlp32", SHAPE, 10)
    with pytest.raises(
        ModelError, match=r"unknown features 'pool'; did you mean 'pool2'\? Available: deskew, hog, hog2, none, p"
    ):
        features("pool")


@for_rows(
    ("shape", "classes", "complaint"),
    [
        ((28, 28), 10, r"input_shape is \(28, 28\)"),
        ((1, 0, 8), 10, r"it must be \(C, H, W\) for images, \(L,\) for tokens or \(F,\) for vectors"),
        ((0,), 10, "with positive sizes"),
        (SHAPE, -1, "num_classes is -1; it must be at least 1, or 0 for regression"),
    ],
)
def test_impossible_shapes(shape, classes, complaint):
    with pytest.raises(ModelError, match=complaint):
        build("linear", shape, classes)


@for_rows(
    ("name", "shape", "classes", "complaint"),
    [
        ("cnn-tiny", (24,), 66, r"'cnn-tiny' expects images \(C, H, W\), not .* \(24,\); use linear, lstm-char, mlp-2"),
        ("lenet", (5,), 0, r"'lenet' expects images \(C, H, W\)"),
        ("lstm-char", SHAPE, 10, r"'lstm-char' expects tokens \(L,\), not examples of shape \(1, 28, 28\); use cnn"),
        ("regression", SHAPE, 0, r"'regression' expects vectors \(F,\)"),
        ("lstm-char", (24,), 0, "'lstm-char' outputs logits: num_classes is 0, but must be at least 1"),
        ("regression", (5,), 3, r"'regression' outputs one number: num_classes is 3, but must be 0 \(real targets\)"),
    ],
)
def test_networks_refuse_data_that_they_are_not_for(name, shape, classes, complaint):
    with pytest.raises(ModelError, match=complaint):
        build(name, shape, classes)
    with pytest.raises(ModelError, match=complaint):
        initialise(name, shape, classes, seed=0)


def test_lstm_is_torchs():
    """nn.LSTM's gates are in our order; it adds two biases where we have one."""
    model = build("lstm-char", (9,), 12)
    reference = torch.nn.LSTM(8, 64, batch_first=True)
    with torch.no_grad():
        reference.weight_ih_l0.copy_(model.input.weight)
        reference.weight_hh_l0.copy_(model.hidden.weight)
        reference.bias_ih_l0.copy_(model.input.bias)
        reference.bias_hh_l0.zero_()
        tokens = torch.randint(12, (4, 9))
        states, _ = reference(model.embedding(tokens))
        torch.testing.assert_close(model(tokens), model.output(states[:, -1]), rtol=1e-4, atol=1e-5)


def test_regression_is_an_affine_function():
    model = build("regression", (3,), 0)
    weight, bias = (p.detach() for p in model.parameters())
    x = torch.rand(7, 3)
    output = model(x)
    assert output.shape == (7,)
    torch.testing.assert_close(output, (x @ weight.T + bias)[:, 0])


def test_own_function(monkeypatch):
    name = own_network(monkeypatch, lambda shape, classes: torch.nn.Linear(shape[2], classes))
    assert num_parameters(build(name, (1, 1, 5), 3)) == 18
    assert initialise(name, (1, 1, 5), 3, seed=0)["weight"].shape == (3, 5)


@for_rows(
    ("name", "complaint"),
    [
        ("no_such_module:make", "cannot import make from no_such_module"),
        ("math:no_such_function", "cannot import no_such_function from math"),
        ("math:pi", "pi is a float, not a function"),
        ("math:sqrt", r"sqrt\(x, /\) must accept \(input_shape, num_classes\)"),
        ("math:dist", r"dist\(\(1, 28, 28\), 10\) failed: TypeError"),
        ("operator:contains", r"contains returned a bool; it must return a torch.nn.Module"),
    ],
)
def test_bad_own_functions_are_explained(name, complaint):
    with pytest.raises(ModelError, match=complaint):
        build(name, SHAPE, 10)


def test_networks_that_flatten_images_take_vectors():
    vectors, images = build("mlp-32", (12,), 3), build("mlp-32", (1, 3, 4), 3)
    vectors.load_state_dict(images.state_dict())
    x = torch.rand(5, 12)
    torch.testing.assert_close(vectors(x), images(x.reshape(5, 1, 3, 4)))


def test_tokens_and_vectors_have_shapes_alike_and_are_told_apart_by_name():
    check_kind("mlp-32", "vectors")
    check_kind("anybodys:own", "tokens")
    with pytest.raises(ModelError, match=r"'mlp-32' expects images or vectors, not tokens; use lstm-char"):
        check_kind("mlp-32", "tokens")


def test_pool2_averages_and_crops():
    x = np.arange(2 * 5 * 4, dtype=np.float32).reshape(1, 2, 5, 4)
    pooled = features("pool2")(x)
    assert pooled.dtype == np.float32
    assert pooled.tolist() == [[[[2.5, 4.5], [10.5, 12.5]], [[22.5, 24.5], [30.5, 32.5]]]]
    with pytest.raises(ModelError, match="at least 2×2, not 1×4"):
        features("pool2")(x[:, :, :1])
    with pytest.raises(ModelError, match=r"'pool2' require images, not examples of shape \(24,\)"):
        features("pool2")(np.zeros((3, 24), np.float32))


def tilted(degrees, side=28):
    """A brightness that rises in one direction, counter-clockwise from rightwards, and its reverse."""
    rows, columns = np.mgrid[:side, :side].astype(np.float32)
    angle = np.radians(degrees)
    slope = (np.cos(angle) * columns - np.sin(angle) * rows) / side
    return np.stack([slope, -slope])[:, None].astype(np.float32)


@for_rows("k", range(8))
def test_hog_tells_directions_apart(k):
    """Rows grow downwards, so that direction k is clockwise; a reversed edge is the opposite direction."""
    rising, falling = hog(tilted(-45 * k))
    inner = slice(1, 6)
    least = rising.min()
    assert rising[k, inner, inner].min() > least + 0.2
    assert np.delete(rising, k, axis=0)[:, inner, inner].max() < least + 0.03
    np.testing.assert_allclose(falling[(k + 4) % 8], rising[k], atol=1e-3)
    between = hog(tilted(-45 * k - 22.5))[0]
    np.testing.assert_allclose(between[k, 3, 3], between[(k + 1) % 8, 3, 3], atol=0.01)


@for_rows("shape", [(1, 28, 28), (3, 32, 32), (1, 8, 8)])
@for_rows(("apply", "atol"), [(hog, 0), (hog2, 0), (random_conv, 1e-5)])
def test_chunks_of_images_make_no_difference(apply, atol, shape):
    images = np.random.default_rng(0).uniform(-1, 1, (300, *shape)).astype(np.float32)
    together = apply(images)
    assert (len(together), together.dtype) == (300, np.float32)
    np.testing.assert_allclose(together[250:260], apply(images[250:260]), atol=atol)


def test_hog_looks_at_each_cell():
    images = np.random.default_rng(0).uniform(-1, 1, (9, 1, 28, 28)).astype(np.float32)
    together = hog(images)
    images[5, :, :4, :4] += 1
    changed = (hog(images) != together).any(axis=1)
    assert changed[5, 0, 0]
    assert not changed[5, 4:].any()
    assert not changed[5, :, 4:].any()
    assert changed.any(axis=(1, 2)).sum() == 1


def test_hog_does_not_care_about_brightness_and_little_about_contrast():
    images = np.random.default_rng(0).uniform(-0.5, 0.5, (3, 1, 28, 28)).astype(np.float32)
    np.testing.assert_allclose(hog(images + 0.4), hog(images), atol=0.004)
    flat = hog(np.zeros((1, 1, 28, 28), np.float32)).min()
    louder = (hog(2 * images) - flat).mean() / (hog(images) - flat).mean()
    assert 1 < louder < 1.2  # without normalisation, the square root of 2
    assert np.ptp(hog(np.full((1, 1, 28, 28), 0.3, np.float32))) == 0


def test_hog_of_a_colour_image_takes_the_strongest_channel():
    grey = np.random.default_rng(0).uniform(-1, 1, (2, 1, 32, 32)).astype(np.float32)
    colours = np.concatenate([0.1 * grey[:, :, ::-1], grey, np.zeros_like(grey)], axis=1)
    assert hog(colours).shape == (2, 8, 7, 7)
    weak = np.concatenate([np.zeros_like(grey), grey, np.full_like(grey, 0.5)], axis=1)
    np.testing.assert_array_equal(hog(weak), hog(grey))
    assert np.abs(hog(colours) - hog(grey)).mean() < 0.02


@for_rows("shape", [(1, 7, 7), (1, 8, 8), (3, 32, 32), (1, 13, 30)])
def test_hog_of_other_sizes(shape):
    values = hog(np.random.default_rng(0).uniform(-1, 1, (2, *shape)).astype(np.float32))
    assert values.shape == (2, 8, 7, 7)
    assert np.isfinite(values).all()


def test_hog_needs_a_pixel_a_cell():
    with pytest.raises(ModelError, match="'hog' require images of at least 7×7, not 6×8"):
        hog(np.zeros((1, 1, 6, 8), np.float32))
    with pytest.raises(ModelError, match="'hog' require images"):
        hog(np.zeros((1, 1), np.int64))


def test_hog2_adds_the_second_order_and_pixels_to_hog():
    images = np.random.default_rng(0).uniform(-1, 1, (9, 1, 28, 28)).astype(np.float32)
    together = hog2(images)
    assert together.shape == (9, 25, 7, 7)
    np.testing.assert_allclose(together[:, :8], 0.75 * hog(images), atol=1e-6)
    bright = hog2(np.full((1, 3, 14, 14), 0.28, np.float32))[0]  # a brightness of 0.64, whose root is 0.8
    np.testing.assert_allclose(bright[24], 0.75 * (0.8 - 0.4), atol=1e-6)
    np.testing.assert_allclose(bright[8:24], 0.75 * 0.6 * (0 - 0.2), atol=1e-6)  # no gradients of any order
    with pytest.raises(ModelError, match="'hog2' require images of at least 7×7"):
        hog2(np.zeros((1, 1, 6, 8), np.float32))


def test_hog2_tells_the_direction_in_which_gradients_change():
    """Vertical lines have horizontal gradients. Their strength changes along the lines, or across."""
    lines = np.tile(np.array([-1, -1, 1, 1], np.float32), (28, 7))
    fading = np.linspace(0, 1, 28, dtype=np.float32)
    along, across = (
        hog2((lines * fade)[None, None])[0, 8:24].reshape(4, 4, 7, 7) for fade in (fading[:, None], fading)
    )
    first = along[:, :, 1:-1, 1:-1].mean(axis=(1, 2, 3))
    assert first.argmax() == 0  # of horizontal gradients
    horizontal, vertical = 0, 2
    assert along[0, vertical, 1:-1, 1:-1].mean() > along[0, horizontal, 1:-1, 1:-1].mean()
    assert across[0, horizontal, 1:-1, 1:-1].mean() > across[0, vertical, 1:-1, 1:-1].mean()


def test_hog_of_real_images_is_centred_and_good_for_a_linear_model(data_dir):
    """Two thousand training images suffice for 84 % of two thousand others; pixels reach about 80 % there."""
    from sklearn.linear_model import LogisticRegression

    from coterie.datasets import load

    source = load("fashion-mnist", data_dir)
    part = hog(2 * source.train_x[:4000].astype(np.float32) / 255 - 1)
    assert abs(part.mean()) < 0.04
    x, y = part.reshape(4000, -1), source.train_y[:4000]
    assert 3 < np.linalg.norm(x, axis=1).mean() < 5
    fitted = LogisticRegression(C=0.25, max_iter=200, tol=1e-3).fit(x[:2000], y[:2000])
    assert fitted.score(x[2000:], y[2000:]) > 0.84


def test_features_are_stable_objects():
    x = np.ones((1, 1, 2, 2), np.float32)
    assert all(features(name) is features(name) for name in FEATURES)
    np.testing.assert_array_equal(features("none")(x), x)


def test_listing_needs_no_torch():
    code = "import sys, coterie.models; print(*(m for m in sys.modules if m == 'torch' or m.startswith('coterie.')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    rooms = {f"coterie.{room}" for room in ("fields", "files", "models", "tasks")}
    assert {".".join(name.split(".")[:2]) for name in done.stdout.split()} <= rooms


def bars(slants, places, size=28):
    """(n, 1, size, size) in [-1, 1] of a soft bar of 16 rows: how far each leans a row, and its middle (y, x)."""
    y, x = np.mgrid[:size, :size]
    leaning = [(slant, *place) for slant, place in zip(slants, places, strict=True)]
    drawn = [np.exp(-((x - b - slant * (y - a)) ** 2) / 4) * (abs(y - a) <= 8) for slant, a, b in leaning]
    return (2 * np.array(drawn, np.float32) - 1)[:, None]


def moments(image):
    """Middle (y, x) and covariance over variance of rows, in pixels, of a (1, n, n) image in [-1, 1]."""
    weight = (image[0] + 1) / (image[0] + 1).sum()
    y, x = np.mgrid[: image.shape[1], : image.shape[2]]
    down, across = (weight * y).sum(), (weight * x).sum()
    return down, across, (weight * (y - down) * (x - across)).sum() / (weight * (y - down) ** 2).sum()


def test_deskew_sets_upright_and_in_the_middle():
    upright = bars([0.0], [(13.5, 13.5)])
    leaning = bars([0.5, -0.5, 0.3, 0.0], [(13.5, 13.5), (12.0, 16.0), (15.0, 11.0), (11.0, 11.0)])
    assert moments(leaning[1]) == pytest.approx((12, 16, -0.5), abs=0.01)
    done = deskew(leaning)
    assert (done.shape, done.dtype) == (leaning.shape, np.float32)
    for image in done:
        assert moments(image) == pytest.approx((13.5, 13.5, 0), abs=0.05)
    assert abs(leaning - upright).mean() > 0.1
    assert abs(done - upright).mean() < 0.02
    np.testing.assert_allclose(deskew(upright), upright, atol=1e-4)


def test_deskew_looks_at_each_image_alone_and_keeps_its_range():
    images = np.random.default_rng(0).uniform(-1, 1, (300, 3, 9, 12)).astype(np.float32)
    together = deskew(images)
    np.testing.assert_allclose(together[250:260], deskew(images[250:260]), atol=1e-6)
    assert (together.max(axis=(1, 2, 3)) <= images.max(axis=(1, 2, 3)) + 1e-6).all()
    assert (together.min(axis=(1, 2, 3)) >= images.min(axis=(1, 2, 3)) - 1e-6).all()


def test_deskew_moves_channels_together_and_by_45_degrees_at_most():
    leaning = bars([0.5, -0.5], [(13.5, 13.5), (13.5, 13.5)])
    dark = np.full_like(leaning, -1)
    both = deskew(np.concatenate([leaning, dark], axis=1))
    np.testing.assert_allclose(both[:, :1], deskew(leaning), atol=1e-5)
    np.testing.assert_allclose(both[:, 1:], dark, atol=1e-5)
    assert moments(deskew(bars([1.2], [(13.5, 13.5)]))[0])[2] == pytest.approx(0.2, abs=0.03)
    flat = np.full((1, 1, 6, 8), 0.3, np.float32)
    np.testing.assert_allclose(deskew(flat), flat, atol=1e-6)
    assert deskew(flat[:0]).shape == (0, 1, 6, 8)
    with pytest.raises(ModelError, match=r"'deskew' require images, not examples of shape \(16,\)"):
        deskew(np.zeros((3, 16), np.float32))


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 8, 8)])
def test_random_conv_is_of_one_length(shape):
    images = np.random.default_rng(0).uniform(-1, 1, (30, *shape)).astype(np.float32)
    together = random_conv(images)
    assert together.shape == (30, 17, 7, 7)
    parts = [together[:, :16], together[:, 16:]]
    lengths = [np.linalg.norm(part.reshape(30, -1), axis=1) for part in parts]
    np.testing.assert_allclose(lengths[0], 4 / np.sqrt(1.49), rtol=0.01)
    np.testing.assert_allclose(lengths[1], 0.7 * lengths[0], rtol=0.02)
    np.testing.assert_allclose([part.mean(axis=(1, 2, 3)) for part in parts], 0, atol=1e-5)
    assert np.abs(random_conv(np.full((1, *shape), 0.3, np.float32))[0, 16]).max() < 1e-3
    with pytest.raises(ModelError, match="'random-conv' require images of at least 7×7"):
        random_conv(images[:, :, :6])


def test_random_conv_s_filters_by_hand():
    """One bright pixel: a cell's response is the rectified filter, mirrored about the pixel."""
    filters = _filters(1)
    np.testing.assert_allclose(filters.sum(axis=(1, 2, 3)), 0, atol=1e-6)
    np.testing.assert_allclose((filters**2).sum(axis=(1, 2, 3)), 1, rtol=1e-5)
    image = np.full((1, 1, 7, 7), -1, np.float32)
    image[0, 0, 3, 3] = 1
    expected = np.zeros((16, 7, 7))
    expected[:, 1:6, 1:6] = np.maximum(filters[:, 0, ::-1, ::-1], 0)
    expected -= expected.mean()
    expected *= 4 / np.sqrt(1.49) / (np.linalg.norm(expected) + 1e-3)
    np.testing.assert_allclose(random_conv(image)[0, :16], expected, atol=1e-5)


@pytest.mark.parametrize("name", ["linear", "mlp-32", "mlp-200"])
def test_plain_networks_predict_real_targets_too(name):
    network = build(name, (6,), 0)
    assert network(torch.zeros(3, 6)).shape == (3,)
    images = build(name, SHAPE, 0)
    assert images(torch.zeros(2, *SHAPE)).shape == (2,)


@for_rows("private", [False, True])
@for_rows("name", ["linear", "mlp-32"])
def test_real_targets_train_alike_together_and_alone(name, private):
    from coterie.client.backend import train
    from coterie.client.dpsgd import DPSGD, train_privately
    from coterie.client.sgd import LocalTrainingConfig
    from coterie.datasets import Shard, TestSet
    from coterie.wire.messages import Layout

    rng, network = np.random.default_rng(0), build(name, (5,), 0)
    layout = Layout.of(dict(network.named_parameters()))
    shards = []
    for client in range(3):
        x, y = rng.normal(size=(8, 5)).astype(np.float32), rng.normal(size=8).astype(np.float32)
        shards.append(Shard(client, 0, x, y, TestSet(x, y)))
    start = np.tile(layout.flatten({key: value.detach().numpy() for key, value in network.named_parameters()}), (3, 1))

    def moved(clients):
        some = [shards[client] for client in clients]
        rngs = [np.random.default_rng(client) for client in clients]
        if not private:
            return train(network, layout, start[: len(some)], some, rngs, LocalTrainingConfig(2, 4, 0.1))
        settings = [DPSGD(8, 8, 1, 0.1, 0.5, 0.0)] * len(some)
        return train_privately(network, layout, start[: len(some)], some, rngs, rngs, settings, batched=len(some) > 1)

    alone = np.concatenate([moved([client]) for client in range(3)])
    assert np.linalg.norm(alone, axis=1).min() > 1e-3
    np.testing.assert_allclose(moved(range(3)), alone, atol=1e-6)
