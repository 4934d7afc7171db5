"""One-shot clustering on a federation of blobs: who is heard, what is dropped, and how the union is clustered."""

import json

import numpy as np
import pytest
from flwr.app import Message, RecordDict
from kit import toys
from kit.toy_grids import changing
from kit.toys import strategy_of
from safetensors.numpy import load_file

from coterie.client import points as verbs
from coterie.clustering import dcn, k_means
from coterie.engine.in_process import LocalGrid
from coterie.fields.settings import ConfigError
from coterie.models import autoencoder
from coterie.privacy import Joint, NoPrivacy, PrivacyError, Streams
from coterie.rounds.batches import MessageBatch
from coterie.server import RunConfig, RunError, RunFolder, run
from coterie.strategies import FFCM, KFED, PPFCGAN
from coterie.wire import CentroidsRequest, GanRequest, LabelRequest
from coterie.wire.messages import pack_points

CLIENTS = 10
SETTINGS = {
    "strategy": "kfed",
    "dataset": "kit.toys:blobs",
    "clients": CLIENTS,
    "clusters": 3,
    "label-skew": "non-iid:0",
    "seed": 1,
    "device": "cpu",
    "registration-timeout": 0.0,
}
GAN = {**SETTINGS, "strategy": "ppfc-gan", "local-epochs": 1, "batch-size": 4, "pretrain-epochs": 1, "joint-epochs": 1}
GAN |= {"dcn-restarts": 1}
SMALL = (8, 6, 4)  # widths of an encoder that trains in no time
METHODS = {"kfed": SETTINGS, "ffcm": {**SETTINGS, "strategy": "ffcm"}, "ppfc-gan": GAN}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A small autoencoder in place of Table A.8's, whose state takes seconds to keep."""
    monkeypatch.setattr(autoencoder, "WIDTHS", SMALL)
    verbs._labeller.cache_clear()
    yield
    verbs._labeller.cache_clear()


class Wire(LocalGrid):
    """Counts what goes by; a reply to a question for points can be spoiled, or never come."""

    def __init__(self, spoil=lambda client, content: [content], silent=(), cut=None, step=1):
        super().__init__(CLIENTS)
        self.spoil, self.silent, self.cut, self.step = spoil, silent, cut, step
        self.down, self.up, self.asked, self.timeouts = [], [], [], []

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        self.timeouts.append((messages[0].metadata.message_type if messages else "", timeout))
        return super().send_and_receive(messages, timeout=timeout)

    def _answers(self, questions):
        for message in questions[:: self.step]:
            verb, client = message.metadata.message_type, message.metadata.dst_node_id - 1
            if verb == "query.identity":
                yield from super()._answers([message])
                continue
            self.down.append((verb, client, message.content))
            train = verb.startswith("train")
            if train:
                self.asked.append(client)
                if client == self.cut:
                    raise KeyboardInterrupt
            if train and client in self.silent:
                continue
            for reply in super()._answers([message]):
                contents = self.spoil(client, reply.content) if train and reply.has_content() else [reply.content]
                for content in contents:
                    self.up.append((verb, client, content))
                    yield Message(content, reply_to=message)


def execute(path, settings, grid=None, prepare=lambda folder: None):
    """A new run, or (settings None) the one in ``path`` resumed: its result."""
    folder = RunFolder.resume(path, {}) if settings is None else RunFolder.create(path, RunConfig(settings))
    prepare(folder)
    try:
        return run(folder, grid or Wire())
    finally:
        folder.close()


def cut_short(*anything):
    raise KeyboardInterrupt


def bytes_of(content):
    return sum(len(array.data) for record in content.array_records.values() for array in record.values())


def labels(path, client):
    return load_file(path / "clients" / f"client-{client}.safetensors")["labels"]


def line(path):
    (one,) = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
    return one


