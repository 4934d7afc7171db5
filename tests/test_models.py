import subprocess
import sys
import types

import numpy as np
import pytest
import torch
from torch.func import functional_call, grad, vmap

from coterie.models import FEATURES, MODELS, ModelError, build, features, initialise, num_parameters

SHAPE = (1, 28, 28)


def own_model(monkeypatch, function):
    module = types.ModuleType("own_models")
    module.make = function
    monkeypatch.setitem(sys.modules, "own_models", module)
    return "own_models:make"


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("linear", 784 * 10 + 10),
        ("mlp-32", 784 * 32 + 32 + 32 * 10 + 10),
        ("mlp-200", 784 * 200 + 200 + 200 * 10 + 10),
        ("cnn-tiny", (9 * 8 + 8) + (9 * 8 * 20 + 20) + (20 * 49 * 10 + 10)),
        ("cnn-small", (25 * 16 + 16) + (25 * 16 * 32 + 32) + (32 * 49 * 128 + 128) + (128 * 10 + 10)),
        ("lenet", 61_706),  # LeCun et al. 1998 with full connections, as commonly counted
    ],
)
def test_sizes(name, count):
    assert num_parameters(build(name, SHAPE, 10)) == count
    assert name in MODELS


def test_cnn_tiny_has_about_11k_parameters():
    assert 10_500 < num_parameters(build("cnn-tiny", SHAPE, 10)) < 11_500


def test_all_models_are_listed_with_their_facts():
    assert sorted(MODELS) == ["cnn-small", "cnn-tiny", "lenet", "linear", "mlp-200", "mlp-32"]
    assert {name for name, info in MODELS.items() if info.batched} == {"linear", "mlp-32", "mlp-200"}
    assert all(info.name == name and info.title and info.source for name, info in MODELS.items())


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 14, 14), (1, 13, 15), (1, 8, 8)])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_logits(name, shape):
    if name == "lenet" and min(shape[1:]) < 12:
        with pytest.raises(ModelError, match=r"'lenet' needs images of at least 12×12, not 8×8"):
            build(name, shape, 7)
        return
    assert build(name, shape, 7)(torch.rand(3, *shape)).shape == (3, 7)


@pytest.mark.parametrize(("name", "side"), [("cnn-tiny", 4), ("cnn-small", 4), ("lenet", 12)])
def test_smallest_image(name, side):
    assert build(name, (1, side, side), 2)(torch.rand(1, 1, side, side)).shape == (1, 2)
    with pytest.raises(ModelError, match=f"'{name}' needs images of at least {side}×{side}, not {side}×{side - 1}"):
        build(name, (1, side, side - 1), 2)


def test_mlp_is_the_formula():
    model = build("mlp-32", (1, 2, 3), 4)
    w1, b1, w2, b2 = (p.detach().numpy().astype(float) for p in model.parameters())
    assert w1.shape == (32, 6)
    x = np.random.default_rng(0).random((5, 1, 2, 3), dtype=np.float32)
    expected = np.maximum(x.reshape(5, 6) @ w1.T + b1, 0) @ w2.T + b2
    np.testing.assert_allclose(model(torch.from_numpy(x)).detach().numpy(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_opacus_accepts_it(name):
    from opacus.validators import ModuleValidator

    assert ModuleValidator.validate(build(name, SHAPE, 10), strict=False) == []


@pytest.mark.parametrize("name", sorted(MODELS))
def test_per_example_gradients_by_vmap_are_those_of_a_loop(name):
    shape = (1, 12, 12)
    torch.manual_seed(0)
    model = build(name, shape, 4)
    parameters = {key: value.detach() for key, value in model.named_parameters()}
    assert list(model.buffers()) == []
    x, y = torch.rand(3, *shape), torch.tensor([0, 3, 1])

    def loss(parameters, image, label):
        logits = functional_call(model, parameters, (image[None],))
        return torch.nn.functional.cross_entropy(logits, label[None])

    together = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, x, y)
    for i in range(3):
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1]).backward()
        for key, value in model.named_parameters():
            torch.testing.assert_close(together[key][i], value.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_initial_parameters_are_torchs_under_the_seed(name):
    arrays = initialise(name, SHAPE, 10, seed=7)
    torch.manual_seed(7)
    module = build(name, SHAPE, 10)
    assert list(arrays) == [key for key, _ in module.named_parameters()]
    for key, value in module.named_parameters():
        assert arrays[key].dtype == np.float32
        np.testing.assert_array_equal(arrays[key], value.detach().numpy())
    other = initialise(name, SHAPE, 10, seed=8)
    assert all(not np.array_equal(arrays[key], other[key]) for key in arrays)


def test_initialise_leaves_the_global_generator_alone():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    initialise("mlp-32", SHAPE, 10, seed=7)
    torch.testing.assert_close(torch.rand(3), expected, rtol=0, atol=0)


def test_unknown_names_get_the_nearest():
    with pytest.raises(ModelError, match=r"unknown model 'mlp32'; the nearest is 'mlp-32'; there are cnn-small, "):
        build("mlp32", SHAPE, 10)
    with pytest.raises(ModelError, match="unknown features 'pool'; the nearest is 'pool2'; there are none, pool2"):
        features("pool")


@pytest.mark.parametrize(
    ("shape", "classes", "complaint"),
    [
        ((28, 28), 10, r"input_shape is \(28, 28\)"),
        ((1, 0, 8), 10, "three positive sizes"),
        (SHAPE, 0, "num_classes is 0"),
    ],
)
def test_impossible_shapes(shape, classes, complaint):
    with pytest.raises(ModelError, match=complaint):
        build("linear", shape, classes)


def test_own_function(monkeypatch):
    name = own_model(monkeypatch, lambda shape, classes: torch.nn.Linear(shape[2], classes))
    assert num_parameters(build(name, (1, 1, 5), 3)) == 18
    assert initialise(name, (1, 1, 5), 3, seed=0)["weight"].shape == (3, 5)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("no_such_module:make", "cannot import make from no_such_module"),
        ("math:no_such_function", "cannot import no_such_function from math"),
        ("math:pi", "pi is a float, not a function"),
        ("math:sqrt", r"sqrt\(\(1, 28, 28\), 10\) failed: TypeError"),
        ("operator:contains", r"contains returned a bool; it must return a torch.nn.Module"),
    ],
)
def test_bad_own_functions_are_explained(name, complaint):
    with pytest.raises(ModelError, match=complaint):
        build(name, SHAPE, 10)


def test_pool2_averages_and_crops():
    x = np.arange(2 * 5 * 4, dtype=np.float32).reshape(1, 2, 5, 4)
    pooled = features("pool2")(x)
    assert pooled.dtype == np.float32
    assert pooled.tolist() == [[[[2.5, 4.5], [10.5, 12.5]], [[22.5, 24.5], [30.5, 32.5]]]]
    with pytest.raises(ModelError, match="at least 2×2, not 1×4"):
        features("pool2")(x[:, :, :1])


def test_features_are_stable_objects():
    x = np.ones((1, 1, 2, 2), np.float32)
    assert all(features(name) is features(name) for name in FEATURES)
    np.testing.assert_array_equal(features("none")(x), x)


def test_listing_needs_no_torch():
    code = (
        "import sys, coterie.models; print(sorted(m for m in sys.modules if m == 'torch' or m.startswith('coterie.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['coterie.models']"
