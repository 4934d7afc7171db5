"""The policy of a client's owner: what it refuses, before data are read and before anything is charged."""

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from flwr.app import Context, Message, RecordDict
from flwr.common.constant import ErrorCode
from kit.tables import for_rows
from test_hostile_server import CENTROIDS, CHEAP, GAN, LABEL, WORLDS, World, sender  # noqa: F401

from coterie.client.app import app, client_of
from coterie.client.budget import BUDGET_FILE, _check_policy
from coterie.client.identity import Client
from coterie.client.state import ClientError
from coterie.deploy.clientapp import answer
from coterie.deploy.edge import Edge, checks
from coterie.privacy import ClientLedger, charge_times, epsilon
from coterie.privacy.ledger_lines import count_events
from coterie.site.errors import DeployError
from coterie.site.node import NodeConfig
from coterie.site.policy import RELEASES, Policy
from coterie.wire.messages import REFUSALS

DAY = 86400


@pytest.fixture
def world(tmp_path):
    """A client with a policy: call it with the text of the policy."""

    def made(text, **node):
        path = tmp_path / "policy.toml"
        path.write_text(text)
        return World(tmp_path / "world", WORLDS["another label"][0], policy=str(path), **node)

    return made


def refused(world, verb, change):
    """Whether the policy refuses a request; nothing may be read or charged then."""
    kind, text = world.ask_unread(verb, change)
    return kind == "error" and "policy" in text


@pytest.mark.parametrize(
    ("policy", "verb", "change"),
    [
        ('strategies = ["ifca"]', "train", {**CHEAP, "strategy": "fedavg"}),
        ('strategies = ["ifca"]', "train", {**CHEAP, "strategy": "IFCA"}),
        ('strategies = ["ifca"]', "train", CHEAP | {"strategy": "x" * 200}),
        ("strategies = []", "train", {**CHEAP, "strategy": "ifca"}),
        ('strategies = ["ifca"]', "train", {**CHEAP, "strategy": ...}),
        ('releases = ["updates"]', "train.gan", {**CHEAP, **GAN}),
        ('releases = ["updates"]', "query.losses", {**CHEAP, "compared": 1}),
        ('releases = ["updates"]', "evaluate", {}),
        ('releases = ["updates"]', "train.centroids", CENTROIDS),
        ('releases = ["updates"]', "query.label", LABEL),
        ('releases = ["losses"]', "train", CHEAP),
        ("releases = []", "train", CHEAP),
    ],
)
def test_what_the_policy_does_not_allow_is_refused_before_anything_else(world, policy, verb, change):
    assert refused(world(policy), verb, change)


@pytest.mark.parametrize(
    "policy",
    [
        "",
        'strategies = ["fedavg", "ifca"]',
        'releases = ["updates"]',
        'strategies = ["ifca"]\nreleases = ["updates", "losses"]\nepsilon-per-run = 4.0\nepsilon-per-month = 4.0',
    ],
)
def test_what_the_policy_allows_is_answered(world, policy):
    allowed = world(policy)
    assert allowed.ask("train", {**CHEAP, "strategy": "ifca"})[0] == "reply"
    assert len(allowed.charges) == 1


def spent(world):
    return epsilon(count_events(world.charges), 1e-4)


@pytest.mark.parametrize("key", ["epsilon-per-run", "epsilon-per-month"])
def test_epsilon_is_limited_below_the_budget(world, key, tmp_path):
    free = world("")
    assert free.ask("train", CHEAP)[0] == "reply"
    one = spent(free)
    (tmp_path / "policy.toml").write_text(f"{key} = {1.001 * one}")
    kind, text, *_ = free.ask("train", {**CHEAP, "round": 2})
    assert (kind, "owner's policy" in text, f"{one:.2f}" in text) == ("error", True, False)  # no amounts
    assert refused(free, "train", {**CHEAP, "round": 2})
    (tmp_path / "policy.toml").write_text(f"{key} = {3 * one}")
    assert free.ask("train", {**CHEAP, "round": 2})[0] == "reply"


@pytest.fixture
def clocks(monkeypatch):
    """The clock and the uptime of the machine; a test advances both, or one of them."""
    clocks = SimpleNamespace(time=time.time(), uptime=3 * DAY)
    monkeypatch.setattr(time, "time", lambda: clocks.time)
    monkeypatch.setattr(charge_times, "uptime", lambda: clocks.uptime)
    return clocks


@pytest.fixture
def allows(world, tmp_path, clocks):
    """Whether a policy allows a further charge of the cost of the one that was made."""
    limited = world("")
    limited.ask("train", CHEAP)
    one = spent(limited)
    other = Client(0, str(limited.path / "state"), (5.0, 1e-4), data=limited.node["data"])

    def allows(key, factor, run="2"):
        (tmp_path / "policy.toml").write_text(f"{key} = {factor * one}")
        client = replace(other, run=run, policy=Policy.read(tmp_path / "policy.toml"))
        ledger = ClientLedger(1e-4, 5.0, limited.path / "data" / BUDGET_FILE)
        try:
            _check_policy(client, limited.path / "state", ledger, count_events(limited.charges))
        except ClientError as error:
            return error.kind != "policy"
        finally:
            ledger.close()
        return True

    return allows


