"""The verbs of one-shot clustering: what clients send, what they pay first, and that labels stay with them."""

import json

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, RecordDict
from kit import toys

from coterie.client import gan_training as gans
from coterie.client import points, record_level
from coterie.client.answer import handle
from coterie.client.cohort import federation
from coterie.client.identity import Client
from coterie.client.state import ClientError, StateFile
from coterie.clustering import fuzzy_c_means, k_means
from coterie.models import autoencoder, build_gan
from coterie.models.autoencoder import Labeller
from coterie.privacy import RecordPlan
from coterie.server import RunConfig
from coterie.wire.messages import Layout, PointsSpec, pack_models, read_points

SETTINGS = {"strategy": "ppfc-gan", "dataset": "kit.toys:blobs", "clients": 4, "clusters": 3, "local-epochs": 1}
SETTINGS |= {"batch-size": 5, "label-skew": "none", "samples-per-client": 8, "seed": 3, "device": "cpu"}
PLAIN = {"average": 0.0, "feature-range": 1.0}


def client_config(**settings):
    return RunConfig({**SETTINGS, **settings}).for_clients()


def packed(module):
    values = {name: value.detach().numpy() for name, value in module.named_parameters()}
    layout = Layout.of(values)
    return pack_models(layout.flatten(values)[None], layout)


def question(folder, models=None, settings=None, **extra):
    torch.manual_seed(0)
    models = packed(build_gan(extra.get("gan", "gan-pendigits"), (4,), 3)) if models is None else models
    of_round = {"clients-dir": str(folder), "round": 1, "labels": 3, **PLAIN, **extra}
    config = client_config(**(settings or {})) | of_round
    return RecordDict({"models": models, "config": ConfigRecord(config)})


def read(answer, client, exactly=0):
    assert set(answer) == {"update", "reply"}
    assert set(answer["reply"]) == {"client-id", "round"}
    return read_points(answer, client_id=client, round=1, expected=PointsSpec((4,), 100, num_points=exactly))


def ask(verb, content, clients):
    return handle(verb, content, [Client(i) if isinstance(i, int) else i for i in clients])


# ---- train.gan -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [0, 3])
def test_samples_of_each_client_s_gan(tmp_path, samples):
    content = question(tmp_path, gan="gan-pendigits", samples=samples)
    answers = ask("train.gan", content, [0, 2, 3])
    made = [read(answer, client, samples or 8) for answer, client in zip(answers, (0, 2, 3), strict=True)]
    assert not np.array_equal(made[0], made[1])
    (alone,) = ask("train.gan", content, [2])
    np.testing.assert_array_equal(read(alone, 2), made[1])
    assert list(tmp_path.iterdir()) == []  # nothing is kept, nothing is charged


def test_without_a_seed_samples_are_the_client_s_secret(tmp_path):
    content = question(tmp_path, settings={"seed": "auto"}, gan="gan-pendigits", samples=2)
    one, other = (read(ask("train.gan", content, [0])[0], 0) for _ in range(2))
    assert not np.array_equal(one, other)


def test_the_gan_starts_as_it_came(tmp_path):
    """Trained not at all, it makes what the server's network makes."""
    network = build_gan("gan-pendigits", (4,), 3)
    for value in network.parameters():
        value.data.zero_()
    network["generator"][-2].bias.data.fill_(20.0)  # a sigmoid of 1
    content = question(tmp_path, packed(network), settings={"local-epochs": 1}, gan="gan-pendigits", samples=4)
    (answer,) = ask("train.gan", content, [1])
    np.testing.assert_allclose(read(answer, 1), 1, atol=1e-2)


def test_a_client_that_cannot_does_not_keep_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(gans.GANTraining, "check", lambda how, x: ClientError("no") if x[0, 0] == poor else None)
    poor = federation(client_config()).shard(1).x[0, 0]
    answers = ask("train.gan", question(tmp_path, gan="gan-pendigits", samples=0), [0, 1, 2])
    assert isinstance(answers[1], ClientError)
    together = [read(answers[0], 0), read(answers[2], 2)]
    alone = [read(ask("train.gan", question(tmp_path, gan="gan-pendigits", samples=0), [i])[0], i) for i in (0, 2)]
    assert [x.shape for x in together] == [x.shape for x in alone]


