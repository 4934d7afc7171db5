"""A client whose policy names submitters answers what one of them has signed, and nothing else."""

import logging
from dataclasses import fields, replace

import pytest
from test_hostile_server import CHEAP, WORLDS, World, plans, sender  # noqa: F401

from coterie.cli.audit_log import read_audit_log
from coterie.client.app import client_of
from coterie.client.consent import Consent
from coterie.deploy.certificates import add_submitter, remove_submitter
from coterie.privacy import PLANS, RecordPlan, epsilon
from coterie.privacy.budget_files import spending
from coterie.privacy.ledger_lines import count_events
from coterie.site.errors import DeployError
from coterie.site.node import NodeConfig
from coterie.site.policy import Policy
from coterie.site.run_request import RunRequest
from coterie.site.signatures import read_private_key

APP = "ab" * 32
POLICY = 'submitters = ["alice"]'


@pytest.fixture
def pki(pki_of_submitters):
    return pki_of_submitters


@pytest.fixture
def site(pki, tmp_path, monkeypatch):
    """A client with a roster and the policy."""
    monkeypatch.setenv("COTERIE_APP_HASH", APP)
    (tmp_path / "policy.toml").write_text(POLICY)
    return World(
        tmp_path / "world",
        WORLDS["another label"][0],
        policy=str(tmp_path / "policy.toml"),
        roster=str(pki / "roster.json"),
        guarantee="record-level",
    )


def signed(pki, name="alice", days=1, **changes):
    terms = {
        "app": APP,
        "strategy": "fedavg",
        "privacy_unit": "record",
        "epsilon": 8.0,
        "delta": 1e-3,
        "rounds": 30,
        "releases": ("updates",),
    }
    return RunRequest.signed(read_private_key(pki / "submitters" / f"{name}.key"), {**terms, **changes}, days=days)


def request(text, **changes):
    return {**CHEAP, "strategy": "fedavg", "run-request": text, **changes}


def refusal(site, change, verb="train"):
    """Why the policy refuses a request, before data are read and before anything is charged."""
    kind, text = site.ask_unread(verb, change)
    assert kind == "error"
    return text.partition("does not allow it: ")[2]


def test_what_a_submitter_has_signed_is_answered_and_recorded(pki, site, caplog):
    text = signed(pki)
    with caplog.at_level(logging.INFO, "flwr"):
        assert site.ask("train", request(text))[0] == "reply"
    (charge,) = site.charges
    assert (charge["submitter"], charge["request"]) == ("alice", RunRequest.read(text).id)
    (entry,) = read_audit_log(site.path / "state" / "client-0.audit.jsonl")[0]
    assert (entry["submitter"], entry["decision"]) == ("alice", "answered")
    ledger = spending(site.path / "data" / ".coterie-budget.jsonl")
    assert f"run 1 (fedavg), started by alice: epsilon {ledger.epsilon:.4g} of 5 spent" in caplog.messages
    assert ledger.runs == "1 by alice: 1"
    assert site.ask("train", request(signed(pki)))[0] == "reply"  # cached: the request for the run is no part of it
    assert len(site.charges) == 1