# ---- one exchange ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", METHODS.values(), ids=METHODS)
def test_there_is_one_exchange_and_it_is_counted(tmp_path, settings):
    grid = Wire()
    outcome = execute(tmp_path / "run", settings, grid)
    verbs = [verb for verb, *_ in grid.down]
    question = "train.gan" if settings is GAN else "train.centroids"
    assert verbs == [question] * CLIENTS + ["query.label"] * CLIENTS
    counted = {
        "messages_down": 2 * CLIENTS,
        "messages_up": 2 * CLIENTS,
        "bytes_down": sum(bytes_of(content) for *_, content in grid.down),
        "bytes_up": sum(bytes_of(content) for *_, content in grid.up),
    }
    for found in (outcome, line(tmp_path / "run"), json.loads((tmp_path / "run" / "result.json").read_text())):
        assert {key: found[key] for key in counted} == counted
    records = {str(client): len(labels(tmp_path / "run", client)) for client in range(CLIENTS)}
    assert sum(records.values()) == 66
    sent = records if settings is GAN else dict.fromkeys(records, 3)  # a sample a record, or centroids
    assert counted["bytes_up"] == CLIENTS * 128 + 4 * 4 * sum(sent.values())
    assert outcome["notes"] == {"missing": [], "points": sent}
    assert (outcome["rounds"], outcome["clients_labelled"], outcome["certified"]) == (1, CLIENTS, False)
    guarantee = json.loads((tmp_path / "run" / "privacy.json").read_text())  # says why there is none
    assert (guarantee["certified"], guarantee["epsilon"]) == (False, None)
    words = "lemma gives no usable bound" if settings is GAN else "exact centroids"
    assert [words in reason for reason in guarantee["reasons"]].count(True) == 1
    assert all("epsilon is infinite" in reason for reason in guarantee["reasons"] if words in reason)


@pytest.mark.parametrize("strategy", ["kfed", "ffcm"])
def test_the_blobs_are_found_and_scored(tmp_path, strategy):
    outcome = execute(tmp_path / "run", METHODS[strategy])
    exact = outcome["diagnostics"]
    assert [exact[score] for score in ("accuracy", "nmi", "kappa", "ari")] == pytest.approx([1.0] * 4)
    assert exact["classes"] == 3
    assert "groups" not in exact
    table = np.array(exact["confusion"])
    assert table.shape == (3, 3)
    assert sorted(table.max(axis=1)) == [22, 22, 22]
    (model,) = (tmp_path / "run" / "models").iterdir()
    found = load_file(model)["centroids"]
    assert np.linalg.norm(found[:, None] - toys.CORNERS, axis=2).min(axis=0).max() < 0.2


def test_without_evaluation_clients_label_and_tell_nothing(tmp_path):
    grid = Wire()
    outcome = execute(tmp_path / "run", {**SETTINGS, "evaluate": "off"}, grid)
    told = [content for verb, _, content in grid.up if verb == "query.label"]
    assert [set(content) for content in told] == [{"reply"}] * CLIENTS
    assert outcome["clients_labelled"] == CLIENTS
    assert outcome["diagnostics"] is None
    assert not list((tmp_path / "run").glob("diagnostics*"))
    assert sum(len(labels(tmp_path / "run", client)) for client in range(CLIENTS)) == 66


# ---- who is missing --------------------------------------------------------------------------------------------------


def test_the_round_ends_by_the_deadline_and_names_who_is_silent(tmp_path):
    grid = Wire(silent=(1, 4, 8))
    outcome = execute(tmp_path / "run", {**SETTINGS, "round-timeout": 0.1}, grid)
    assert outcome["notes"]["missing"] == [1, 4, 8]
    assert sorted(map(int, outcome["notes"]["points"])) == [0, 2, 3, 5, 6, 7, 9]
    assert [deadline for verb, deadline in grid.timeouts if verb != "query.identity"] == [0.1, 0.1]
    assert outcome["diagnostics"]["accuracy"] == 1
    assert outcome["clients_labelled"] == CLIENTS  # they too download the result
    assert outcome["messages_up"] == 2 * CLIENTS - 3


def test_who_never_registered_is_missing_too(tmp_path):
    grid = Wire()
    grid.get_node_ids = lambda: range(1, 9)
    outcome = execute(tmp_path / "run", SETTINGS, grid)
    assert outcome["notes"]["missing"] == [8, 9]
    assert outcome["clients_labelled"] == 8
    assert not (tmp_path / "run" / "clients" / "client-8.safetensors").exists()