@pytest.mark.parametrize("verb", ["train.gan", "train.centroids"])
def test_records_out_of_range_are_clamped_and_the_log_of_the_client_says_so(tmp_path, caplog, verb):
    of_verb = (
        {"gan": "gan-pendigits", "samples": 0} if verb == "train.gan" else {"local": "k-means", "local-centroids": 1}
    )
    models = None if verb == "train.gan" else NOTHING
    (answer,) = ask(verb, question(tmp_path, models, {"dataset": "kit.toys:far"}, **of_verb), [1])
    assert np.abs(read(answer, 1)).max() <= 1
    assert "client 1: 100 % of the features lie outside [-1, 1] and are clamped" in caplog.text


@pytest.mark.parametrize("bound", [0.1, 0.3, 1.7, 3.3])
def test_points_of_any_range_lie_inside_as_the_server_sees_it(tmp_path, bound):
    """The bound is a double, points are float32: neither end may round outwards."""
    for verb, models, of_verb in (
        ("train.gan", None, {"gan": "gan-pendigits", "samples": 0}),
        ("train.centroids", NOTHING, {"local": "k-means", "local-centroids": 8}),
    ):
        (answer,) = ask(
            verb, question(tmp_path, models, {"dataset": "kit.toys:far"}, **of_verb, **{"feature-range": bound}), [1]
        )
        read_points(answer, client_id=1, round=1, expected=PointsSpec((4,), 100, low=-bound, high=bound))


def test_a_client_with_a_budget_gives_nothing_that_it_does_not_pay_for(tmp_path):
    rich = Client(0, str(tmp_path / "own"), (8.0, 1e-5), guarantee="record-level")
    (answer,) = ask("train.gan", question(tmp_path, gan="gan-pendigits", samples=0), [rich])
    assert isinstance(answer, ClientError)
    assert "guarantee = record-level refuses train.gan" in str(answer)
    for plans in ({}, {"record-plans": terms()[1]}):  # a plan does not pay for exact centroids
        (answer,) = ask(
            "train.centroids", question(tmp_path, **{"local": "k-means", "local-centroids": 8}, **plans), [rich]
        )
        assert isinstance(answer, ClientError)
        assert "guarantee = record-level refuses train.centroids" in str(answer)


# ---- train.gan at record level ---------------------------------------------------------------------------------------


def terms(**changes):
    numbers = {"num_examples": 8, "batch_size": 4, "rounds": 1, "epsilon": 8.0, "delta": 1e-3, "clip_norm": 1.0}
    plan = RecordPlan(**{**numbers, "local_epochs": 2, "noise_multiplier": 3.0, "selection": "none", **changes})
    return plan, json.dumps([{key: value for key, value in plan.terms().items() if key != "mechanism"}])


def privately(folder, client, settings=None, samples=0, **changes):
    plan, sent = terms(**changes)
    extra = {"gan": "gan-pendigits-gn", "samples": samples, "record-plans": sent}
    return ask("train.gan", question(folder, settings=settings, **extra), [client])[0], plan


