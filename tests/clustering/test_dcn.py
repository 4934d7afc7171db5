"""The deep clustering network on three blobs: it finds them, and a run that was cut short ends as if it were not."""

import numpy as np
import pytest
import torch

from coterie.clustering import dcn
from coterie.clustering.dcn import DCN
from coterie.clustering.kmeans import k_means
from coterie.models import autoencoder
from coterie.models.autoencoder import Autoencoder

EACH, FEATURES = 20, 6
CENTRES = np.array([[1, 1, 1, 1, 1, 1], [-1, -1, -1, 1, 1, 1], [1, -1, 1, -1, 1, -1]]) * 0.7


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """In place of Table A.8's widths."""
    monkeypatch.setattr(autoencoder, "WIDTHS", (40, 30, 10))


def blobs():
    """(60, 2, 3) points of three kinds, in order."""
    noise = 0.1 * np.random.default_rng(0).standard_normal((3, EACH, FEATURES))
    return (CENTRES[:, None] + noise).reshape(-1, 2, 3).astype(np.float32)


def network(**changes):
    usual = {"k": 3, "pretrain_epochs": 3, "joint_epochs": 2, "weight": 1.0, "noise": 0.0, "restarts": 1}
    return DCN(**{**usual, "batch_part": 0.2, "seed": 1, **changes})


def vectors(labeller):
    return {name: value.detach().numpy() for name, value in labeller.named_parameters()}


def copied(state):
    return {name: np.array(values) for name, values in state.items()}


def assert_same(one, other):
    for name, values in vectors(one).items():
        np.testing.assert_allclose(vectors(other)[name], values, atol=1e-6, err_msg=name)


def assert_apart(labeller):
    """Every blob has a label of its own."""
    labels = labeller(torch.as_tensor(blobs())).argmax(dim=1).reshape(3, EACH)
    assert [len(set(own.tolist())) for own in labels] == [1, 1, 1]
    assert len(set(labels[:, 0].tolist())) == 3


@pytest.fixture
def losses(monkeypatch):
    """(reconstruction, distance from the centroids) of all points before and after every epoch."""
    seen, train = [], DCN._train

    def of(net, x, centroids, labels):
        with torch.no_grad():
            codes, again = net(x)
            apart = float("nan") if centroids is None else (codes - centroids[labels]).square().sum(1).mean().item()
        return (again - x).square().sum(1).mean().item(), apart

    def watched(self, net, adam, x, epoch, centroids, labels):
        before = of(net, x, centroids, labels)
        train(self, net, adam, x, epoch, centroids, labels)
        seen.append((before, of(net, x, centroids, labels)))

    monkeypatch.setattr(DCN, "_train", watched)
    return seen


def test_both_stages_lower_their_objective_and_find_the_blobs(losses):
    labeller = network(pretrain_epochs=15, joint_epochs=15).fit(blobs())
    before, after = np.moveaxis(np.array(losses), 1, 0)
    assert np.isnan(after[:15, 1]).all()
    assert after[14, 0] < 0.2 * before[0, 0]
    assert after[-1] @ [1, 0.5] < 0.9 * before[15] @ [1, 0.5]
    assert_apart(labeller)


def test_products_in_bfloat16_find_the_blobs_and_leave_parameters_in_float32(losses):
    labeller = network(pretrain_epochs=15, joint_epochs=15, precision="bfloat16").fit(blobs())
    assert losses[-1][1][0] < 0.2 * losses[0][0][0]
    assert_apart(labeller)
    assert all(values.dtype == np.float32 for values in vectors(labeller).values())
    exact = network(pretrain_epochs=15, joint_epochs=15).fit(blobs())
    assert not np.array_equal(vectors(labeller)["centroids"], vectors(exact)["centroids"])


@pytest.mark.parametrize("weight", [0.0, 3.0])
def test_a_step_goes_down_the_gradient_of_equation_1(monkeypatch, weight):
    torch.manual_seed(0)
    monkeypatch.setattr(autoencoder, "WIDTHS", (7, 5, 2))
    network, x = Autoencoder(FEATURES, linear_code=True).double(), torch.as_tensor(blobs()).double().flatten(1)
    centroids, labels = torch.rand(3, 2).double(), torch.arange(60) % 3
    codes, again = network(x)
    loss = sum((again - x).square().sum(1) + weight / 2 * (codes - centroids[labels]).square().sum(1)) / 60
    expected = torch.autograd.grad(loss, list(network.parameters()))
    before = [value.detach().clone() for value in network.parameters()]
    whole = DCN(3, batch_part=1.0, weight=weight, noise=0.0)
    whole._train(network, torch.optim.SGD(network.parameters(), 1.0), x, (0, 0), centroids, labels)
    for value, old, gradient in zip(network.parameters(), before, expected, strict=True):
        torch.testing.assert_close(old - value, gradient, atol=1e-6, rtol=1e-6)


def test_without_joint_epochs_codes_are_clustered_in_sequence(monkeypatch, losses):
    calls = []
    monkeypatch.setattr(dcn, "k_means", lambda *a, **k: (calls.append((a, k)), k_means(*a, **k))[1])
    labeller = network(joint_epochs=0).fit(blobs())
    assert np.isnan(np.array(losses)[..., 1]).all()
    assert len(losses) == 3
    ((codes, k, _), options) = calls[0]
    assert (len(calls), k, options["start"]) == (1, 3, None)
    # The labeller's encoder is the trained one, batch normalisation folded in; its centroids are of those codes.
    np.testing.assert_allclose(labeller.encoder(torch.as_tensor(blobs())).detach(), codes, atol=1e-4)
    nearest = labeller(torch.as_tensor(blobs())).argmax(dim=1).numpy()
    means = [codes[nearest == j].mean(axis=0) for j in range(3)]
    np.testing.assert_allclose(labeller.centroids.detach(), means, atol=1e-4)