@pytest.mark.parametrize(("part", "many"), [(0.34, 3), (0.04, 0), (0.9, 9)])
def test_a_part_of_the_devices_fails_and_is_never_asked(tmp_path, part, many):
    grid = Wire()
    outcome = execute(tmp_path / "run", {**SETTINGS, "device-failures": part}, grid)
    missing = outcome["notes"]["missing"]
    assert len(missing) == many
    assert grid.asked == [client for client in range(CLIENTS) if client not in missing]
    assert outcome["clients_labelled"] == CLIENTS
    assert outcome["messages_down"] == 2 * CLIENTS - many


def test_which_devices_fail_is_drawn(tmp_path):
    missing = set()
    for seed in range(4):
        outcome = execute(tmp_path / str(seed), {**SETTINGS, "device-failures": 0.3, "seed": seed})
        missing.add(tuple(outcome["notes"]["missing"]))
    assert len(missing) > 1


def instead(points):
    update = pack_points(np.asarray(points, np.float32))
    return lambda content: [RecordDict({"update": update, "reply": content["reply"]})]


#: What the strategy expects, and one reply that is none; all others are refused in wire/test_messages.py.
SPOILED = {
    "range": (instead([[0, 0, 1.5, 0]]), "the points lie in [0, 1.5], expected [-1, 1]"),
    "count": (instead(np.zeros((5, 4))), "the number of points is 5, expected 1 to 3"),
    "shape": (instead(np.zeros((3, 5))), "the points have shape (5,), expected (4,)"),
    "nothing": (lambda content: [RecordDict()], "expected a ConfigRecord 'reply' and an ArrayRecord 'update'"),
}


@pytest.fixture
def reasons(monkeypatch):
    """Of all replies that were dropped."""
    found, drop = [], MessageBatch.drop
    monkeypatch.setattr(MessageBatch, "drop", lambda self, *a: (found.append(a), drop(self, *a))[1])
    return found


@pytest.mark.parametrize(("spoil", "reason"), SPOILED.values(), ids=SPOILED)
def test_a_bad_upload_is_refused_by_name_and_the_rest_goes_on(tmp_path, reasons, spoil, reason):
    grid = Wire(lambda client, content: spoil(content) if client == 2 else [content])
    outcome = execute(tmp_path / "run", SETTINGS, grid)
    assert reasons == [(2, reason)]
    assert outcome["notes"]["missing"] == [2]
    assert outcome["diagnostics"]["accuracy"] == 1
    assert not (tmp_path / "run" / "evidence" / "points-0002.npz").exists()


def test_an_upload_that_comes_twice_counts_once(tmp_path, reasons):
    outcome = execute(tmp_path / "run", SETTINGS, Wire(lambda client, content: [content] * (1 + (client == 2))))
    assert reasons == [(None, "it matches no open request, or is a duplicate")]
    assert outcome["notes"]["missing"] == []
    assert outcome["messages_up"] == 2 * CLIENTS + 1


def test_the_number_of_samples_is_what_was_asked_for(tmp_path, reasons):
    def spoil(client, content):
        return instead(np.zeros((6, 4)))(content) if client == 5 else [content]

    outcome = execute(tmp_path / "run", {**GAN, "synthetic-samples": 7}, Wire(spoil))
    assert reasons == [(5, "the number of points is 6, expected 7")]
    assert set(outcome["notes"]["points"].values()) == {7}


def test_bad_labels_are_dropped_and_the_others_count(tmp_path):
    def lie(reply):
        if "diagnostics" in reply.content and reply.metadata.src_node_id in (3, 5):
            bad = {3: [float("nan")] * 9, 5: [-1] * 9}[reply.metadata.src_node_id]
            reply.content["diagnostics"]["confusion"] = bad

    outcome = execute(tmp_path / "run", SETTINGS, changing(Wire(), lie))
    assert outcome["clients_labelled"] == CLIENTS - 2
    assert outcome["diagnostics"]["accuracy"] == 1
    counted = sum(len(labels(tmp_path / "run", client)) for client in range(CLIENTS) if client not in (2, 4))
    assert np.sum(outcome["diagnostics"]["confusion"]) == counted