@pytest.mark.parametrize(
    ("made", "change", "reason"),
    [
        (lambda pki: signed(pki, "bob"), {}, "submitter bob is not allowed"),
        (lambda pki: ..., {}, "the run has no signed request (coterie sign)"),
        (lambda pki: "", {}, "the run has no signed request"),
        (lambda pki: "x" * 4000, {}, "the run's signed request: it is not a request that coterie sign has made"),
        (lambda pki: signed(pki)[:-8] + "AAAAAAA=", {}, "the run's signed request: "),
        (lambda pki: signed(pki, app="cd" * 32), {}, f"it is for the app {'cd' * 32}, and {APP} runs"),
        (lambda pki: signed(pki, epsilon=0.1), {}, "it is for epsilon 0.1, not 4"),
        (lambda pki: signed(pki, delta=1e-9), {}, "it is for delta 1e-09"),
        (lambda pki: signed(pki, rounds=1), {}, "it is for 1 rounds"),
        (lambda pki: signed(pki, releases=("losses",)), {}, "it does not include the release of updates"),
        (lambda pki: signed(pki, strategy="ifca"), {}, "it is for strategy ifca, not fedavg"),
        (signed, {"strategy": ...}, "not None"),
        (signed, {"record-plans": ...}, "it is for record-level privacy, and the run has none"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_everything_else_is_refused(pki, site, made, change, reason):
    assert reason in refusal(site, request(made(pki), **change))


def test_the_app_must_be_known(pki, site, monkeypatch):
    monkeypatch.delenv("COTERIE_APP_HASH")
    assert "an unknown app runs" in refusal(site, request(signed(pki)))


def test_a_submitter_who_left_starts_no_run(pki, site):
    text = signed(pki)
    assert site.ask("train", request(text))[0] == "reply"
    remove_submitter(pki, "alice")
    assert "its key is not in the roster" in refusal(site, request(text, round=2))
    add_submitter(pki, "alice")  # with another key
    assert "its key is not in the roster" in refusal(site, request(text, round=2))
    assert site.ask("train", request(signed(pki), round=2))[0] == "reply"


def test_a_submitter_who_left_does_not_come_back_with_an_older_roster(pki, site, caplog):
    old, text = (pki / "roster.json").read_bytes(), signed(pki)
    remove_submitter(pki, "alice")
    assert "its key is not in the roster" in refusal(site, request(text))
    (pki / "roster.json").write_bytes(old)
    assert refusal(site, request(text)) == "the client cannot use its roster; see its own log"
    assert "is an older roster" in caplog.text


def test_a_roster_that_cannot_be_used_tells_the_server_nothing_of_it(pki, site, caplog):
    (pki / "roster.json").write_text("{}")
    assert refusal(site, request(signed(pki))) == "the client cannot use its roster; see its own log"
    assert str(pki) in caplog.text


def test_a_request_used_again_in_other_runs_spends_its_epsilon_once(pki, site):
    """The signed epsilon holds for all runs together, whatever the server calls them."""

    def ask(text, number, run):
        site.run = run
        return site.ask("train", request(text, round=number, **plans(noise_multiplier=6.0, epsilon=0.1)))[:2]

    assert ask(signed(pki), 1, 1)[0] == "reply"
    limit = epsilon(count_events(2 * site.charges), 1e-3)
    text = signed(pki, epsilon=1.001 * limit)
    assert [ask(text, number, run)[0] for number, run in ((2, 1), (3, 2))] == ["reply", "reply"]
    for number, run in ((4, 1), (4, 2), (4, 3), (2, 3)):
        kind, reason = ask(text, number, run)
        assert kind == "error"
        assert "it exceeds the epsilon per request of its owner's policy" in reason
        assert f"{limit:.2f}" not in reason
    assert len(site.charges) == 3
    assert ask(signed(pki, epsilon=1.001 * limit), 5, 3)[0] == "reply"


def test_without_submitters_in_the_policy_a_request_is_recorded_and_nothing_more(pki, site, tmp_path):
    (tmp_path / "policy.toml").write_text("")
    for number, text in enumerate((signed(pki, "bob", epsilon=0.1), "x", ...), 1):
        assert site.ask("train", request(text, round=number))[0] == "reply"
    assert [charge.get("submitter") for charge in site.charges] == ["bob", None, None]
    del site.node["roster"]
    assert site.ask("train", request(signed(pki), round=4))[0] == "reply"
    assert "submitter" not in site.charges[-1]


def test_submitters_require_a_roster(tmp_path):
    (tmp_path / "policy.toml").write_text(POLICY)
    with pytest.raises(DeployError, match="submitters require roster"):
        client_of(NodeConfig(client_id=0, policy=str(tmp_path / "policy.toml")))


def test_a_consent_of_nothing():
    assert Consent.of(NodeConfig(client_id=0), 7) == Consent()
    assert Consent.of(NodeConfig(client_id=0), "x") == Consent()


# ---- what a request binds of a plan -----------------------------------------------------------------------------

RECORD_PLAN = RecordPlan(
    num_examples=100, batch_size=10, rounds=20, epsilon=2.0, delta=1e-4, noise_multiplier=1.0, clip_norm=1.0
)
MASKED_PLAN = PLANS["secure"].calibrated(
    clients=10, num_clusters=2, sampling_rate=1.0, rounds=20, epsilon=2.0, delta=1e-4, clip_norm=1.0
)
#: Terms of a plan beyond which a request is refused.
BOUND = {"rounds": 21, "epsilon": 2.1, "delta": 1.1e-4}
_LEDGER = "the client's ledger computes epsilon from the events that it charges, and stops at the request's"
_UTILITY = "changes what the noise is added to, not how much privacy it costs"
#: Terms of a plan that no request has to bind, with the reason.
UNBOUND = {
    "noise_multiplier": _LEDGER,
    "accountant": "the limit of a request is checked by the client's own accountant, whatever the plan names",
    "clip_norm": _UTILITY,
    "clip_share": _LEDGER,
    "clip_factor": _UTILITY,
    # of RecordPlan
    "num_examples": _LEDGER,
    "batch_size": _LEDGER,
    "first_batch_size": _LEDGER,
    "first_noise_multiplier": _LEDGER,
    "local_epochs": _LEDGER,
    "selection": "a client with a budget refuses exact choices, and its ledger charges private ones",
    "selections": _LEDGER,
    "selection_epsilon": _LEDGER,
    "compared": _LEDGER,
    "loss_noise": _LEDGER,
    "models_per_message": _LEDGER,
    "held_out_epsilon": "at most epsilon, and the ledger limits its sum by the request's epsilon",
    # of Secure
    "clients": "the roster says who the clients are, and min-cohort of the node how many a round needs",
    "num_clusters": _UTILITY,
    "sampling_rate": _LEDGER,
    "identifier_share": _LEDGER,
    "sizes_until": _LEDGER,
    "rebalance_min": _UTILITY,
    "divisor": "the server divides sums that are noisy already",
    "evaluations": _LEDGER,
    "evaluation_noise": _LEDGER,
    "histograms": _LEDGER,
    "histogram_noise": _LEDGER,
    "histogram_classes": _LEDGER,
    "dropout": "the client computes the noise that the survivors' sum needs, and refuses a threshold that is too low",
    "corrupt": "min-corrupt of the node configuration demands it",
}


def refused_by(request, plan, **changes):
    asked = {"app": APP, "strategy": "fedavg", "round": 1, "releases": ["updates"], "plan": replace(plan, **changes)}
    return Consent("alice", request).refuses(["alice"], **asked)


def request_for(pki, plan):
    unit = {"privacy_unit": plan.unit, "epsilon": plan.epsilon, "delta": plan.delta, "rounds": plan.rounds}
    return RunRequest.read(signed(pki, **unit))


@pytest.mark.parametrize("plan", [RECORD_PLAN, MASKED_PLAN], ids=lambda plan: plan.mechanism)
def test_a_request_binds_every_term_of_a_plan_or_there_is_a_reason(pki, plan):
    """A new field of a plan fails here until a request binds it, or the list above says why not."""
    names = {field.name for field in fields(plan)}
    assert names <= {*BOUND, *UNBOUND}
    assert set(BOUND) <= names
    assert not set(BOUND) & set(UNBOUND)
    request = request_for(pki, plan)
    assert refused_by(request, plan) == ""
    for name, value in BOUND.items():
        assert f"it is for {'20 rounds' if name == 'rounds' else name}" in refused_by(request, plan, **{name: value})


def test_every_unbound_term_is_of_a_plan():
    assert {field.name for plan in (RECORD_PLAN, MASKED_PLAN) for field in fields(plan)} == {*BOUND, *UNBOUND}


@pytest.mark.parametrize(("signed_for", "plan"), [(MASKED_PLAN, RECORD_PLAN), (RECORD_PLAN, MASKED_PLAN)])
def test_a_request_for_another_unit_is_refused(pki, signed_for, plan):
    reason = refused_by(request_for(pki, signed_for), plan)
    assert reason == f"the run's signed request: it is for privacy-unit {signed_for.unit}, not {plan.unit}"


def test_a_request_without_privacy_pays_for_no_plan(pki):
    request = RunRequest.read(signed(pki, privacy_unit="none", epsilon=None, delta=None))
    assert "it is for privacy-unit none, not record" in refused_by(request, RECORD_PLAN)


def test_a_client_refuses_records_where_clients_are_signed(pki, site):
    assert "it is for privacy-unit client, not record" in refusal(site, request(signed(pki, privacy_unit="client")))


def test_every_key_of_a_policy_is_a_term_of_a_request():
    """A new key of a policy fails here until a request states what it limits."""
    terms = {
        "submitters": "key",
        "strategies": "strategy",
        "releases": "releases",
        "epsilon_per_run": "epsilon",
        "epsilon_per_month": "epsilon",
    }
    assert set(terms) == {field.name for field in fields(Policy)}
    assert set(terms.values()) <= {field.name for field in fields(RunRequest)}
