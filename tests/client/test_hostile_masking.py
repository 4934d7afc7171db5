"""A hostile server in a masked round, against the ClientApp of a deployed client.

Every attack is one message at one step. It is refused before data are read and before anything is charged, and leaves
no trace in the client's state: afterwards the honest round goes on, and its sum is exact.
"""

import contextlib
import json
import math
import random
import shutil
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from flwr.app import ConfigRecord, RecordDict
from flwr.common.serde import recorddict_to_proto
from kit.hostile import changed as changed_message
from kit.masked_sites import CLUSTERS, CONFIGURED, LAYOUT, MODELS_SENT, STEPS, Hidden, Server, Sites, plan_of

from coterie.client import masked_rounds, masking_keys, round_state
from coterie.client.masking_keys import MaskingKeys, simulated_keys
from coterie.client.state import ClientError
from coterie.deploy.certificates import add_submitter, create
from coterie.privacy import ClientLedger, Event, Secure, epsilon
from coterie.privacy.discrete_gaussians import STEPS as GRID
from coterie.privacy.ledger_lines import event_of
from coterie.privacy.secure_aggregation import MaskingClient, NoiseLayers
from coterie.site.node import NodeConfig
from coterie.site.run_request import RunRequest
from coterie.site.signatures import read_private_key
from coterie.wire.masked import OpenRequest, box_content, opened_fields, read_opening
from coterie.wire.messages import CONFIG, MODELS, REPLY, Layout, pack_models

CLIENTS, VICTIM = 10, 4


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    return create(tmp_path_factory.mktemp("hostile") / "pki", CLIENTS + 1, ["superlink"]).folder


@pytest.fixture(scope="module")
def other_pki(tmp_path_factory):
    """Keys of an authority that the clients do not know."""
    return create(tmp_path_factory.mktemp("other") / "pki", CLIENTS, ["superlink"]).folder


@pytest.fixture(scope="module")
def pki_with_alice(pki, tmp_path_factory):
    folder = shutil.copytree(pki, tmp_path_factory.mktemp("alice") / "pki")
    add_submitter(folder, "alice")
    return folder


class Stage:
    """Ten sites, and the server's side up to a step that the victim has not answered."""

    def __init__(self, path, pki, step):
        self.sites = Sites(path, pki, CLIENTS)
        self.server = Server(self.sites, plan_of(CLIENTS))
        for run in self.server.steps[: STEPS.index(step)]:
            run()
        self.step = step

    def finish(self):
        """Go on honestly, and return the sum."""
        return self.server.run(self.step)


def shared(make):
    """What ``make`` returns for an argument, made once for all tests but that which ``ends`` it."""
    made = {}

    def get(argument, ends=False):
        if argument not in made:
            made[argument] = make(argument)
        return made.pop(argument) if ends else made[argument]

    return get


@pytest.fixture(scope="module")
def stages(pki, tmp_path_factory):
    return shared(lambda step: Stage(tmp_path_factory.mktemp("stage"), pki, step))


def calls_of(monkeypatch, name):
    """Cohorts for which a function of masked rounds is called."""
    calls = []

    def counted(cohort):
        calls.append(cohort)
        return original(cohort)

    original = getattr(masked_rounds, name)
    monkeypatch.setattr(masked_rounds, name, counted)
    return calls


@pytest.fixture
def trained(monkeypatch):
    """Trainings of clients."""
    return calls_of(monkeypatch, "train_without_dp")


def kept(sites):
    """What the victim keeps, but for its audit log, and what it has charged."""
    files = {path.name: path.read_bytes() for path in sites.state(VICTIM, "rounds").parent.iterdir() if path.is_file()}
    state = {name: content for name, content in files.items() if not name.endswith((".audit.jsonl", ".lock"))}
    return state, sites.charges(VICTIM)


def refuses(server, step, content, calls):
    """Return why the victim refuses a message, having checked that it computes, charges and keeps nothing."""
    before = kept(server.sites)
    calls.clear()
    text = server.sites.refusal(VICTIM, step, content)
    assert kept(server.sites) == before
    assert calls == []
    entry = server.sites.log(VICTIM)[-1]
    assert (entry["decision"], entry["type"]) == ("refused", step)
    return text


def refused(stage, content, trained, step=None):
    return refuses(stage.server, step or stage.step, content, trained)


# ---- step 1: the cohort, its keys, and the plan ----------------------------------------------------------------------


def terms(server, **changes):
    """The plan with changes; ``...`` leaves a term out."""
    changed = {**server.plan.terms(), **changes}
    return {"plan": json.dumps({name: value for name, value in changed.items() if value is not ...})}


def keys_of(keys, cohort):
    """The fields of a request with a cohort."""
    return {"cohort": tuple(cohort), **OpenRequest.key_lists([keys[client] for client in cohort])}


def only(server, cohort):
    return keys_of(server.keys, cohort)


def with_key(server, client, key):
    """The cohort, with another key of one client."""
    return keys_of({**server.keys, client: key}, server.cohort)


def stranger(client, other_pki, tmp_path):
    """A key of a client, signed by a node that the roster does not have."""
    node = NodeConfig(
        client_id=client,
        state_dir=str(tmp_path / "stranger"),
        roster=str(other_pki / "roster.json"),
        key=str(other_pki / "nodes" / f"node-{client}.key"),
    )
    return MaskingKeys.of(node).signed


OTHER = X25519PrivateKey.generate().public_key().public_bytes_raw()


def sybils(server, other_pki, tmp_path):
    """One real client and others that the server simulates."""
    keys = {client: stranger(client, other_pki, tmp_path) for client in server.cohort if client != VICTIM}
    return keys_of({**server.keys, **keys}, server.cohort)


