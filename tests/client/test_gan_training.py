"""GANs at the clients: all at once as one by one, what leaves them, and what record level stands on."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from kit.tables import for_rows
from torch import nn
from torch.nn.functional import softplus

from coterie.client import gan_training as gans
from coterie.client.dpsgd import DPSGD
from coterie.client.gan_training import GANTraining, train_gan_privately, train_gans
from coterie.logs import set_progress_sink
from coterie.models import GANS, build_gan
from coterie.wire.messages import Layout

K = 3


def setting(name="gan-pendigits", shape=(4,), **changes):
    """A GAN, its layout and start, and how it is trained."""
    torch.manual_seed(0)
    network = build_gan(name, shape, K)
    start = dict(network.named_parameters())
    layout = Layout.of(start)
    flat = layout.flatten({key: value.detach() for key, value in start.items()})
    options = {"info": GANS[name], "categories": K, "epochs": 2, "batch_size": 5, **changes}
    return network, layout, flat, GANTraining(**options)


def records(*sizes, shape=(4,)):
    rng = np.random.default_rng(1)
    return [rng.uniform(-1, 1, (size, *shape)).astype(np.float32) for size in sizes]


def rngs(count, seed=0):
    return [np.random.default_rng([seed, i]) for i in range(count)]


def train(batched, given, *sizes, shape=(4,), seed=0):
    return made_of(given, records(*sizes, shape=shape), rngs(len(sizes), seed), batched)


def made_of(given, own, rngs, batched=False):
    network, layout, start, how = given
    return train_gans(network, layout, start, own, rngs, how, clients=range(3, 3 + len(own)), batched=batched)


# ---- how -------------------------------------------------------------------------------------------------------------


def how(**changes):
    return setting(**changes)[3]


def test_latent_vectors_are_normals_and_a_category():
    z = how().latent(np.random.default_rng(0), 3000).numpy()
    assert z.shape == (3000, 5 + K)
    normals, categories = z[:, :5], z[:, 5:]
    assert set(np.unique(categories)) == {0, 1}
    assert (categories.sum(axis=1) == 1).all()
    # Six standard deviations of each estimate: flakes once in 10^8, were the seed not fixed.
    np.testing.assert_allclose(categories.mean(axis=0), 1 / K, atol=6 * math.sqrt(2 / 9 / 3000))
    np.testing.assert_allclose(normals.mean(axis=0), 0, atol=6 / math.sqrt(3000))
    np.testing.assert_allclose(normals.var(axis=0), 1, atol=6 * math.sqrt(2 / 3000))


@for_rows(("many", "size", "steps"), [(10, 5, 4), (14, 5, 4), (4, 4, 2), (5, 5, 2), (2, 2, 2)])
def test_an_epoch_takes_each_record_once_in_whole_batches(many, size, steps):
    batches = list(how().batches(np.random.default_rng(0), many))
    assert (how().batch(many), how().steps(many), len(batches)) == (size, steps, steps)
    assert {len(batch) for batch in batches} == {size}
    for epoch in (batches[: steps // 2], batches[steps // 2 :]):
        seen = np.concatenate(epoch).tolist()
        assert len(set(seen)) == len(seen)
        assert set(seen) <= set(range(many))
    if steps == 4:
        assert not np.array_equal(batches[0], batches[2])


@pytest.mark.parametrize(("x", "reason"), [([[0.0]], "at least 2 records"), (np.zeros((0, 1)), "at least 2 records")])
def test_records_that_no_gan_can_have_are_refused(x, reason):
    assert reason in str(how().check(np.array(x, np.float32)))
    assert how().check(np.array([[-1.0], [1.0]], np.float32)) is None


def test_a_gan_that_normalises_over_batches_needs_two_records_in_each():
    x = np.zeros((5, 1), np.float32)
    refused, fine = (how(batch_size=1, info=GANS[name]).check(x) for name in ("gan-pendigits", "gan-pendigits-gn"))
    assert "set batch-size to at least 2" in str(refused)
    assert fine is None


@for_rows("bound", [1.0, 3.5])
@for_rows(("name", "low"), [("gan-pendigits", 0), ("gan-cifar", -1)])
def test_records_go_into_the_range_of_the_generator_and_back(name, low, bound):
    own = GANTraining(GANS[name], K, 1, 5, feature_range=bound)
    x = bound * np.array([-1, -0.5, 0, 1], np.float32)
    inside = own.to_generator_range(x)
    assert inside.tolist() == [low, low + 0.25 * (1 - low), low + 0.5 * (1 - low), 1]
    np.testing.assert_allclose(own.from_generator_range(inside), x, atol=1e-7)
    assert own.from_generator_range(torch.tensor([-1.5, 1.5])).tolist() == [-bound, bound]
    assert own.from_generator_range(inside).dtype == np.float32


@pytest.fixture
def said():
    """What is told of the progress."""
    told = []
    set_progress_sink(told.append)
    yield told
    set_progress_sink(None)


def test_it_says_which_epoch_it_is(said):
    train(False, setting(), 12, 3)
    train(True, setting(), 12, 10, 3)
    one = [f"GAN of client {i}: epoch {epoch} of 2" for i in (3, 4) for epoch in (1, 2)]
    all_at_once = [f"GANs of {many} of 3 clients: epoch {epoch} of 2" for many in (2, 1) for epoch in (1, 2)]
    assert said == one + all_at_once


# ---- without privacy -------------------------------------------------------------------------------------------------


class Double(GANTraining):
    """In float64: batch normalisation of few records makes rounding errors of float32 large."""

    def latent(self, rng, count):
        return super().latent(rng, count).double()

    def to_generator_range(self, x):
        return super().to_generator_range(x).double()


@for_rows(
    ("name", "shape", "sizes", "average"),
    [
        ("gan-pendigits", (4,), (12, 10, 3, 16, 14), 0.0),  # 2, 2, 1, 3 and 2 steps an epoch; 3 are less than a batch
        ("gan-pendigits-gn", (4,), (12, 3, 11), 0.0),
        ("gan-pendigits-gn", (4,), (12, 3, 11), 0.9),
        ("gan-mnist", (1, 28, 28), (3, 2), 0.0),
    ],
)
def test_all_at_once_as_one_by_one(name, shape, sizes, average):
    network, layout, start, how = setting(name, shape)
    size, epochs = (2, 1) if name == "gan-mnist" else (5, 2)
    given = network.double(), layout, start.astype(float), Double(how.info, K, epochs, size, average=average)
    one, other = (train(batched, given, *sizes, shape=shape) for batched in (False, True))
    assert [x.shape for x in one] == [(size, *shape) for size in sizes]
    for mine, its in zip(one, other, strict=True):
        assert mine.dtype == its.dtype == np.float32
        assert -1 <= mine.min() < mine.max() <= 1
        np.testing.assert_allclose(its, mine, atol=1e-4)


@for_rows("batched", [False, True])
@for_rows("samples", [1, 7, 10])
def test_as_many_samples_as_asked_for(batched, samples):
    made = train(batched, setting(samples=samples), 12, 3)
    assert [len(x) for x in made] == [samples] * 2
    assert len(np.unique(made[0], axis=0)) == samples


class Watched(torch.optim.SGD):
    """Plain steps in place of Adam's; keeps what it is given."""

    def __init__(self, parameters, lr, betas, fused):
        self.lr_and_betas = (lr, betas)
        made.append(self)
        super().__init__(parameters, lr=0.1)


