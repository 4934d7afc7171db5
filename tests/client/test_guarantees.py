"""What a deployed client answers follows from the one guarantee that its owner declares."""

import re

import numpy as np
import pytest
from flwr.app import ConfigRecord, RecordDict
from kit.masked_sites import CONFIGURED, LAYOUT, MODELS_SENT, Server, Sites, plan_of
from kit.tables import for_rows
from test_hostile_server import CENTROIDS, GAN, LABEL, drawn_gan, plans

from coterie.client.handlers import HANDLERS
from coterie.deploy.certificates import create
from coterie.fields import GUARANTEES, MASKED_SUMS, RECORD_LEVEL, TRUSTED_SERVER
from coterie.site.errors import DeployError
from coterie.site.node import NodeConfig
from coterie.wire import messages
from coterie.wire.guarantees import ANSWERS, Answer
from coterie.wire.masked import ROUND_REQUESTS
from coterie.wire.messages import CONFIG, IDENTITY, MODELS, Layout, pack_models
from coterie.wire.requests import REQUESTS

BUDGET = {"epsilon": 20.0, "delta": 1e-4}
#: What the owner of a client with a roster declares.
NODES = {
    MASKED_SUMS: {"guarantee": MASKED_SUMS},
    RECORD_LEVEL: {"guarantee": RECORD_LEVEL, **BUDGET},
    TRUSTED_SERVER: {"guarantee": TRUSTED_SERVER},
}
PLAIN, PRICED, ALLOWED = "without plans", "with record-level plans", "without plans, with diagnostics = true"
ALL, NOTHING = {PLAIN, PRICED, ALLOWED}, set()
#: Requests that are answered, by message type: of masked-sums, record-level, trusted-server.
EXPECTED = {
    "query.identity": (ALL, ALL, ALL),
    "train": (NOTHING, {PRICED}, ALL),
    "query.losses": (NOTHING, {PRICED}, ALL),
    "train.gan": (NOTHING, {PRICED}, ALL),
    "train.centroids": (NOTHING, NOTHING, ALL),
    "query.label": (NOTHING, ALL, ALL),
    "evaluate": ({ALLOWED}, {PRICED, ALLOWED}, ALL),
    "train.open": (ALL, NOTHING, ALL),
    "train.masked": (ALL, NOTHING, ALL),
    "evaluate.masked": (ALL, NOTHING, ALL),
    "train.survivors": (ALL, NOTHING, ALL),
    "train.unmask": (ALL, NOTHING, ALL),
}
MASKED_TYPES = ("train.open", "train.masked", "evaluate.masked", "train.survivors", "train.unmask")


def test_every_message_type_is_classified():
    """A new message type fails here until the table and :data:`EXPECTED` have it."""
    constants = {value for value in vars(messages).values() if isinstance(value, str)}
    verbs = {value for value in constants if re.fullmatch(r"(train|query|evaluate)(\.\w+)?", value)}
    handled = {*HANDLERS, *REQUESTS, *ROUND_REQUESTS, *messages.MASKED_STEPS, IDENTITY}
    assert set(EXPECTED) == set(ANSWERS) == verbs == handled
    assert all(len(answers) == len(GUARANTEES) for answers in ANSWERS.values())


@pytest.mark.parametrize("guarantee", GUARANTEES)
@pytest.mark.parametrize("message_type", EXPECTED)
def test_the_table_says_what_is_expected(message_type, guarantee):
    answer = ANSWERS[message_type][GUARANTEES.index(guarantee)]
    requests = {PLAIN: (False, False), PRICED: (True, False), ALLOWED: (False, True)}
    included = {name for name, (priced, exact) in requests.items() if answer.includes(priced=priced, diagnostics=exact)}
    assert included == EXPECTED[message_type][GUARANTEES.index(guarantee)]
    assert isinstance(answer, Answer)


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    return create(tmp_path_factory.mktemp("guarantees") / "pki", 6, ["superlink"]).folder


@pytest.fixture
def sites(pki, tmp_path):
    return lambda count=1, **node: Sites(tmp_path, pki, count, **node)


def content(message_type, request, **terms):
    """A request of a server without masks."""
    models, layout = MODELS_SENT[:1], LAYOUT
    if message_type == "train.gan":
        models, layout = drawn_gan()
    if message_type == "query.label":
        models, layout = np.zeros((1, 32), np.float32), Layout(("centroids",), ((2, 16),))
    changes = {
        "query.losses": {"compared": 1},
        "train.gan": GAN,
        "train.centroids": CENTROIDS,
        "query.label": LABEL,
        "evaluate": {"private": True, "histogram": True} if request == PRICED else {},
    }
    terms |= {"evaluate": {"held_out_epsilon": 0.5}, "query.losses": {"compared": 4, "models_per_message": 4}}.get(
        message_type, {}
    )
    priced = plans(**terms) if request == PRICED else {}
    config = {**CONFIGURED, "round": 1, "loss-bound": 4.0, **changes.get(message_type, {}), **priced}
    return RecordDict({MODELS: pack_models(models, layout), CONFIG: ConfigRecord(config)})


CASES = [
    (message_type, guarantee, request)
    for message_type in EXPECTED
    for guarantee in GUARANTEES
    for request in (PLAIN, PRICED, ALLOWED)
    if message_type not in MASKED_TYPES
]