def test_k_means_begins_where_the_last_epoch_s_ended(monkeypatch):
    found = []

    def watched(codes, k, rng, start):
        found.append((start, k_means(codes, k, rng, start=start)))
        return found[-1][1]

    monkeypatch.setattr(dcn, "k_means", watched)
    labeller = network().fit(blobs())
    assert len(found) == 3
    assert found[0][0] is None
    for (start, _), (_, before) in zip(found[1:], found, strict=False):
        np.testing.assert_allclose(start, before, atol=1e-6)
    np.testing.assert_allclose(labeller.centroids.detach(), found[-1][1], atol=1e-6)


def test_a_run_that_was_cut_short_ends_as_if_it_were_not(monkeypatch):
    monkeypatch.setattr(dcn, "_KEEP_EVERY", 1)
    states, said = [], []
    twice = network(restarts=2, noise=0.3)
    whole = twice.fit(blobs(), keep=lambda state: states.append(copied(state)), progress=said.append)
    assert [int(state["epoch"]) for state in states] == 2 * [1, 2, 3, 4, 5]
    assert said == [f"deep clustering {start} of 2: epoch {epoch} of 5" for start in (1, 2) for epoch in range(1, 6)]
    for cut in (1, 3, 4, 5, 6, 10):
        said.clear()
        assert_same(twice.fit(blobs(), state=states[cut - 1], progress=said.append), whole)
        assert len(said) == 10 - cut


def test_of_some_starts_the_one_with_the_least_objective_is_taken(monkeypatch):
    tried, fit = [], DCN._fit

    def watched(self, *others):
        tried.append(fit(self, *others))
        return tried[-1]

    monkeypatch.setattr(DCN, "_fit", watched)
    taken = network(restarts=3).fit(blobs())
    objectives = [objective for _, objective in tried]
    assert len(set(objectives)) == 3
    assert_same(taken, tried[int(np.argmin(objectives))][0])
    assert_same(network().fit(blobs()), tried[0][0])
    assert network(restarts=3, joint_epochs=0).starts == 1  # nothing to compare them by


def test_the_objective_is_equation_1_without_noise(monkeypatch):
    monkeypatch.setattr(autoencoder, "WIDTHS", (7, 5, 2))
    torch.manual_seed(0)
    net, x, centroids = Autoencoder(FEATURES, linear_code=True), torch.as_tensor(blobs()).flatten(1), torch.rand(3, 2)
    found = network(weight=3.0, noise=9.0)._objective(net, x, centroids)
    with torch.no_grad():
        codes, again = net.eval()(x)
    apart = torch.stack([(codes - c).square().sum(1) for c in centroids], dim=1).amin(dim=1)
    assert found == pytest.approx(float(((again - x).square().sum(1) + 1.5 * apart).mean()), rel=1e-5)


def test_noise_is_on_what_goes_in_alone(monkeypatch):
    seen = []
    forward = Autoencoder.forward
    monkeypatch.setattr(Autoencoder, "forward", lambda self, x: (seen.append(x), forward(self, x))[1])
    network(noise=0.5, pretrain_epochs=1, joint_epochs=0, batch_part=1.0).fit(blobs())
    rows = torch.as_tensor(blobs()).flatten(1)
    apart = torch.cdist(seen[0], rows).amin(dim=1)  # six numbers of deviation 0.5
    assert 0.6 < apart.mean() < 1.4
    assert abs(float(seen[0].mean() - rows.mean())) < 0.1


def test_a_seed_decides_alone():
    one, other = network(), network(seed=2)
    assert_same(one.fit(blobs()), network().fit(blobs()))
    with pytest.raises(AssertionError):
        assert_same(one.fit(blobs()), other.fit(blobs()))


def test_a_state_is_kept_now_and_then(monkeypatch):
    monkeypatch.setattr(dcn, "_KEEP_EVERY", 2)
    epochs = []
    network().fit(blobs(), keep=lambda state: epochs.append(int(state["epoch"])))
    assert epochs == [2, 4]


def test_batches_are_drawn_afresh_in_every_epoch():
    x, weights = torch.as_tensor(blobs()).flatten(1), []
    for when in ((0, 0), (0, 0), (0, 1), (1, 0)):
        torch.manual_seed(0)
        own = Autoencoder(FEATURES, linear_code=True)
        network()._train(own, torch.optim.SGD(own.parameters(), 0.1), x, when, None, None)
        weights.append(own.encoder[0].weight.detach())
    assert torch.equal(weights[0], weights[1])
    assert not torch.allclose(weights[0], weights[2])
    assert not torch.allclose(weights[0], weights[3])


def test_a_last_batch_of_one_point_is_left_out():
    labeller = network(batch_part=0.3, pretrain_epochs=1, joint_epochs=0).fit(blobs()[:5])
    assert all(np.isfinite(values).all() for values in vectors(labeller).values())
    assert vectors(labeller)["centroids"].shape == (3, 10)


def test_too_few_points_are_refused_before_anything_is_trained(losses):
    with pytest.raises(ValueError, match="the number of points, 2, must be at least the number of clusters, 3"):
        network().fit(blobs()[:2])
    assert losses == []