@pytest.mark.parametrize("evaluate", ["diagnostic", "off"])
def test_a_label_reply_of_another_round_client_or_form_is_dropped(tmp_path, reasons, evaluate):
    changes = {1: {"round": 2}, 3: {"client-id": 4}, 5: {"client-id": 5.0}, 7: None}

    def lie(reply):
        client = reply.metadata.src_node_id - 1
        if "update" not in reply.content and client in changes and "repeats" not in reply.content["reply"]:
            if changes[client] is None:
                del reply.content["reply"]
            else:
                reply.content["reply"].update(changes[client])

    outcome = execute(tmp_path / "run", {**SETTINGS, "evaluate": evaluate}, changing(Wire(), lie))
    assert outcome["clients_labelled"] == CLIENTS - len(changes)
    assert dict(reasons) == {
        1: "round is 2, expected 1",
        3: "client-id is 4, expected 3",
        5: "client-id is 5.0, expected 5",
        7: "expected a ConfigRecord 'reply'",
    }


def test_nobody_s_points_are_an_error_and_a_resume_asks_again(tmp_path):
    with pytest.raises(RunError, match="0 of 10 clients sent 0 points, too few for 3 clusters"):
        execute(tmp_path / "run", SETTINGS, Wire(silent=range(CLIENTS)))
    grid = Wire()
    outcome = execute(tmp_path / "run", None, grid)
    assert grid.asked == list(range(CLIENTS))
    assert outcome["diagnostics"]["accuracy"] == 1


def test_too_few_points_say_why(tmp_path):
    grid = Wire(lambda client, content: instead([[0, 0, 0, np.nan if client > 1 else 0.5]])(content))
    with pytest.raises(RunError, match="2 of 10 clients sent 2 points, too few for 3 clusters: 8 were dropped, most "):
        execute(tmp_path / "run", SETTINGS, grid)
    assert not (tmp_path / "run" / "evidence" / "gathered.npz").exists()


# ---- cut short -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", METHODS.values(), ids=METHODS)
def test_a_run_that_was_cut_short_asks_only_those_that_had_not_answered(tmp_path, settings):
    whole = execute(tmp_path / "whole", settings)
    for step, cut, others in ((1, 6, [6, 7, 8, 9]), (-1, 3, [0, 1, 2, 3])):
        path = tmp_path / str(cut)
        with pytest.raises(KeyboardInterrupt):
            execute(path, settings, Wire(cut=cut, step=step))
        kept = sorted(file.name for file in (path / "evidence").iterdir())
        assert kept == [f"points-{i:04d}.npz" for i in range(CLIENTS) if i not in others] + ["traffic.npz"]
        grid, said = Wire(), []
        outcome = execute(path, None, grid, lambda folder, said=said: setattr(folder, "on_progress", said.append))
        assert grid.asked == others
        assert said[:4] == [f"points of {many} of 10 clients" for many in (7, 8, 9, 10)]
        assert outcome["notes"] == whole["notes"]
        # Nothing that went by is forgotten: what was asked in vain is asked, and counted, once more.
        assert (outcome["messages_up"], outcome["bytes_up"]) == (whole["messages_up"], whole["bytes_up"])
        assert outcome["messages_down"] == whole["messages_down"] + len(others)
        for client in range(CLIENTS):
            np.testing.assert_array_equal(labels(path, client), labels(tmp_path / "whole", client))