def test_another_run_has_its_own_limit_and_shares_that_of_the_month(allows, clocks):
    assert [allows("epsilon-per-run", 1.001, run) for run in ("1", "2")] == [False, True]
    assert [allows("epsilon-per-month", 1.001, run) for run in ("1", "2")] == [False, False]
    clocks.time, clocks.uptime = clocks.time + 29 * DAY, clocks.uptime + 29 * DAY
    assert not allows("epsilon-per-month", 1.001)
    clocks.time, clocks.uptime = clocks.time + 2 * DAY, clocks.uptime + 2 * DAY
    assert allows("epsilon-per-month", 1.001)
    assert not allows("epsilon-per-month", 0.5)


@pytest.mark.parametrize("jump", [31 * DAY, -31 * DAY, 10_000 * DAY, -10_000 * DAY])
def test_a_jump_of_the_clock_ends_no_month(allows, clocks, jump):
    now = clocks.time
    clocks.time = now + jump
    assert not allows("epsilon-per-month", 1.001)
    clocks.time, clocks.uptime = now + jump + 29 * DAY, clocks.uptime + 29 * DAY
    assert not allows("epsilon-per-month", 1.001)
    clocks.uptime = 60.0  # after a restart
    assert not allows("epsilon-per-month", 1.001)


def test_a_month_ends_after_a_restart_too(allows, clocks):
    before, clocks.time = clocks.uptime, clocks.time + 60 * DAY
    for days, ended in ((0, False), (29, False), (31, True)):
        clocks.uptime = before + days * DAY
        assert allows("epsilon-per-month", 1.001) is ended


def test_a_client_whose_policy_allows_no_scores_says_so():
    for releases, evaluates in ((None, True), (("scores",), True), (("updates",), False)):
        assert Client(0, "/state", guarantee="trusted-server", policy=Policy(releases=releases)).evaluates is evaluates
    assert not Client(0, "/state", (1.0, 1e-5), guarantee="record-level", policy=Policy()).evaluates


def test_a_refusal_is_typed(world):
    hostile = world('strategies = ["ifca"]')
    content = RecordDict()
    message = Message(content, dst_node_id=1, message_type="query.identity")
    context = Context(1, 1, hostile.node, RecordDict(), {})
    assert answer(app, message, context).has_content()

    def raises(kind):
        def client_app(message, context):
            raise ClientError("no", kind)

        return client_app

    codes = {kind: answer(raises(kind), message, context).error.code for kind in REFUSALS}
    assert codes == REFUSALS
    assert len({*codes.values(), ErrorCode.CLIENT_APP_RAISED_EXCEPTION}) == len(codes) + 1


@for_rows(
    ("text", "reason"),
    [
        ("strategies = 'ifca'", "strategies must be a list"),
        ("strategies = [1]", "strategies is 1; expected a string"),
        ('releases = ["models"]', "releases is 'models'; expected one of updates"),
        ("epsilon-per-run = 0", "epsilon-per-run is 0; expected a finite number"),
        ("epsilon-per-run = nan", "epsilon-per-run is nan"),
        ("epsilon-per-run = '2'", "epsilon-per-run is '2'"),
        ("epsilon_per_run = 2.0", "unknown key epsilon_per_run; allowed are epsilon-per-month"),
        ("submitters = 'alice'", "submitters must be a list"),
        ("strategies = [", "not valid TOML"),
        ("\x00", "not valid TOML"),
    ],
)
def test_a_policy_with_a_mistake_is_none(tmp_path, text, reason):
    path = tmp_path / "policy.toml"
    path.write_text(text)
    with pytest.raises(DeployError) as refusal:
        Policy.read(path)
    assert reason in str(refusal.value)
    assert str(path) in str(refusal.value)


def test_a_missing_policy_and_limits_without_a_budget_stop_the_client(tmp_path):
    with pytest.raises(DeployError, match="cannot be read"):
        client_of(NodeConfig(client_id=0, policy=str(tmp_path / "none.toml")))
    with pytest.raises(DeployError, match="absolute path"):
        NodeConfig(client_id=0, policy="policy.toml")
    (tmp_path / "policy.toml").write_text("epsilon-per-run = 2")
    with pytest.raises(DeployError, match="require epsilon and delta"):
        client_of(NodeConfig(client_id=0, policy=str(tmp_path / "policy.toml")))


def test_the_check_shows_the_policy(tmp_path):
    path = tmp_path / "policy.toml"

    def shown(text, **node):
        path.write_text(text)
        options = {"client_id": 0, "data": str(tmp_path), "policy": str(path), **node}
        edge = Edge(superlink="localhost:1", key=tmp_path / "k", ca=tmp_path / "ca", node=NodeConfig(**options))
        return next(check for check in checks(edge, str, str, lambda *_: None) if check.subject == "policy")

    check = shown('strategies = ["fedavg", "ifca"]\nreleases = []')
    assert (check.passed, check.detail) == (True, f"strategies fedavg, ifca; releases none, {path}")
    assert shown("").detail == f"allows everything, {path}"
    assert "require --epsilon and --delta" in shown("epsilon-per-run = 1").detail
    assert not shown("nothing = 1").passed


def test_the_page_names_all_releases():
    page = (Path(__file__).parents[2] / "docs" / "deployment.md").read_text()
    assert all(f"`{release}`" in page for release in RELEASES)