def changed_key(server, client, **changes):
    return with_key(server, client, replace(server.keys[client], **changes))


KEY_ATTACKS = {
    "nine clients that the server simulates": sybils,
    "a man in the middle of one client": lambda s, *paths: with_key(s, 7, stranger(7, *paths)),
    "a signing key that its node has not signed": lambda s, *_: changed_key(s, 7, signing=OTHER),
    "a key of another length": lambda s, *_: changed_key(s, 7, signing=s.keys[7].signing + b"x"),
    "the keys of another client": lambda s, *_: with_key(s, 7, s.keys[8]),
    "the keys of another client, as if of its node": lambda s, *_: changed_key(s, 7, signing=s.keys[8].signing),
    "the keys of another client and its signature": lambda s, *_: with_key(
        s, 7, replace(s.keys[8], node=s.keys[7].node)
    ),
    "keys that a corrupt client has signed for another one": lambda s, *_: with_key(s, 7, corrupt_keys(s)),
    "no signature": lambda s, *_: changed_key(s, 7, signature=b""),
    "no node": lambda s, *_: changed_key(s, 7, node=b""),
    "a node that is no key": lambda s, *_: changed_key(s, 7, node=b"\x30" * 120),
    "other keys of the victim": lambda s, *_: changed_key(s, VICTIM, signing=OTHER),
    "earlier keys of the victim": lambda s, pki, path: with_key(s, VICTIM, earlier_keys(s, path)),
    "a simulated client's keys": lambda s, *_: with_key(s, 7, simulated_keys([7])[7].signed),
}


def corrupt_keys(server):
    """Keys of the server as those of client 7, signed by the node of client 8, which works with it."""
    node = {**server.sites.nodes[8], "client-id": 7}
    key, signature = masking_keys._sign(NodeConfig.from_record(node), OTHER)
    return replace(server.keys[8], node=key, signing=OTHER, signature=signature)


def earlier_keys(server, tmp_path):
    """Keys that the victim's node has signed in another state folder."""
    node = {**server.sites.nodes[VICTIM], "state-dir": str(tmp_path / "earlier")}
    return MaskingKeys.of(NodeConfig.from_record(node)).signed


OPEN_ATTACKS = {
    "half of the cohort": (lambda s: only(s, s.cohort[:5]), "smaller than min-cohort = 6"),
    "the victim alone": (lambda s: only(s, [VICTIM]), "smaller than min-cohort = 6"),
    "a cohort without the victim": (lambda s: only(s, [c for c in s.cohort if c != VICTIM]), "lacks this client"),
    "a plan for five clients, in a cohort of five": (
        lambda s: {**only(s, s.cohort[:5]), **terms(s, clients=5)},
        "smaller than min-cohort = 6",
    ),
    "a plan for three clients": (lambda s: {**only(s, (2, 3, 4)), **terms(s, clients=3)}, ""),
    "slots in which the victim is not": (lambda s: {**terms(s, sampling_rate=0.5)}, "not of the clients of round 1"),
    "round 4 of 3": (lambda s: {"round": 4}, "none of the plan's 3"),
    "no JSON": (lambda s: {"plan": "]"}, "malformed"),
    "deep JSON": (lambda s: {"plan": "[" * 10_000}, "malformed"),
    "a list": (lambda s: {"plan": "[]"}, "malformed"),
    "a wide model": (lambda s: {"parameters": 2**22}, ""),
}
#: Values of terms of a plan, which JSON writes as they are.
PLAN_ATTACKS = [
    ("dropout", (0.5, -1.0), "dropout"),
    ("corrupt", (5, -5), "corrupt"),
    ("corrupt", (0,), "corrupt = 0 clients is less than min-corrupt = 1 demands"),
    ("noise_multiplier", (0.0, 1e-4, -1.0, math.nan, None), ""),
    ("noise_multiplier", ("1",), "malformed"),
    ("noise_multiplier", (...,), "terms are not those"),
    ("epsilon", (0.0, None, math.nan), "epsilon"),
    ("delta", (1.0,), "delta"),
    ("mechanism", ("joint", "nothing", ["secure"]), "terms are not those"),
    ("secret", (1,), "terms are not those"),
    ("clients", (10**9,), ""),
    ("sampling_rate", (5e-324,), ""),
    ("num_clusters", (10**6,), ""),
    ("clip_norm", (math.nan,), ""),
    ("identifier_share", (1.5,), ""),
]
OPEN_ATTACKS |= {
    f"{term} {value!r}": (lambda s, change={term: value}: terms(s, **change), reason)
    for term, values, reason in PLAN_ATTACKS
    for value in values
}


@pytest.mark.parametrize("name", KEY_ATTACKS)
def test_keys_that_the_roster_does_not_have_are_refused(stages, trained, other_pki, tmp_path, name):
    stage = stages("train.open")
    content = stage.server.open_content(**KEY_ATTACKS[name](stage.server, other_pki, tmp_path))
    reason = "other keys of this client" if "earlier" in name else "does not vouch for the keys of client"
    assert reason in refused(stage, content, trained)


NOT_SIGNED = "client {} has not signed its box key"
BOX_ATTACKS = {
    "a box key of the server": (lambda s: changed_key(s, 7, box=OTHER), NOT_SIGNED.format(7)),
    "no signature": (lambda s: changed_key(s, 7, box_signature=b""), NOT_SIGNED.format(7)),
    "the box key of another client": (lambda s: with_key(s, 7, box_of(s, 8)), NOT_SIGNED.format(7)),
    "a box key of the server for the victim": (lambda s: changed_key(s, VICTIM, box=OTHER), NOT_SIGNED.format(VICTIM)),
    "a box key that the victim has never had": (lambda s: with_key(s, VICTIM, unknown_box(s)), "box key is used"),
}