@pytest.mark.parametrize("evaluate", ["diagnostic", "off"])
def test_a_run_that_was_cut_short_before_its_labels_asks_for_labels_alone(tmp_path, monkeypatch, evaluate):
    with monkeypatch.context() as patch:
        patch.setattr(KFED, "evaluation", cut_short)
        with pytest.raises(KeyboardInterrupt):
            execute(tmp_path / "run", {**SETTINGS, "evaluate": evaluate})
    assert not list((tmp_path / "run" / "clients").glob("*"))
    grid = Wire()
    outcome = execute(tmp_path / "run", None, grid)
    assert [verb for verb, *_ in grid.down] == ["query.label"] * CLIENTS
    assert outcome["clients_labelled"] == CLIENTS
    assert (outcome["diagnostics"] or {}).get("accuracy") == (1 if evaluate == "diagnostic" else None)
    assert sum(len(labels(tmp_path / "run", client)) for client in range(CLIENTS)) == 66


def test_devices_that_failed_fail_again_when_a_run_goes_on(tmp_path):
    def prepare(folder):
        def save_artifact(name, arrays):
            if name == "gathered":
                raise KeyboardInterrupt
            RunFolder.save_artifact(folder, name, arrays)

        folder.save_artifact = save_artifact

    with pytest.raises(KeyboardInterrupt):
        execute(tmp_path / "run", {**SETTINGS, "seed": "auto", "device-failures": 0.5}, prepare=prepare)
    failed = set(np.load(tmp_path / "run" / "evidence" / "failures.npz")["clients"].tolist())
    outcome = execute(tmp_path / "run", None)
    assert len(failed) == 5
    assert set(outcome["notes"]["missing"]) == failed


def test_who_was_silent_in_time_is_not_asked_again(tmp_path):
    silent = Wire(silent=(3,))
    with pytest.raises(KeyboardInterrupt):
        execute(tmp_path / "run", SETTINGS, silent, lambda folder: setattr(folder, "checkpoint", cut_short))
    grid = Wire()
    outcome = execute(tmp_path / "run", None, grid)
    assert grid.asked == []
    assert outcome["notes"]["missing"] == [3]
    assert outcome["diagnostics"]["accuracy"] == 1