made = []


@pytest.mark.parametrize("batched", [False, True])
def test_a_step_is_equation_3(monkeypatch, batched):
    """D descends -log D(x) - log(1 - D(G(z))), then G -log D(G(z)) with the new D and the same z."""
    made.clear()
    monkeypatch.setattr(torch.optim, "Adam", Watched)
    network, layout, start, own = setting(epochs=1, batch_size=6)
    (x,) = records(6)
    seen = []
    monkeypatch.setattr(gans, "_sample", lambda net, trained, many, rng, how: seen.append(trained))
    made_of((network, layout, start, own), [x], rngs(1), batched)
    assert [each.lr_and_betas for each in made] == [(6e-4, (0.5, 0.999)), (2e-4, (0.5, 0.999))]

    oracle, _, _, _ = setting()
    g, d = oracle["generator"], oracle["discriminator"]
    rng = np.random.default_rng([0, 0])
    rng.permutation(6)
    z, real = own.latent(rng, 6), torch.as_tensor((x + 1) / 2)
    fooled = g(z)
    loss = -(torch.sigmoid(d(real)).log().mean() + (1 - torch.sigmoid(d(fooled.detach()))).log().mean())
    for value, gradient in zip(d.parameters(), torch.autograd.grad(loss, list(d.parameters())), strict=True):
        value.data -= 0.1 * gradient
    loss = -torch.sigmoid(d(fooled)).log().mean()
    for value, gradient in zip(g.parameters(), torch.autograd.grad(loss, list(g.parameters())), strict=True):
        value.data -= 0.1 * gradient
    for name, value in g.named_parameters():
        torch.testing.assert_close(seen[0][name], value.detach(), atol=1e-5, rtol=1e-4)