def box_of(server, client):
    """The keys of client 7 with the box key of another client."""
    return replace(server.keys[7], box=server.keys[client].box, box_signature=server.keys[client].box_signature)


def unknown_box(server):
    """The victim's keys with a box key that it signs and whose private key it does not have."""
    keys = MaskingKeys.of(NodeConfig.from_record(server.sites.nodes[VICTIM]))
    return replace(keys.signed, box=OTHER, box_signature=keys.sign(box_content(VICTIM, OTHER)))


@pytest.mark.parametrize("name", BOX_ATTACKS)
def test_box_keys_that_are_not_those_of_the_round_are_refused(stages, trained, name):
    change, reason = BOX_ATTACKS[name]
    stage = stages("train.open")
    assert reason in refused(stage, stage.server.open_content(**change(stage.server)), trained)


@pytest.mark.parametrize("name", OPEN_ATTACKS)
def test_cohorts_and_plans_that_are_too_weak_are_refused(stages, trained, name):
    change, reason = OPEN_ATTACKS[name]
    stage = stages("train.open")
    assert reason in refused(stage, stage.server.open_content(**change(stage.server)), trained)


@pytest.mark.parametrize("step", STEPS[1:])
def test_no_step_comes_before_the_first(stages, trained, step):
    stage = stages("train.open")
    server = stage.server
    content = {
        "train.masked": server.train_content(VICTIM),
        "train.survivors": server.survivors_content(server.cohort),
        "train.unmask": server.unmask_content(dict.fromkeys(server.cohort, b"signature")),
    }[step]
    assert "not the next one" in refused(stage, content, trained, step)


@pytest.mark.parametrize(
    "content",
    [
        RecordDict(),
        RecordDict({CONFIG: ConfigRecord({"round": 1})}),
        RecordDict({MODELS: ConfigRecord({"run": "run"})}),
        RecordDict({CONFIG: ConfigRecord({"run": 5, "round": 1, "attempt": 0})}),
    ],
)
@pytest.mark.parametrize("step", STEPS)
def test_messages_without_their_fields_are_refused(stages, trained, step, content):
    refused(stages("train.open"), content, trained, step)


@pytest.mark.parametrize("step", STEPS)
def test_whatever_the_server_sends_a_client_gives_one_answer_to_a_step_and_pays_once(pki, tmp_path, caplog, step):
    """Sixty messages of the corpus, and the honest one: each is refused without a trace, or has the same answer."""
    stage = Stage(tmp_path, pki, step)
    answers, refusals = set(), 0
    for number in range(61):
        content = stage.server.content(step, VICTIM)
        if number != 30:
            content = changed_message(random.Random(f"{step} {number}"), content)
        before, refused = kept(stage.sites), None
        try:
            reply = stage.sites.ask(VICTIM, step, content)
            answers.add(recorddict_to_proto(reply).SerializeToString(deterministic=True))
        except ClientError as error:
            refused = error
        if refused:
            refusals += 1
            assert refused.__cause__ is None
            assert len(str(refused)) < 1000
            assert kept(stage.sites) == before
    assert len(answers) == 1
    assert 20 < refusals < 61
    assert len(stage.sites.charges(VICTIM)) == (step != "train.open")
    assert "\x1b" not in caplog.text


# ---- step 2: openings, models, and what the client pays --------------------------------------------------------------


def as_of(server, client, opening):
    """The openings, with another one of a client."""
    return opened_fields({**server.openings, client: opening}, VICTIM)


def changed(server, client, **changes):
    return as_of(server, client, replace(server.openings[client], **changes))


def some(server, clients):
    return opened_fields({client: server.openings[client] for client in clients}, VICTIM)


def other_opening(stage):
    """An opening of client 7 for another round."""
    keys = MaskingKeys.of(NodeConfig.from_record(stage.sites.nodes[7]))
    boxes = {client: key.box for client, key in stage.server.keys.items()}
    round, box = replace(stage.server.round, attempt=9), X25519PrivateKey.generate()
    boxes[7] = box.public_key().public_bytes_raw()
    return MaskingClient(round, 7, boxes, keys.sign, lambda *_: True).open(box)


NO_SIGNATURE, NOT_OPENED = "client 7 is not signed", "cannot be opened"
OPENING_ATTACKS = {
    "a public key of the server": (lambda s, _: changed(s, 7, public=OTHER), NO_SIGNATURE),
    "another commitment": (lambda s, _: changed(s, 7, commitment=bytes(32)), NO_SIGNATURE),
    "no signature": (lambda s, _: changed(s, 7, signature=b""), NO_SIGNATURE),
    "the opening of another client": (lambda s, _: as_of(s, 7, s.openings[8]), NO_SIGNATURE),
    "an opening of another attempt": (lambda s, stage: as_of(s, 7, other_opening(stage)), NO_SIGNATURE),
    "another opening of the victim": (lambda s, _: changed(s, VICTIM, public=OTHER), "of this client is missing"),
    "openings without the victim's": (lambda s, _: some(s, {*s.cohort} - {VICTIM}), "of this client is missing"),
    "too few openings": (lambda s, _: some(s, s.cohort[:6]), "at least 7 clients"),
    "the victim's alone": (lambda s, _: some(s, [VICTIM]), "at least 7 clients"),
    "a stranger's opening": (lambda s, _: as_of(s, 10, s.openings[7]), "increasing, known"),
    "no box": (lambda s, _: changed(s, 7, boxes={}), NOT_OPENED),
    "a box for another client": (lambda s, _: changed(s, 7, boxes={VICTIM: s.openings[7].boxes[8]}), NOT_OPENED),
    "a changed box": (lambda s, _: changed(s, 7, boxes={VICTIM: s.openings[7].boxes[VICTIM][:-1] + b"x"}), NOT_OPENED),
    "another round": (lambda s, _: {"round": 2}, "not the next one"),
    "another attempt": (lambda s, _: {"attempt": 1}, "not the next one"),
    "another run": (lambda s, _: {"run": "another"}, "not the next one"),
    "a cluster that the plan does not have": (lambda s, _: {"cluster": CLUSTERS}, "clusters"),
    "a cluster with all models": (lambda s, _: {"cluster": 0}, "clusters"),
    "a redraw matrix of another size": (lambda s, _: {"redraw": (1.0,)}, "redraw has 1"),
}