def test_points_from_before_the_cut_are_enough(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        execute(tmp_path / "run", SETTINGS, Wire(cut=6))
    outcome = execute(tmp_path / "run", None, Wire(silent=(6, 7, 8, 9)))
    assert outcome["notes"]["missing"] == [6, 7, 8, 9]
    assert outcome["diagnostics"]["accuracy"] == 1


@pytest.mark.parametrize("cut", [1, 3])
def test_a_run_that_was_cut_short_in_deep_clustering_goes_on_from_there(tmp_path, monkeypatch, cut):
    monkeypatch.setattr(dcn, "_KEEP_EVERY", 1)
    settings = {**GAN, "pretrain-epochs": 2, "joint-epochs": 2}
    execute(tmp_path / "whole", settings)

    said = []

    def watch(what):
        said.append(what)
        if what == f"deep clustering 1 of 1: epoch {cut + 1} of 4":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(tmp_path / "run", settings, prepare=lambda folder: setattr(folder, "on_progress", watch))
    assert "points of 10 of 10 clients" in said
    said.clear()
    grid = Wire()
    execute(tmp_path / "run", None, grid, lambda folder: setattr(folder, "on_progress", said.append))
    assert grid.asked == []
    assert said == [f"deep clustering 1 of 1: epoch {epoch} of 4" for epoch in range(cut + 1, 5)]
    with np.load(tmp_path / "run" / "evidence" / "dcn-state.npz") as state:
        assert state.files == []  # megabytes that nobody needs any more
    one, other = (load_file(tmp_path / name / "models" / "cluster-0.safetensors") for name in ("whole", "run"))
    for name, values in one.items():
        np.testing.assert_allclose(other[name], values, atol=1e-6)


# ---- record level ----------------------------------------------------------------------------------------------------

RECORDS = {**GAN, "privacy-unit": "record", "samples-per-client": 6, "batch-size": 3, "local-epochs": 2, "epsilon": 9.0}


@pytest.mark.parametrize("seed", ["auto", 1])
def test_at_record_level_samples_carry_a_true_epsilon(tmp_path, seed):
    outcome = execute(tmp_path / "run", {**RECORDS, "seed": seed})
    guarantee = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert guarantee["charges"] == outcome["charges"] == 1
    assert [charge["charges"] for charge in guarantee["charged"]] == [2 * 2]  # the steps of a client
    assert 8 < guarantee["epsilon"] <= 9
    assert (guarantee["unit"], guarantee["certified"]) == ("record", seed == "auto")
    assert not any("lemma" in reason for reason in guarantee["reasons"])
    assert "numbers of records by label and class, exact, and the scores of these" in guarantee["outside"]
    assert outcome["notes"]["points"] == {str(client): 6 for client in range(CLIENTS)}
    own = [(tmp_path / "run" / "clients" / f"client-{client}.ledger.jsonl") for client in range(CLIENTS)]
    assert all(file.exists() for file in own)


@pytest.mark.parametrize("cut", ["upload", "clustering"])
def test_at_record_level_a_crash_costs_nobody_a_second_charge(tmp_path, cut):
    def prepare(folder):
        folder.on_progress = lambda what: cut_short() if what.startswith("deep clustering") else None

    grid = Wire(cut=6) if cut == "upload" else Wire()
    with pytest.raises(KeyboardInterrupt):
        execute(tmp_path / "run", RECORDS, grid, prepare)
    outcome = execute(tmp_path / "run", None)
    assert outcome["charges"] == 1
    assert outcome["epsilon"] <= 9
    assert outcome["notes"]["missing"] == []


# ---- set up ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"rounds": 2}, "kfed requires exactly one round, not 2: set rounds to 1"),
        ({"sampling-rate": 0.5}, "kfed requires the participation of all clients: set sampling-rate to 1"),
        ({"privacy-unit": "client"}, "kfed supports privacy-unit none, not 'client'"),
        ({"privacy-unit": "record", "samples-per-client": 6}, "kfed supports privacy-unit none, not 'record'"),
        ({"device-failures": 1}, "device-failures = 1"),
        ({"rebalance-min": 2}, "rebalance"),
        ({"clusters": 0}, "kfed does not determine the number of clusters"),
        ({"strategy": "ppfc-gan", "rounds": 3}, "ppfc-gan requires exactly one round, not 3"),
        ({"strategy": "ppfc-gan", "privacy-unit": "client"}, "ppfc-gan supports privacy-unit none or record"),
        ({"strategy": "ppfc-gan", "gan": "gan-mnist"}, "'gan-mnist' generates examples of shape"),
        ({"strategy": "ppfc-gan", "gan": "gan-minst"}, "did you mean 'gan-mnist'"),
        ({"strategy": "ppfc-gan", "pretrain-epochs": 0, "joint-epochs": 0}, "the autoencoder must be trained"),
        ({"strategy": "ppfc-gan", "synthetic-samples": 9_999_999, "dataset": "digits"}, "at most 1048576 samples of"),
        ({**RECORDS, "gan": "gan-pendigits"}, "gan-pendigits normalises over records, which DP-SGD does not support"),
    ],
)
def test_what_cannot_work_is_refused_before_it_starts(changes, complaint):
    with pytest.raises(ConfigError) as error:
        RunConfig({**SETTINGS, **changes})
    assert complaint in str(error.value)


def nothing(rounds=1, **numbers):
    return NoPrivacy(**{"clients": CLIENTS, "num_clusters": 1, "sampling_rate": 1.0, "rounds": rounds} | numbers)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"device_failures": 1.0}, "one-shot.device-failures = 1.0: must be a finite number at least 0"),
        ({"device_failures": -0.1}, "device-failures"),
        ({"device_failures": float("nan")}, "device-failures"),
        ({"example_shape": (3, 10_000, 3000)}, r"one record of shape \(3, 10000, 3000\) is larger than 256 MB"),
    ],
)
def test_constructors_refuse_too(options, complaint):
    with pytest.raises(ValueError, match=complaint):
        strategy_of(FFCM, nothing(), **{"example_shape": (4,), "clusters": 3, **options})