@pytest.fixture
def generators(monkeypatch):
    """Generators that samples are taken of."""
    found = []

    def sample(network, generator, *others):
        found.append(generator)
        return np.zeros(1)

    monkeypatch.setattr(gans, "_sample", sample)
    return found


def trained(way, generators, epochs=2, **changes):
    """The generator that one client samples, after as many steps as epochs, by one of three ways to train it."""
    if way == "private":
        private(records(10)[0], replace(FREE, batch_size=10, epochs=epochs), **changes)
    else:
        train(way == "batched", setting("gan-pendigits-gn", batch_size=10, epochs=epochs, **changes), 10)
    return generators.pop()


@pytest.mark.parametrize("way", ["one by one", "batched", "private"])
def test_the_average_follows_the_generator(generators, way):
    first, second = trained(way, generators, 1), trained(way, generators, 2)
    for average, kept in ((0.05, 0.05), (0.9, 1 / 11)):  # the second step keeps no more
        found = trained(way, generators, 2, average=average)
        for name, value in found.items():
            expected = kept * first[name] + (1 - kept) * second[name]
            torch.testing.assert_close(value, expected, atol=5e-7, rtol=0.0)  # a step moves by 6e-4


@pytest.mark.parametrize("way", ["one by one", "batched"])
def test_products_of_less_precision_make_nearly_the_same(generators, way):
    exact, rough = (trained(way, generators, precision=name) for name in ("float32", "bfloat16"))
    assert {value.dtype for value in rough.values()} == {torch.float32}
    for name, value in exact.items():
        torch.testing.assert_close(rough[name], value, atol=5e-3, rtol=0.0)
    assert any(not torch.equal(rough[name], value) for name, value in exact.items())


def test_dp_sgd_is_exact_whatever_the_precision(generators):
    exact, asked = (trained("private", generators, precision=name) for name in ("float32", "bfloat16"))
    assert all(torch.equal(asked[name], value) for name, value in exact.items())


def test_a_gan_learns_where_the_records_are():
    """Two corners of the square, which nobody has told it of."""
    given = setting("gan-pendigits-gn", shape=(2,), epochs=30, batch_size=16)
    corners = np.array([[-0.8, 0.8], [0.8, -0.8]], np.float32)[np.arange(64) % 2]
    (x,) = made_of(given, [corners], rngs(1))
    near = np.linalg.norm(x[:, None] - corners[:2], axis=2).min(axis=1) < 0.5
    assert near.mean() > 0.6  # 0.1 of the square


# ---- at record level -------------------------------------------------------------------------------------------------

FREE = DPSGD(num_examples=10, batch_size=5, epochs=2, lr=0.0, clip_norm=1e6, noise_multiplier=0.0)


def private(x, settings=FREE, seed=0, name="gan-pendigits-gn", **changes):
    network, layout, start, own = setting(name, x.shape[1:], **changes)
    draws = [np.random.default_rng([seed, i]) for i in range(3)]
    return train_gan_privately(network, layout, start, x, *draws, own, settings)


def each_gradient(discriminator, x):
    """(n, d) by plain autograd, a record at a time."""
    parameters = list(discriminator.parameters())
    rows = [torch.autograd.grad(softplus(-discriminator(one[None])).sum(), parameters) for one in x]
    return torch.stack([torch.cat([part.flatten() for part in row]) for row in rows]).double()