@pytest.mark.parametrize("name", OPENING_ATTACKS)
def test_openings_that_are_not_those_of_the_round_are_refused(stages, trained, name):
    change, reason = OPENING_ATTACKS[name]
    stage = stages("train.masked")
    assert reason in refused(stage, stage.server.train_content(VICTIM, **change(stage.server, stage)), trained)


MODEL_ATTACKS = {
    "a model of NaN": {"models": np.full_like(MODELS_SENT, np.nan)},
    "more models than clusters": {"models": np.zeros((CLUSTERS + 1, LAYOUT.size), np.float32)},
    "plans at record level": {"config": {"record-plans": "[]"}},
    "code of the server": {"config": {"dataset": "os:system"}},
    "another shape": {"config": {"input-shape": "1x5x5"}},
    "more classes": {"config": {"num-classes": 10}},
}


@pytest.mark.parametrize("name", MODEL_ATTACKS)
def test_models_and_configurations_that_are_refused(stages, trained, name):
    stage = stages("train.masked")
    refused(stage, stage.server.train_content(VICTIM, **MODEL_ATTACKS[name]), trained)


def without_biases(server):
    """A request of step 2 with models of fewer parameters than in step 1."""
    models = pack_models(np.zeros((CLUSTERS, 32), np.float32), Layout(("output.weight",), ((2, 16),)))
    return RecordDict({**server.train_content(VICTIM), MODELS: models})


def test_a_model_of_another_size_than_in_step_1_is_refused(stages, trained):
    stage = stages("train.masked")
    assert "32 parameters, not 34" in refused(stage, without_biases(stage.server), trained)


def test_a_round_that_is_open_is_not_opened_again(stages, trained):
    stage = stages("train.masked")
    server = stage.server
    again = server.open_content()
    again.config_records[CONFIG]["lr"] = 0.5
    assert "another message for step 1" in refused(stage, again, trained, "train.open")


# ---- steps 3 and 4: survivors ----------------------------------------------------------------------------------------

SURVIVORS = {
    "without the victim": [client for client in range(CLIENTS) if client != VICTIM],
    "too few": [0, 1, 2, 3, 4, 5],
    "the victim alone": [VICTIM],
    "nobody": [],
    "a stranger": [*range(CLIENTS), CLIENTS],
}


@pytest.mark.parametrize("name", SURVIVORS)
def test_lists_of_survivors_that_are_not_signed(stages, trained, name):
    stage = stages("train.survivors")
    refused(stage, stage.server.survivors_content(SURVIVORS[name]), trained)


VIEWS = {
    "none": lambda views: {},
    "one too few": lambda views: {client: view for client, view in views.items() if client != 7},
    "the view of another client": lambda views: {**views, 7: views[8]},
    "an empty one": lambda views: {**views, 7: b""},
}


@pytest.mark.parametrize("name", VIEWS)
def test_survivors_with_another_view_are_not_signed(stages, trained, name):
    stage = stages("train.survivors")
    server = stage.server
    views = VIEWS[name](server.views)
    listed = tuple(views.get(client, b"") for client in sorted(server.vectors))
    content = server.survivors_content(view_signatures=listed)
    assert "has not signed the view" in refused(stage, content, trained)


@pytest.mark.parametrize("hidden", ["an opening", "the models"])
def test_a_client_that_is_shown_something_else_is_no_survivor_of_others(pki, tmp_path, trained, hidden):
    """Its vector stays masked: no other client signs a list with it, and it signs none with them."""
    sites = Sites(tmp_path, pki, 6)
    server, openings = Server(sites, plan_of(6)), 5
    server.open()
    server.train(range(1, 6))
    shown = opened_fields({client: server.openings[client] for client in range(openings)}, 0)
    shown = shown if hidden == "an opening" else {}
    models = MODELS_SENT + 1 if hidden == "the models" else MODELS_SENT
    reply = sites.ask(0, "train.masked", server.train_content(0, models, **shown))
    server.vectors[0], server.views[0] = None, reply.config_records[REPLY]["view-signature"]
    assert "client 0 has not signed the view" in sites.refusal(1, "train.survivors", server.survivors_content())
    assert "client 1 has not signed the view" in sites.refusal(
        0, "train.survivors", server.survivors_content(range(openings))
    )
    del server.vectors[0]
    server.run("train.survivors")


def test_vectors_are_not_masked_twice(stages, trained):
    """Chosen models would give a second vector under the same masks."""
    stage = stages("train.survivors")
    content = stage.server.train_content(VICTIM, models=MODELS_SENT + 1)
    assert "another message for step 2" in refused(stage, content, trained, "train.masked")


def test_a_second_list_of_survivors_is_not_signed(stages, trained):
    stage = stages("train.unmask")
    content = stage.server.survivors_content([client for client in range(CLIENTS) if client != 9])
    assert "another message for step 3" in refused(stage, content, trained, "train.survivors")