def test_limits_of_an_upload():
    def points(clusters, size=40):
        return strategy_of(FFCM, nothing(), example_shape=(size,), clusters=clusters).reply_spec().max_points

    assert (points(3), points(10_000), points(10_000, 2**20)) == (3, 10_000, 64)
    images = strategy_of(PPFCGAN, nothing(), example_shape=(3, 32, 32), clusters=10, synthetic_samples=100)
    assert images.reply_spec().max_points == 256 * 2**20 // (4 * 3072)
    assert (images.reply_spec().num_points, images.reply_spec().shape, images.gan) == (100, (3, 32, 32), "gan-cifar")


@pytest.mark.parametrize("method", ["kfed", "ffcm", "ppfc-gan"])
def test_defaults_are_the_paper_s(method):
    config = RunConfig({"strategy": method, "dataset": "kit.toys:blobs"})
    expected = {"clusters": 10, "rounds": 1, "clients": 10, "groups": "1", "shift": "none", "label-skew": "non-iid:0.5"}
    expected |= {"evaluate-every": 1, "privacy-unit": "none", "sampling-rate": 1.0, "reseed-every": 0}
    if method == "ppfc-gan":
        expected |= {"local-epochs": 200, "batch-size": 64}
    assert {key: config[key] for key in expected} == expected
    named = {"clusters": 4, "clients": 80, "groups": "4", "evaluate-every": 5}  # as the demo has them
    again = RunConfig({"strategy": method, "dataset": "kit.toys:blobs", **named})
    assert {key: again[key] for key in named} == named


def test_no_mechanism_of_client_level_gives_points_away():
    shape = {"clients": 10, "num_clusters": 1, "sampling_rate": 1.0, "rounds": 1}
    plan = Joint(**shape, clip_norm=1.0, epsilon=1.0, delta=1e-5, noise_multiplier=1.0)
    with pytest.raises(PrivacyError, match="not single updates"):
        plan.gathered(np.arange(10))


@pytest.mark.parametrize("spool", [2**28, 100])
def test_gathered_points_come_back_as_they_were(monkeypatch, spool):
    """In memory, and in files without a name once they are many."""
    monkeypatch.setattr("coterie.privacy.contributions._SPOOL", spool)
    plan = nothing()
    gathered = plan.gathered(np.array([7, 2, 5]))
    rng = np.random.default_rng(0)
    sent = {7: rng.random((3, 2, 2), np.float32), 5: rng.random((9, 2, 2), np.float32)}
    for slot, client in ((2, 5), (0, 7)):
        gathered.add(slot, 0, 0, sent[client])
    found = gathered.released(plan.ledger().uncharged_permit(1)).points
    assert list(found) == [5, 7]
    for client, points in sent.items():
        np.testing.assert_array_equal(found[client], points)
    assert [isinstance(points, np.memmap) for points in found.values()] == [spool == 100] * 2


# ---- merging ---------------------------------------------------------------------------------------------------------


def merged(sent, k=3, method=KFED, seed=0):
    strategy = method(nothing(), example_shape=(2,), clusters=k, streams=Streams(seed))
    return strategy.merge({client: np.array(points, float) for client, points in sent.items()})


def rows(values):
    return sorted(map(tuple, np.asarray(values).round(9).tolist()))


def test_k_fed_adds_the_farthest_until_there_are_k_and_averages_once():
    """Two clients of one centroid or two; by hand from either client."""
    sent = {0: [[0, 0], [1, 0]], 1: [[10, 0], [0, 4], [0, 5]]}
    # From client 0: M = (0,0), (1,0); farthest (10,0). tau: {(0,0), (0,4), (0,5)}, {(1,0)}, {(10,0)}.
    from_0 = [(0, 3), (1, 0), (10, 0)]
    # From client 1, k = 4: M = (10,0), (0,4), (0,5); farthest (0,0), at 4 from M; (1,0) is next to it.
    assert rows(merged({0: sent[0], 1: [[10, 0], [0, 4], [0, 5]]}, 3, seed=seed_of(sent, 0))) == from_0
    assert rows(merged(sent, 4, seed=seed_of(sent, 1))) == [(0, 4), (0, 5), (0.5, 0), (10, 0)]


def seed_of(sent, client):
    """A seed by which line 2 takes this client."""
    return next(s for s in range(50) if int(Streams(s).stream("clustering", 1).choice(list(sent))) == client)