class Draws(DPSGD):
    """Keeps what was drawn."""

    def sample(self, coins, size):
        seen["batches"].append(super().sample(coins, size))
        return seen["batches"][-1]

    def noise(self, noises, size):
        noise = super().noise(noises, size)
        seen["noise"].append(noise.copy())  # it is added to in place
        return noise


seen = {}


@pytest.fixture
def drawn():
    seen.update(batches=[], noise=[])
    return seen


def test_steps_rates_and_noise_are_the_plan_s(drawn):
    settings = Draws(num_examples=400, batch_size=100, epochs=3, lr=0.0, clip_norm=0.5, noise_multiplier=2.0)
    (x,) = records(300)  # not the public number
    private(x, settings, samples=2)
    assert len(drawn["batches"]) == len(drawn["noise"]) == 3 * 4
    # 3,600 coins that fall with probability 1/4; six standard deviations flake once in 10^8.
    assert abs(sum(map(len, drawn["batches"])) - 900) < 6 * math.sqrt(3600 * 3 / 16)
    noise = np.concatenate(drawn["noise"])
    assert abs(noise.std() / 2.0 - 1) < 6 / math.sqrt(2 * len(noise))
    assert len(drawn["noise"][0]) == sum(
        value.numel() for value in setting("gan-pendigits-gn")[0]["discriminator"].parameters()
    )


def test_a_private_step_is_equation_3_with_clipped_and_noisy_gradients(monkeypatch, drawn):
    made.clear()
    monkeypatch.setattr(torch.optim, "Adam", Watched)
    monkeypatch.setattr(gans, "_sample", lambda net, trained, many, rng, how: (trained, many))
    (x,) = records(8)
    settings = Draws(num_examples=6, batch_size=4, epochs=1, lr=0.0, clip_norm=0.2, noise_multiplier=0.7)
    trained, many = private(x, settings)
    assert many == 6
    oracle, _, _, own = setting("gan-pendigits-gn")
    g, d = oracle["generator"], oracle["discriminator"]
    z = own.latent(np.random.default_rng([0, 2]), 4)
    fooled = g(z)
    rows = each_gradient(d, torch.as_tensor((x[drawn["batches"][0]] + 1) / 2))
    clipped = (rows * (0.2 / rows.norm(dim=1, keepdim=True)).clamp(max=1)).sum(dim=0)
    noisy = (clipped + 0.2 * torch.as_tensor(drawn["noise"][0])) / 4
    public = torch.autograd.grad(softplus(d(fooled.detach())).mean(), list(d.parameters()))
    start = 0
    for value, other in zip(d.parameters(), public, strict=True):
        value.data -= 0.1 * (noisy[start : start + value.numel()].reshape(value.shape).float() + other)
        start += value.numel()
    loss = softplus(-d(fooled)).mean()
    for value, gradient in zip(g.parameters(), torch.autograd.grad(loss, list(g.parameters())), strict=True):
        value.data -= 0.1 * gradient
    for name, value in g.named_parameters():
        torch.testing.assert_close(trained[name], value.detach(), atol=1e-5, rtol=1e-4)


def test_the_number_of_samples_is_public_whatever_the_true_one():
    for many in (0, 1, 9, 11, 30):
        made = private(records(many)[0])
        assert made.shape == (10, 4)
        assert -1 <= made.min() < made.max() <= 1
    assert private(records(9)[0], samples=3).shape == (3, 4)


def test_records_out_of_range_are_pulled_in_without_a_word():
    (x,) = records(10)
    x[0], x[1], x[2] = 1, -1, 0
    spoiled = x.copy()
    spoiled[0], spoiled[1], spoiled[2] = 1e9, -np.inf, np.nan
    np.testing.assert_array_equal(private(spoiled), private(x))


def test_the_start_is_the_one_that_came():
    network, layout, start, own = setting("gan-pendigits-gn")
    for value in network.parameters():
        nn.init.zeros_(value)  # the network's own parameters are not used
    draws = [np.random.default_rng([0, i]) for i in range(3)]
    (x,) = records(10)
    np.testing.assert_array_equal(train_gan_privately(network, layout, start, x, *draws, own, FREE), private(x))