def forged(server, kept):
    """Signatures of which the first ones are genuine."""
    return {client: server.signatures[client] if client < kept else server.signatures[0] for client in range(CLIENTS)}


SIGNATURES = {
    "none": lambda s: {},
    "too few": lambda s: {client: s.signatures[client] for client in range(6)},
    "six and four forged": lambda s: forged(s, 6),
    "of the victim alone": lambda s: {VICTIM: s.signatures[VICTIM]},
    "empty ones": lambda s: dict.fromkeys(range(CLIENTS), b""),
    "of openings": lambda s: {client: s.openings[client].signature for client in range(CLIENTS)},
    "of strangers": lambda s: {client + CLIENTS: s.signatures[client] for client in range(CLIENTS)},
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_shares_do_not_leave_without_signatures(stages, trained, name):
    stage = stages("train.unmask")
    assert "of 7 required clients signed" in refused(
        stage, stage.server.unmask_content(SIGNATURES[name](stage.server)), trained
    )


@pytest.mark.parametrize("step", STEPS)
def test_the_honest_round_goes_on_after_all_attacks(stages, monkeypatch, step):
    hidden, stage = Hidden.of_all(monkeypatch), stages(step, ends=True)
    total = stage.finish()
    assert len(stage.sites.charges(VICTIM)) == 1
    if step in STEPS[:2]:
        np.testing.assert_array_equal(total, hidden.total())


# ---- evaluations -----------------------------------------------------------------------------------------------------

SCORES = {"evaluations": 2, "evaluation_noise": 0.25, "histograms": 1, "histogram_noise": 20.0}
PLAN_OF_SCORES = plan_of(CLIENTS, **SCORES)


@pytest.fixture
def evaluated(monkeypatch):
    """Evaluations of clients."""
    return calls_of(monkeypatch, "reports")


@pytest.fixture(scope="module")
def evaluations(pki, tmp_path_factory):
    """Ten sites before an evaluation, or those of which all but the victim have sent their accuracies."""

    def evaluation(opened):
        sites = Sites(tmp_path_factory.mktemp("scoring"), pki, CLIENTS)
        server = Server(sites, PLAN_OF_SCORES, 1, 1, release="accuracy")
        if opened:
            server.open()
            server.train([client for client in range(CLIENTS) if client != VICTIM])
        return server

    return shared(evaluation)


@pytest.fixture
def scoring(evaluations):
    return evaluations(False)


@pytest.fixture
def asked(evaluations):
    return evaluations(True)


OF_EVALUATIONS = {
    "no evaluation in the plan": (lambda s: terms(s, evaluations=0), "no private evaluations"),
    "no noise": (lambda s: terms(s, evaluation_noise=0.0), "the plan is refused"),
    "less noise than a grid has": (lambda s: terms(s, evaluation_noise=1e-5), "32 steps"),
    "noise that is no number": (lambda s: terms(s, evaluation_noise="0.05"), "malformed"),
    "too many corrupt clients": (lambda s: terms(s, corrupt=7), "must stay"),
    "too few must stay": (lambda s: terms(s, dropout=0.5), "dropout must be"),
    "a round that the plan does not have": (lambda s: {"round": 4}, "none of the plan's 3"),
    "the victim and nine who are not there": (lambda s: only(s, [VICTIM]), "min-cohort"),
    "a cohort without the victim": (lambda s: only(s, [c for c in range(CLIENTS) if c != VICTIM]), "lacks this client"),
    "another release": (lambda s: {"release": "loss"}, "release"),
}


@pytest.mark.parametrize("name", OF_EVALUATIONS)
def test_evaluations_that_do_not_protect_a_client_are_not_opened(scoring, evaluated, name):
    change, reason = OF_EVALUATIONS[name]
    scoring.sites.key(VICTIM)
    content = scoring.open_content()
    changed = change(scoring)
    record = {**content.config_records[CONFIG], **{key.replace("_", "-"): value for key, value in changed.items()}}
    record = {key: list(value) if isinstance(value, tuple) else value for key, value in record.items()}
    assert reason in refuses(scoring, "train.open", RecordDict({CONFIG: ConfigRecord(record)}), evaluated)


OF_SCORES = {
    "a request to train": ({}, "train.masked", "opened for accuracy, not for training"),
    "a histogram instead": ({"histogram": True}, "evaluate.masked", "opened for accuracy, not for histogram"),
    "an evaluation that is not private": ({"private": False}, "evaluate.masked", "a private one"),
    "another attempt": ({"attempt": 2}, "evaluate.masked", "not the next one"),
    "another round": ({"round": 2}, "evaluate.masked", "not the next one"),
    "a cluster that the plan does not have": ({"cluster": CLUSTERS}, "evaluate.masked", "clusters"),
    "openings of too few": ("few", "evaluate.masked", "at least 7 clients"),
    "plans at record level": ({"record-plans": "[]"}, "evaluate.masked", "record-level"),
}


@pytest.mark.parametrize("name", OF_SCORES)
def test_requests_for_scores_that_are_not_those_of_the_round_are_refused(asked, evaluated, trained, name):
    change, message_type, reason = OF_SCORES[name]
    if message_type == "train.masked":
        content = replace(asked, release="training").train_content(VICTIM)
    elif change == "few":
        content = asked.train_content(VICTIM, **some(asked, asked.cohort[:6]))
    else:
        content = asked.train_content(VICTIM, config=change)
    assert reason in refuses(asked, message_type, content, evaluated)
    assert trained == []


def test_scores_of_models_of_another_size_are_refused(asked, evaluated):
    assert "32 parameters, not 34" in refuses(asked, "evaluate.masked", without_biases(asked), evaluated)
    more = asked.train_content(VICTIM, models=np.zeros((CLUSTERS + 1, LAYOUT.size), np.float32))
    assert "clusters" in refuses(asked, "evaluate.masked", more, evaluated)


def test_a_round_that_trains_gives_no_scores(pki, tmp_path, evaluated, trained):
    """Nor does an attempt of a round have two releases."""
    stage = Stage(tmp_path, pki, "train.masked")
    content = replace(stage.server, release="accuracy").train_content(VICTIM)
    assert "opened for training, not for accuracy" in refused(stage, content, trained, "evaluate.masked")
    opened = Server(stage.sites, PLAN_OF_SCORES, release="accuracy").open_content()
    assert "another message for step 1" in refused(stage, opened, trained, "train.open")
    assert evaluated == []


def test_the_honest_evaluation_goes_on_after_all_attacks_and_is_answered_once(evaluations, evaluated):
    asked = evaluations(True, ends=True)
    evaluated.clear()
    sites, content = asked.sites, asked.train_content(VICTIM)
    asked.train([VICTIM])
    assert len(evaluated) == 1
    first = sites.ask(VICTIM, "evaluate.masked", content)
    assert first["update"]["masked"].numpy().tobytes() == asked.vectors[VICTIM].tobytes()
    assert len(evaluated) == 1
    other = asked.train_content(VICTIM, models=MODELS_SENT + 1)
    assert "another message for step 2" in refuses(asked, "evaluate.masked", other, evaluated)
    asked.sign()
    fewer = asked.survivors_content([client for client in range(CLIENTS) if client != 9])
    assert "another message for step 3" in refuses(asked, "train.survivors", fewer, evaluated)
    assert "of 7 required clients signed" in refuses(asked, "train.unmask", asked.unmask_content({}), evaluated)
    asked.unmask()
    assert asked.total().shape == (1,)
    assert len(sites.charges(VICTIM)) == 1
    trains = Server(sites, asked.plan, 1, 1).open_content()
    assert "another message for step 1" in refuses(asked, "train.open", trains, evaluated)
    again = Server(sites, asked.plan, 1, 0, release="accuracy").open_content()
    assert "was opened before" in refuses(asked, "train.open", again, evaluated)


def test_an_evaluation_is_asked_as_often_as_the_plan_says(pki, tmp_path, evaluated):
    sites, plan = Sites(tmp_path, pki, 6), plan_of(6, **SCORES)
    for attempt, release in enumerate(("accuracy", "accuracy", "histogram")):
        server = Server(sites, plan, 1, attempt, release=release)
        server.open()
        server.train()
    for attempt, (release, reason) in enumerate(
        [("accuracy", "has 2 private evaluations"), ("histogram", "has 1 histograms of scores")], start=3
    ):
        server = Server(sites, plan, 1, attempt, release=release)
        server.open()
        content = server.train_content(VICTIM)
        assert reason in sites.refusal(VICTIM, "evaluate.masked", content)
    assert [charge["for"] for charge in sites.charges(VICTIM)] == ["accuracy", "accuracy", "histogram"]
    assert len(evaluated) == 18
    server = Server(sites, plan, 1, 5)
    server.open()
    server.train([VICTIM])  # what training costs is left


@pytest.mark.parametrize("changes", [{"evaluation_noise": 0.02}, {"evaluations": 40}])
def test_an_evaluation_that_the_plan_s_epsilon_does_not_cover_is_not_paid(pki, tmp_path, evaluated, changes):
    sites = Sites(tmp_path, pki, 6)
    server = Server(sites, replace(plan_of(6, **SCORES), **changes), 1, 0, release="accuracy")
    server.open()
    paid, reason = 0, ""
    for attempt in range(1, 42):
        try:
            sites.ask(VICTIM, "evaluate.masked", server.train_content(VICTIM))
        except ClientError as error:
            reason = str(error)
            break
        paid += 1
        server = Server(sites, server.plan, 1, attempt, keys=server.next_keys, release="accuracy")
        server.open()
    assert "exceeds the client's budget" in reason
    assert paid == len(sites.charges(VICTIM)) < 40
    spent = Counter(event_of(charge) for charge in sites.charges(VICTIM))
    assert not spent or epsilon(spent, 1e-4) <= 8


def test_another_noise_in_a_second_evaluation_is_not_paid(pki, tmp_path, evaluated):
    """The ledger has pinned the events of the plan of the first one."""
    sites, plan = Sites(tmp_path, pki, 6), plan_of(6, **SCORES)
    first = Server(sites, plan, 1, 0, release="accuracy")
    first.open()
    first.train()
    second = Server(sites, replace(plan, evaluation_noise=0.02), 1, 1, release="accuracy")
    second.open()
    content = second.train_content(VICTIM)
    assert "exceeds the client's budget" in sites.refusal(VICTIM, "evaluate.masked", content)
    assert len(sites.charges(VICTIM)) == 1


def test_the_owner_s_policy_allows_masked_updates_and_scores(pki, tmp_path, evaluated):
    sites, plan = Sites(tmp_path, pki, 6), plan_of(6, **SCORES)
    for client, releases in ((0, '"masked updates", "scores", "histograms"'), (1, '"masked scores"')):
        (tmp_path / f"{client}.toml").write_text(f"releases = [{releases}]")
        sites.nodes[client]["policy"] = str(tmp_path / f"{client}.toml")
    for attempt, release in enumerate(("accuracy", "histogram")):
        server = Server(sites, plan, 1, attempt, release=release)
        assert "release of masked scores is not allowed" in sites.refusal(0, "train.open", server.open_content())
        server.open([1, 2, 3, 4, 5])
        server.train()
    train = Server(sites, plan, 1, 2)
    assert "release of masked updates is not allowed" in sites.refusal(1, "train.open", train.open_content())
    counted = [cohort for cohort in evaluated if cohort.clients[0].client_id == 1]
    assert len(counted) == 2
    policy = sites.nodes[1].pop("policy")
    train.open()
    sites.nodes[1]["policy"] = policy
    train.train([0])
    assert "release of masked updates is not allowed" in sites.refusal(1, "train.masked", train.train_content(1))
    assert (len(sites.charges(0)), len(sites.charges(1))) == (1, 2)


# ---- what a client pays, and what its owner allows -------------------------------------------------------------------


def test_the_same_round_again_is_a_contribution_and_the_plan_has_three(pki, tmp_path, trained):
    sites, plan = Sites(tmp_path, pki, 6), plan_of(6)
    for attempt in range(4):
        server = Server(sites, plan, 1, attempt=attempt)
        server.open()
        if attempt < 3:
            server.train()
    assert "3 contributions of a client" in sites.refusal(2, "train.masked", server.train_content(2))
    assert len(sites.charges(2)) == 3
    assert len(trained) == 18
    assert "was opened before" in sites.refusal(2, "train.open", Server(sites, plan, 1, attempt=1).open_content())


def test_a_round_that_the_client_has_forgotten_is_charged_again(pki, tmp_path, trained, monkeypatch):
    """A charge counts for one opening, whatever a server calls the round."""
    monkeypatch.setattr(round_state, "_MOST_RUNS", 1)
    sites = Sites(tmp_path, pki, 6)
    for charges in (1, 2):
        server = Server(sites, plan_of(6))
        server.open()
        server.train([0])
        assert len(sites.charges(0)) == charges
        server.keys = server.next_keys
        for run in ("one", "another"):
            for client in server.cohort:
                sites.ask(client, "train.open", server.open_content(run=run))


@pytest.mark.parametrize(("epsilon", "rounds"), [(2.0, 0), (5.0, 1), (20.0, 3)])
def test_the_budget_of_a_client_is_not_exceeded(pki, tmp_path, trained, epsilon, rounds):
    sites, plan = Sites(tmp_path, pki, 6, epsilon=epsilon, delta=1e-4), plan_of(6)
    for number in (1, 2, 3):
        server = Server(sites, plan, number)
        server.open()
        if number <= rounds:
            server.train([0])
        else:
            assert "exceeds the client's budget" in sites.refusal(0, "train.masked", server.train_content(0))
    assert len(sites.charges(0)) == len(trained) == rounds


def test_a_plan_with_less_noise_than_its_epsilon_is_not_paid(pki, tmp_path, trained):
    sites = Sites(tmp_path, pki, 6)
    server = Server(sites, replace(plan_of(6), noise_multiplier=0.5))
    server.open()
    assert "exceeds the client's budget" in sites.refusal(0, "train.masked", server.train_content(0))
    assert (sites.charges(0), trained) == ([], [])


def test_another_plan_in_a_later_round_is_not_paid(pki, tmp_path, trained):
    sites, plan = Sites(tmp_path, pki, 6), plan_of(6)
    first = Server(sites, plan)
    first.open()
    first.train([0])
    second = Server(sites, plan_of(6, epsilon=30.0), 2)
    second.open()
    assert "cannot charge its budget" in sites.refusal(0, "train.masked", second.train_content(0))
    weaker = Server(sites, replace(plan, noise_multiplier=plan.noise_multiplier / 2), 3)
    weaker.open()
    assert "exceeds the client's budget" in sites.refusal(0, "train.masked", weaker.train_content(0))
    assert len(sites.charges(0)) == 1


def test_min_cohort_is_ten_unless_the_owner_states_another(pki, tmp_path, trained):
    sites = Sites(tmp_path, pki, 9)
    for node in sites.nodes.values():
        del node["min-cohort"]
    server = Server(sites, plan_of(9))
    assert "9 clients is smaller than min-cohort = 10" in sites.refusal(0, "train.open", server.open_content())
    sites.nodes[0]["min-cohort"] = 9
    sites.ask(0, "train.open", server.open_content())


def test_the_owner_states_how_many_clients_may_be_corrupt(pki, tmp_path, trained):
    sites = Sites(tmp_path, pki, 10)
    weak, strong = (Server(sites, plan_of(10, corrupt=corrupt)) for corrupt in (0, 3))
    assert "min-corrupt = 1" in sites.refusal(0, "train.open", weak.open_content())
    del sites.nodes[0]["min-corrupt"]
    sites.ask(0, "train.open", weak.open_content())
    for least in (3, 4):
        sites.nodes[least]["min-corrupt"] = least
    sites.ask(3, "train.open", strong.open_content())
    assert "corrupt = 3 clients is less than min-corrupt = 4 demands" in sites.refusal(
        4, "train.open", strong.open_content()
    )


APP = "ab" * 32


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"releases": ("updates",)}, "release of masked updates"),
        ({"epsilon": 4.0}, "for epsilon 4, not 8"),
        ({"rounds": 2}, "for 2 rounds, not 3"),
        ({"strategy": "fedavg"}, "for strategy fedavg"),
        ({"app": "cd" * 32}, "for the app"),
    ],
)
def test_a_submitter_signs_the_terms_of_masked_rounds(
    pki, pki_with_alice, tmp_path, monkeypatch, trained, changes, reason
):
    monkeypatch.setenv("COTERIE_APP_HASH", APP)
    sites = Sites(tmp_path / "sites", pki_with_alice, 6)
    (tmp_path / "policy.toml").write_text('submitters = ["alice"]')
    server = Server(sites, plan_of(6))
    sites.nodes[0]["policy"] = str(tmp_path / "policy.toml")
    terms = {"app": APP, "strategy": "ifca", "privacy_unit": "client", "epsilon": 8.0, "delta": 1e-3, "rounds": 3}
    key = read_private_key(pki_with_alice / "submitters" / "alice.key")
    text = RunRequest.signed(key, {**terms, "releases": ("masked updates",), **changes}, days=1)
    content = server.open_content()
    assert "has no signed request" in sites.refusal(0, "train.open", content)
    content.config_records[CONFIG]["run-request"] = text
    if reason:
        assert reason in sites.refusal(0, "train.open", content)
        return
    server.open([1, 2, 3, 4, 5])
    reply = sites.ask(0, "train.open", content)
    server.openings[0], _ = read_opening(reply, client_id=0, round=server.round, key=server.keys[0])
    assert "has no signed request" in sites.refusal(0, "train.masked", server.train_content(0))
    sites.ask(0, "train.masked", server.train_content(0, config={"run-request": text}))
    assert sites.charges(0)[0]["submitter"] == "alice"