@pytest.mark.parametrize("many", [3, 5])
def test_k_fed_starts_from_one_centroid_where_a_client_has_k_or_more(many):
    """Clients of one class each: all three seeds would lie in one class."""
    near = 0.1 * np.arange(many)[:, None] * np.ones(2)
    sent = {0: near, 1: near + np.array([20, 0]), 2: near + np.array([0, 30])}
    means = [corner + near.mean(axis=0) for corner in ([0, 0], [20, 0], [0, 30])]
    for seed in range(5):
        np.testing.assert_allclose(rows(merged(sent, seed=seed)), rows(means))


def test_any_client_and_any_of_its_centroids_can_be_the_first():
    rng = np.random.default_rng(0)
    for sent in ({3: rng.random((9, 2))}, {client: rng.random((2, 2)) for client in (3, 8, 9)}):
        assert len({str(rows(merged(sent, 3, seed=seed))) for seed in range(12)}) > 1


def test_an_empty_cluster_keeps_its_seed():
    """Seeds that fall together: the first of them takes every point, the others stay where they are."""
    assert rows(merged({0: [[1, 1], [1, 1]], 1: [[1, 1]]})) == [(1, 1)] * 3


def test_ffcm_is_k_means_of_all_centroids():
    rng = np.random.default_rng(0)
    sent = {client: toys.CORNERS[:, :2] * 5 + 0.1 * rng.standard_normal((3, 2)) for client in range(4)}
    sent[4] = sent[0][:1]
    found = merged(sent, method=FFCM)
    expected = k_means(np.concatenate(list(sent.values())), 3, Streams(0).stream("clustering", 1))
    np.testing.assert_allclose(found, expected)
    assert found.shape == (3, 2)


def test_what_clients_are_asked_for():
    own, asked = {"example_shape": (4,), "clusters": 3}, {"local_centroids": 3, "feature_range": 1.0}
    assert strategy_of(KFED, nothing(), **own).request() == CentroidsRequest(local="k-means", **asked)
    fuzzy = strategy_of(FFCM, nothing(), **own)
    assert fuzzy.request() == CentroidsRequest(local="fuzzy-c-means", fuzzifier=1.1, **asked)
    assert fuzzy.evaluation() == LabelRequest(labels=3, encoder="none", release_counts=True)
    gan = strategy_of(PPFCGAN, nothing(), **own, synthetic_samples=9, ema_decay=0.9, evaluate_every=0)
    assert gan.request() == GanRequest(gan="gan-pendigits-gn", labels=3, samples=9, average=0.9, feature_range=1.0)
    assert gan.evaluation() == LabelRequest(labels=3, encoder="sae", release_counts=False)


def test_a_gan_that_collapsed_is_named(tmp_path, caplog):
    def same(client, content):
        apart = np.array([[0], [{3: 0.001, 5: 0.05}.get(client, 0)]]) + np.full(4, 0.5)
        return instead(apart[: 1 + (client != 6)])(content) if client in (3, 5, 6, 7) else [content]

    outcome = execute(tmp_path / "run", GAN, Wire(same))
    assert (outcome["notes"]["collapsed"], outcome["notes"]["missing"]) == ([3, 7], [])
    assert "the GANs of clients 3, 7 collapsed: their samples hardly differ from each other" in caplog.text


def test_settings_reach_the_deep_clustering_network(tmp_path, monkeypatch):
    made, fit = [], dcn.DCN.fit
    monkeypatch.setattr(dcn.DCN, "fit", lambda self, *a, **k: (made.append(self), fit(self, *a, **k))[1])
    own = {"clusters": 4, "pretrain-epochs": 2, "joint-epochs": 1, "dcn-noise": 0.3, "precision": "bfloat16"}
    execute(tmp_path / "run", {**GAN, **own})
    (network,) = made
    found = (network.k, network.pretrain_epochs, network.joint_epochs, network.noise)
    assert (*found, network.precision, network.device) == (4, 2, 1, 0.3, "bfloat16", "cpu")