@pytest.mark.parametrize(("message_type", "guarantee", "request_name"), CASES)
def test_a_client_answers_what_its_guarantee_includes(sites, message_type, guarantee, request_name):
    """A refusal depends on no record: the file of the data is damaged. Only an answer reads it."""
    world = sites(**NODES[guarantee], **({"diagnostics": True} if request_name == ALLOWED else {}))
    if request_name in EXPECTED[message_type][GUARANTEES.index(guarantee)]:
        if (message_type, request_name) == ("evaluate", PRICED):  # held-out records are evaluated after training
            world.ask(0, "train", content("train", PRICED, held_out_epsilon=0.5))
        reply = world.ask(0, message_type, content(message_type, request_name))
        if (guarantee, request_name) == (RECORD_LEVEL, PRICED):
            assert bool(world.charges(0)) == (message_type not in ("query.label", IDENTITY))
        if message_type == "query.label":
            assert ("diagnostics" in reply) == (guarantee == TRUSTED_SERVER or request_name == ALLOWED)
        return
    (world.path / "site-0" / "data" / "train.npz").write_bytes(b"whoever reads this fails")
    text = world.refusal(0, message_type, content(message_type, request_name))
    excluded = "does not cover evaluation" if message_type == "evaluate" else f"refuses {message_type}"
    assert f"guarantee = {guarantee} {excluded}" in text
    assert "set" in text
    assert len(text) < 200  # what the server's log shows
    assert world.charges(0) == []
    assert world.log(0)[-1]["decision"] == "refused"


@pytest.mark.parametrize("guarantee", [MASKED_SUMS, TRUSTED_SERVER])
def test_masked_rounds_are_answered(sites, guarantee):
    world = sites(6, **NODES[guarantee])
    server = Server(world, plan_of(6))
    for step in (server.open, server.train, server.sign, server.unmask):
        step()
    assert len(server.shares) == 6
    scores = Server(world, plan_of(6, evaluations=1, evaluation_noise=0.2), number=2, release="accuracy")
    scores.open()
    scores.train()
    assert len(scores.vectors) == 6


@pytest.mark.parametrize("message_type", MASKED_TYPES)
def test_a_client_at_record_level_takes_part_in_no_masked_round(sites, message_type):
    world = sites(**NODES[RECORD_LEVEL])
    assert "public" not in dict(world.ask(0, IDENTITY, RecordDict())["reply"])
    text = world.refusal(0, message_type, RecordDict())
    assert f"guarantee = {RECORD_LEVEL} refuses {message_type}" in text
    assert world.charges(0) == []


@pytest.mark.parametrize("message_type", [name for name in EXPECTED if name != IDENTITY])
def test_a_client_without_a_guarantee_answers_nothing(sites, message_type):
    world = sites()
    for key in ("guarantee", "roster", "key"):
        world.nodes[0].pop(key, None)
    sent = content(message_type, PLAIN) if message_type not in MASKED_TYPES else RecordDict()
    assert "no guarantee is declared: set guarantee = masked-sums, record-level or trusted-server" in world.refusal(
        0, message_type, sent
    )
    assert dict(world.ask(0, IDENTITY, RecordDict())["reply"])["evaluates"] is False


@pytest.mark.parametrize("message_type", ["train", "evaluate"])
def test_keys_for_masked_rounds_imply_masked_sums(sites, message_type):
    """Of a client with a roster, and nothing else, the server gets no update, no accuracy and no number of records."""
    world = sites()
    world.nodes[0].pop("guarantee", None)
    text = world.refusal(0, message_type, content(message_type, PLAIN))
    assert f"guarantee = {MASKED_SUMS} " in text
    assert dict(world.ask(0, IDENTITY, RecordDict())["reply"])["evaluates"] is False


@for_rows(
    ("keys", "guarantee"),
    [
        ({}, None),
        ({"data": "/data"}, None),
        ({"roster": "/roster.json"}, None),
        ({"roster": "/roster.json", "state_dir": "/state"}, MASKED_SUMS),
        (BUDGET, RECORD_LEVEL),
        ({**BUDGET, "roster": "/roster.json"}, RECORD_LEVEL),
        ({"roster": "/roster.json", "state_dir": "/state", "guarantee": TRUSTED_SERVER}, TRUSTED_SERVER),
        ({"roster": "/roster.json", "state_dir": "/state", "guarantee": RECORD_LEVEL, **BUDGET}, RECORD_LEVEL),
        ({"roster": "/roster.json", "state_dir": "/state", "guarantee": MASKED_SUMS, **BUDGET}, MASKED_SUMS),
    ],
)
def test_what_a_node_configuration_declares(keys, guarantee):
    assert NodeConfig(client_id=0, **keys).declared_guarantee == guarantee


@for_rows(
    ("keys", "ways"),
    [
        ({"guarantee": MASKED_SUMS}, ("roster and state-dir", RECORD_LEVEL, TRUSTED_SERVER)),
        ({"guarantee": MASKED_SUMS, "roster": "/roster.json"}, ("roster and state-dir",)),
        ({"guarantee": RECORD_LEVEL}, ("epsilon and delta", TRUSTED_SERVER)),
        ({"guarantee": TRUSTED_SERVER, **BUDGET}, ("epsilon", "leave out", RECORD_LEVEL)),
        ({"roster": "/roster.json", "state_dir": "/state", **BUDGET}, ("set guarantee", MASKED_SUMS, RECORD_LEVEL)),
        ({"guarantee": "trust"}, (MASKED_SUMS, RECORD_LEVEL, TRUSTED_SERVER)),
    ],
)
def test_contradictions_name_the_keys_and_the_way_out(keys, ways):
    with pytest.raises(DeployError) as refused:
        NodeConfig(client_id=0, **keys)
    assert all(way in str(refused.value) for way in ways)