def test_records_and_clients_are_not_added_up_in_one_budget(pki, tmp_path, trained):
    sites = Sites(tmp_path, pki, 6, epsilon=20.0, delta=1e-4)
    path = sites.path / "site-0" / "data" / ".coterie-budget.jsonl"
    with contextlib.closing(ClientLedger(1e-4, 20.0, path)) as ledger:
        ledger.spend(1, {Event(0.5, 2.0): 1})
    server = Server(sites, plan_of(6))
    server.open()
    assert "cannot charge its budget" in sites.refusal(0, "train.masked", server.train_content(0))
    assert (len(sites.charges(0)), trained) == (1, [])


@pytest.mark.parametrize("of", [(9, 9, 2), (9, 6, 0), (9, 7, 1)], ids=["one layer", "none corrupt", "one corrupt"])
def test_layers_with_too_little_noise_are_refused(pki, tmp_path, monkeypatch, of):
    """A client checks the noise of the plan, and of the round: here, the computation of one of them is faulty."""
    sites, plan = Sites(tmp_path, pki, 9), plan_of(9, corrupt=2)
    server = Server(sites, plan)
    small, masked_round = NoiseLayers.of(plan.noise_multiplier * GRID, *of), OpenRequest.masked_round
    with monkeypatch.context() as patched:
        patched.setattr(OpenRequest, "masked_round", lambda *asked: replace(masked_round(*asked), layers=small))
        assert "noise of one client is too small" in sites.refusal(0, "train.open", server.open_content())
    monkeypatch.setattr(Secure, "layers", small)
    assert "the plan is refused: noise: the honest of 9 clients" in sites.refusal(
        0, "train.open", server.open_content()
    )