def charges(folder, client):
    lines = (folder / f"client-{client}.ledger.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "ledger" not in line]


def test_it_pays_every_step_and_nothing_else(tmp_path):
    answer, _ = privately(tmp_path, 1)
    assert read(answer, 1, 8).shape == (8, 4)
    written = charges(tmp_path, 1)
    assert sum(line.get("count", 1) for line in written) == 2 * (8 // 4)
    assert {(line["sampling_rate"], line["noise_multiplier"]) for line in written} == {(0.5, 3.0)}


@pytest.mark.parametrize("many", [7, 9])
def test_the_number_of_samples_is_the_public_one(tmp_path, many):
    """A real client keeps all of its records; its number of samples does not tell how many."""
    real = Client(1, str(tmp_path), (8.0, 1e-3), guarantee="record-level")
    answer, _ = privately(tmp_path, real, {"seed": "auto", "samples-per-client": many})
    assert read(answer, 1, 8).shape == (8, 4)


def test_a_charge_is_on_disk_before_anything_is_drawn(tmp_path, monkeypatch):
    order = []
    charge, train, stream = record_level.charge, points.train_gan_privately, points.Streams.stream
    monkeypatch.setattr(record_level, "charge", lambda *a: (order.append("charge"), charge(*a))[1])
    monkeypatch.setattr(points.Streams, "stream", lambda *a: (order.append(a[1]), stream(*a))[1])
    monkeypatch.setattr(points, "train_gan_privately", lambda *a: (order.append("train"), train(*a))[1])
    privately(tmp_path, 0)
    assert order == ["charge", "batches", "gradients", "latents", "train"]


def test_the_numbers_of_dp_sgd_are_the_plan_s(tmp_path, monkeypatch):
    given = []
    train = points.train_gan_privately
    monkeypatch.setattr(points, "train_gan_privately", lambda *a: (given.append(a[-1]), train(*a))[1])
    _, plan = privately(tmp_path, 0, clip_norm=0.7, noise_multiplier=2.5)
    (private,) = given
    assert (private.num_examples, private.batch_size, private.epochs) == (8, 4, 2)
    assert (private.clip_norm, private.noise_multiplier) == (0.7, 2.5)
    assert private.steps == sum(plan.part().values())


def test_a_budget_that_is_spent_refuses_before_it_draws(tmp_path, monkeypatch):
    answer, _ = privately(tmp_path, 0, epsilon=6.0, noise_multiplier=1.0)
    assert not isinstance(answer, ClientError)
    before = (tmp_path / "client-0.ledger.jsonl").read_bytes()
    monkeypatch.setattr(points, "train_gan_privately", lambda *a: pytest.fail("it trained"))
    for _ in range(2):
        answer, _ = privately(tmp_path, 0, epsilon=6.0, noise_multiplier=1.0)
        assert isinstance(answer, ClientError)
        assert "client 0 rejects the request" in str(answer)
    assert (tmp_path / "client-0.ledger.jsonl").read_bytes() == before


def test_without_a_folder_there_is_no_account_and_no_sample(tmp_path):
    answer, _ = privately(tmp_path, Client(0, "", (8.0, 1e-3), guarantee="record-level"), {"seed": "auto"})
    assert "the client's ledger requires a state folder" in str(answer)


def test_a_repeated_round_draws_afresh(tmp_path):
    one, other = (read(privately(tmp_path, 0, epsilon=1e9)[0], 0) for _ in range(2))
    assert not np.array_equal(one, other)
    again = read(privately(tmp_path / "elsewhere", 0, epsilon=1e9)[0], 0)
    np.testing.assert_array_equal(again, one)


# ---- train.centroids -------------------------------------------------------------------------------------------------


NOTHING = pack_models(np.zeros((1, 0), np.float32), Layout((), ()))


def rows(client):
    return federation(client_config()).shard(client).x


def rng(client):
    return np.random.default_rng([3, 1, client])


@pytest.mark.parametrize("k", [1, 3])
def test_centroids_by_k_means(tmp_path, k):
    content = question(tmp_path, NOTHING, local="k-means", **{"local-centroids": k})
    for client, answer in zip((2, 0), ask("train.centroids", content, [2, 0]), strict=True):
        np.testing.assert_allclose(read(answer, client, k), k_means(rows(client), k, rng(client)), atol=1e-6)


def test_centroids_by_fuzzy_c_means(tmp_path):
    extra = {"local": "fuzzy-c-means", "local-centroids": 3, "fuzzifier": 2.5}
    (answer,) = ask("train.centroids", question(tmp_path, NOTHING, **extra), [1])
    found = read(answer, 1, 3)
    np.testing.assert_allclose(found, fuzzy_c_means(rows(1), 3, rng(1), fuzzifier=2.5), atol=1e-6)
    assert np.abs(found - fuzzy_c_means(rows(1), 3, rng(1), fuzzifier=1.1)).max() > 1e-3


def test_no_more_centroids_than_records(tmp_path):
    content = question(tmp_path, NOTHING, local="k-means", **{"local-centroids": 20})
    (answer,) = ask("train.centroids", content, [0])
    found = read(answer, 0, 8)
    assert {tuple(row) for row in found.round(4)} == {tuple(row) for row in rows(0).round(4)}


def test_images_are_clustered_as_vectors(tmp_path):
    settings = {"dataset": "digits"}
    content = question(tmp_path, NOTHING, settings, local="k-means", **{"local-centroids": 2})
    (answer,) = ask("train.centroids", content, [0])
    found = read_points(answer, client_id=0, round=1, expected=PointsSpec((1, 8, 8), 2, num_points=2))
    x = federation(client_config(**settings)).shard(0).x
    np.testing.assert_allclose(found.reshape(2, 64), k_means(x.reshape(-1, 64), 2, rng(0)), atol=1e-5)


def test_a_mean_s_rounding_does_not_leave_the_range(tmp_path, monkeypatch):
    low, high = rows(0).min(), rows(0).max()
    monkeypatch.setattr(points, "k_means", lambda x, k, rng: np.array([[2.0, -2.0, 0.1, 0.2]]))
    content = question(tmp_path, NOTHING, local="k-means", **{"local-centroids": 1})
    np.testing.assert_allclose(read(ask("train.centroids", content, [0])[0], 0), [[high, low, 0.1, 0.2]])


# ---- query.label -----------------------------------------------------------------------------------------------------


def labeller():
    own = Labeller((4,), 3, "none")
    own.centroids.data = torch.as_tensor(toys.CORNERS[[2, 0, 1]])
    return own


def label(folder, client, models=None, **extra):
    content = question(
        folder, packed(labeller()) if models is None else models, **{"release-counts": True, "encoder": "none", **extra}
    )
    return ask("query.label", content, [client])[0]


def test_labels_stay_at_the_client_and_numbers_of_records_are_told(tmp_path):
    answer = label(tmp_path, 1)
    y = federation(client_config()).shard(1).y
    labels = StateFile(tmp_path, 1).read()["labels"]
    assert labels.tolist() == [{2: 0, 0: 1, 1: 2}[kind] for kind in y.tolist()]  # by the centroid of its kind
    assert set(answer) == {"reply", "diagnostics"}
    assert set(answer["reply"]) == {"client-id", "round"}
    told = answer["diagnostics"]
    assert set(told) == {"client-id", "classes", "confusion"}
    assert (told["client-id"], told["classes"]) == (1, 3)
    table = np.reshape(told["confusion"], (3, 3))
    assert table.tolist() == [[0, 0, (y == 2).sum()], [(y == 0).sum(), 0, 0], [0, (y == 1).sum(), 0]]


def test_nothing_is_told_where_nobody_asks_or_the_client_does_not_allow_it(tmp_path):
    assert set(label(tmp_path, 0, **{"release-counts": False})) == {"reply"}
    mistrusts = Client(0, str(tmp_path / "own"), (8.0, 1e-5), guarantee="record-level")
    assert set(label(tmp_path, mistrusts)) == {"reply"}
    assert len(StateFile(tmp_path / "own", 0).read()["labels"]) > 0
    willing = Client(0, str(tmp_path / "own"), (8.0, 1e-5), True, "record-level")
    for client in (willing, Client(0, str(tmp_path / "own"), guarantee="trusted-server")):
        assert set(label(tmp_path, client)) == {"reply", "diagnostics"}


def test_a_client_without_a_folder_cannot_keep_labels(tmp_path):
    answer = label(tmp_path, Client(0, "", guarantee="trusted-server"))
    assert isinstance(answer, ClientError)
    assert "state-dir" in str(answer)


def test_labels_come_from_codes_in_parts_of_any_size(tmp_path, monkeypatch):
    monkeypatch.setattr(autoencoder, "WIDTHS", (6, 2))
    points._labeller.cache_clear()
    torch.manual_seed(0)
    own = Labeller((4,), 3, "sae")
    own.centroids.data = own.encoder(torch.as_tensor(toys.CORNERS)).detach()
    expected = own(torch.as_tensor(rows(2))).argmax(dim=1).tolist()
    assert len(set(expected)) > 1
    for chunk in (4096, 3):
        monkeypatch.setattr(autoencoder, "_CHUNK", chunk)
        label(tmp_path, 2, packed(own), encoder="sae")
        assert StateFile(tmp_path, 2).read()["labels"].tolist() == expected
    points._labeller.cache_clear()