@pytest.mark.parametrize("missing", ["roster", "key", "state-dir"])
def test_a_client_without_roster_key_or_state_takes_part_in_no_masked_round(pki, tmp_path, missing):
    sites = Sites(tmp_path, pki, 6)
    del sites.nodes[0][missing], sites.nodes[0]["guarantee"]
    assert sites.key(0) is None
    server = Server(sites, plan_of(6), keys=dict.fromkeys(range(6), sites.key(1)))
    reason = "masked updates require a" if missing == "key" else "no guarantee is declared"
    assert reason in sites.refusal(0, "train.open", server.open_content())


def test_the_key_of_the_node_is_needed_once(pki, tmp_path):
    """The processes that train may not have it."""
    sites = Sites(tmp_path, pki, 6)
    server = Server(sites, plan_of(6))
    for node in sites.nodes.values():
        del node["key"]
    assert sites.key(0) == server.keys[0]
    server.run()


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"node": "00", "signature": "zz"}'])
def test_keys_are_signed_again_if_their_signature_is_damaged(pki, tmp_path, damage):
    sites = Sites(tmp_path, pki, 1)
    first = sites.key(0)
    sites.state(0, "masking-key.signed").write_bytes(damage)
    again = sites.key(0)
    assert (again.signing, again.box) == (first.signing, first.box)
    sites.state(0, "masking-key").write_bytes(b"short")
    assert sites.key(0) is None


def test_a_key_that_is_another_client_s_is_of_no_use(pki, tmp_path, caplog):
    sites = Sites(tmp_path, pki, 6)
    sites.nodes[0]["key"] = sites.nodes[1]["key"]
    assert sites.key(0) is None
    assert "node-1.key is of client 0" in caplog.text
    server = Server(sites, plan_of(6), keys=dict.fromkeys(range(6), sites.key(1)))
    assert "masked updates require a" in sites.refusal(0, "train.open", server.open_content())


def test_no_request_of_another_kind_gives_an_update_unmasked(stages, trained):
    """The plain request is for servers that the owner trusts: a policy leaves it out, and the guarantee refuses it."""
    stage = stages("train.open")
    policy = stage.sites.path / "policy.toml"
    policy.write_text('releases = ["masked updates"]')
    stage.sites.nodes[VICTIM]["policy"] = str(policy)
    content = RecordDict({MODELS: pack_models(MODELS_SENT, LAYOUT), CONFIG: ConfigRecord({**CONFIGURED, "round": 1})})
    assert "release of updates is not allowed" in refused(stage, content, trained, "train")
    del stage.sites.nodes[VICTIM]["policy"]
    stage.sites.nodes[VICTIM] |= {"epsilon": 20.0, "delta": 1e-4}
    assert "guarantee = masked-sums refuses train" in refused(stage, content, trained, "train")
    assert "does not cover evaluation" in refused(stage, content, trained, "evaluate")
    del stage.sites.nodes[VICTIM]["epsilon"], stage.sites.nodes[VICTIM]["delta"]
