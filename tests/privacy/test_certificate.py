"""The certificate says what is true, and no when it is not; it follows from the ledger alone."""

import json
import re
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from statistics import NormalDist

import pytest

from coterie.audit.printed import Paper
from coterie.privacy import (
    PLANS,
    Event,
    Joint,
    Ledger,
    NoPrivacy,
    RecordPlan,
    RRSlot,
    certificate,
    epsilon,
    plan_of,
    read_ledger,
)
from coterie.privacy.certificate import COMPOSED, ODDS, _Profile
from coterie.privacy.check import check

NUMBERS = {"clients": 100, "num_clusters": 2, "sampling_rate": 0.2, "rounds": 20, "clip_norm": 0.5}
ABOUT = {"seed": None, "diagnostics": ["exact accuracies"], "public": {"server-lr": 1.5}, "tuned": {"lr": 0.2}}


def make(kind=Joint, **numbers):
    return kind.calibrated(**NUMBERS | {"epsilon": 4.0, "delta": 1e-4} | numbers)


@pytest.fixture(scope="module")
def plan():
    return make()


def certify(plan, events=None, **about):
    """The certificate of a run that charged ``events`` (everything that was planned, unless given)."""
    events = list(plan.planned().elements()) if events is None else events
    charges = [{key: value for key, value in asdict(e).items() if key != "slots" or value} for e in events]
    document = certificate({"plan": plan.terms(), **ABOUT, **about}, charges)
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    return document


def test_a_certificate_names_what_it_covers(plan):
    models, sizes, accuracies = (
        "the models of every round",
        "noisy cluster sizes",
        "noisy mean accuracies of private evaluations",
    )
    assert plan.identifier_share > 0
    assert certify(plan)["covers"] == [models, sizes]
    assert certify(make(identifier_share=0.0, num_clusters=1))["covers"] == [models]
    assert certify(make(evaluations=2, evaluation_noise=0.1))["covers"] == [models, sizes, accuracies]
    nothing = NoPrivacy(clients=100, num_clusters=2, sampling_rate=0.2, rounds=20)
    assert certify(nothing)["covers"] == []
    record = RecordPlan.calibrated(num_examples=600, batch_size=30, rounds=10, epsilon=5.0, delta=1e-4)
    (sent,) = certify(record)["covers"]
    assert sent.startswith("what clients send in training")


WHO = "who takes part: the amplification by sampling holds against those who cannot see it"
ATTENDANCE = "whether a client replies, which must not depend on its data"
SERVER = (
    "the server, its operator and whoever reads its memory: clients that declare guarantee = trusted-server send it "
    "their updates and labels without noise"
)
CODE = (
    "code that the operator sends to clients: they run the app that they trust only if they pin it (fab-hash or "
    "trusted-entities)"
)
ALWAYS = [
    "what holds for real-valued noise only: the noise is drawn in float64",
    "other runs on the same clients: their epsilons add up",
    "settings and checkpoints chosen by looking at exact diagnostics or at other runs on the same clients",
]
SECURE = [
    "that at most 2 clients of a cohort work with the server: it assumes that all others of the roster are honest, and "
    "different, parties (min-corrupt bounds the noise, not their number)",
    "clients whose node configuration does not declare guarantee = masked-sums: they answer requests for unmasked "
    "updates",
    "computers that break X25519, AES or SHA-256: the guarantee against the server is computational",
    CODE,
]
RECORDS = [
    "which records are in a batch: the amplification by sampling holds against those who cannot see it",
    "clients whose node configuration sets another budget than their profile: their ledgers count by that one",
    "clients whose node configuration does not declare guarantee = record-level with epsilon and delta: they trust the "
    "server to ask for nothing beyond the plan",
    "copies of a client's records: each copy with a budget file of its own spends a budget of its own",
    CODE,
]
#: What the certificate states to be outside the guarantee, for each mechanism and participation.
OUTSIDE = [
    ("joint", {}, [WHO, SERVER]),
    ("joint", {"sampling_rate": 1.0}, [WHO, SERVER]),
    ("banded", {}, [ATTENDANCE, SERVER]),
    ("banded", {"participation": "secret", "min_separation": 2}, [f"{WHO}; {ATTENDANCE}", SERVER]),
    ("banded", {"participation": "secret", "min_separation": 5}, [ATTENDANCE, SERVER]),  # all of a slot take part
    ("secure", {"sampling_rate": 0.2, "corrupt": 2}, [ATTENDANCE, *SECURE]),
    ("rr-slot", {"rebalance_min": 4}, [WHO, SERVER]),
    ("paper", {"rebalance_min": 4, "epsilon": 8.0}, [WHO, SERVER]),
    ("paper-uncharged", {"rebalance_min": 4, "epsilon": 8.0, "identifier_share": 0.0}, [WHO, SERVER]),
    ("dp-sgd", {}, RECORDS),
    ("dp-sgd", {"batch_size": 600}, RECORDS),
    ("dp-sgd", {"selection": "gumbel", "selections": 9}, RECORDS),
]
#: Theorems behind the guarantee of each mechanism, and in which heading of docs/privacy.md each is.
THEOREMS = {
    "joint": (1,),
    "banded": (1, 4),
    "secure": (1, 9),
    "rr-slot": (2,),
    "paper": (2,),
    "paper-uncharged": (2,),
    "dp-sgd": (3,),
}
BEFORE = {4: {1: {1, 2, 3, 4}}, 9: {1: {1, 2, 3, 4}}}  # "Assume conditions 1 to 4 of Theorem 1, and that"


def conditions_of(theorem):
    """Numbers of the conditions of a theorem in docs/privacy.md."""
    page = (Path(__file__).parents[2] / "docs" / "privacy.md").read_text()
    before, _, after = page.partition(f"**Theorem {theorem}.**")
    text = re.split(r"\nThen |\n\*Visible", after)[0] if theorem != 2 else before.rpartition("Its proof requires:")[2]
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", text, re.MULTILINE)]
    assert numbers == list(range(numbers[0], numbers[-1] + 1))
    return set(numbers)


def plan_with(mechanism, numbers):
    if mechanism == RecordPlan.mechanism:
        record = {"num_examples": 600, "batch_size": 30, "rounds": 10, "epsilon": 5.0, "delta": 1e-4}
        return RecordPlan.calibrated(**record | numbers)
    return make(PLANS[mechanism], **numbers)


@pytest.mark.parametrize(("mechanism", "numbers", "outside"), OUTSIDE)
def test_every_precondition_of_a_theorem_is_enforced_or_outside(mechanism, numbers, outside):
    """A new condition in docs/privacy.md fails here until the statement of the mechanism classifies it."""
    preconditions = plan_with(mechanism, numbers).statement.preconditions
    assert all(bool(each.enforced) != bool(each.outside) for each in preconditions)
    last = THEOREMS[mechanism][-1]
    expected = {(last, number) for number in conditions_of(last)}
    expected |= {(first, number) for first, those in BEFORE.get(last, {}).items() for number in those}
    stated = {(each.theorem, each.number) for each in preconditions if each.number}
    assert expected <= stated
    assert {theorem for theorem, _ in stated} == set(THEOREMS[mechanism])
    assert [each.outside for each in preconditions if each.outside] == outside


@pytest.mark.parametrize(("mechanism", "numbers", "outside"), OUTSIDE)
def test_a_certificate_names_all_that_is_outside_the_guarantee(mechanism, numbers, outside):
    plan = plan_with(mechanism, numbers)
    assert certify(plan)["outside"] == ["exact accuracies", *ALWAYS, *outside]
    assert certify(plan, diagnostics=[])["outside"] == [*ALWAYS, *outside]


def test_every_mechanism_states_what_is_outside():
    assert {mechanism for mechanism, _, _ in OUTSIDE} == {*PLANS, RecordPlan.mechanism} - {"none"} == {*THEOREMS}
    nothing = NoPrivacy(clients=100, num_clusters=2, sampling_rate=0.2, rounds=20)
    assert certify(nothing)["outside"] == []


def test_a_run_as_planned_is_certified(plan):
    document = certify(plan)
    assert document["certified"] is True
    assert document["reasons"] == []
    assert 3.9 < document["epsilon"] <= 4.0
    assert document["epsilon_participation_visible"] > 2 * document["epsilon"]
    assert document["accountants"]["pld"] == document["epsilon"] <= document["accountants"]["rdp"]
    assert "exact accuracies" in document["outside"]
    assert document["public_inputs"].items() >= {"clients": 100, "num_clusters": 2, "server-lr": 1.5}.items()
    assert document["tuned_outside"] == {"lr": 0.2}
    noise = plan.noise_multiplier
    assert document["charged"] == [
        {"sampler": "poisson", "sampling_rate": 0.2, "noise_multiplier": noise, "charges": 20}
    ]


@pytest.mark.parametrize("numbers", [{}, {"identifiers": "exponential"}], ids=["gaussian", "exponential"])
def test_rr_slot_is_certified_for_replacing_and_for_leaving(numbers):
    document = certify(make(RRSlot, rebalance_min=4, **numbers))
    assert document["certified"] is True
    assert document["sampler"] == "fixed"
    assert "replace one client, or make it absent" in document["adjacency"]
    assert set(document["accountants"]) == {"pld", "rdp"}


def test_the_paper_s_mechanism_is_not_certified_and_says_why():
    plan = make(Paper, rebalance_min=4, epsilon=8.0)
    document = certify(plan)
    assert document["certified"] is False
    text = " ".join(document["reasons"])
    for reason in ("sqrt(5) C", "donor of exactly B", "true counts", "sqrt(2)", "theorem-4.2"):
        assert reason in text
    assert document["epsilon"] == document["accountants"]["theorem-4.2"] <= 8.0
    assert set(document["accountants"]) == {"pld", "rdp", "theorem-4.2", "theorem-4.2-canonne"}
    assert certify(make(Paper, epsilon=8.0, accountant="pld"))["certified"] is False


def test_a_seed_is_for_simulation_only(plan):
    document = certify(plan, seed=0)
    assert document["certified"] is False
    assert "seed 0" in document["reasons"][0]
    assert "simulation only" in document["reasons"][0]


def test_no_privacy_says_so():
    document = certify(NoPrivacy(clients=10, num_clusters=1, sampling_rate=0.5, rounds=2))
    assert document["certified"] is False
    assert document["epsilon"] is None
    assert "no privacy was asked for" in document["reasons"][0]


@pytest.mark.parametrize(("selection", "certified"), [("none", True), ("gumbel", True), ("exact", False)])
def test_exact_choices_by_loss_are_not_certified(selection, certified):
    plan = RecordPlan.calibrated(
        num_examples=600, batch_size=30, rounds=10, epsilon=5.0, delta=1e-4, selection=selection, selections=9
    )
    document = certify(plan)
    assert document["certified"] is certified
    assert document["unit"] == "record"
    assert document["epsilon"] <= 5.0
    if not certified:
        assert "selection exact" in document["reasons"][0]


def test_a_run_that_ended_early_is_certified_at_its_planned_rounds(plan):
    assert certify(plan, [plan.event()] * 5)["epsilon"] == pytest.approx(certify(plan)["epsilon"])
    evaluated = make(evaluations=4)
    some = [*[evaluated.event()] * 5, evaluated.evaluation_event()]
    assert certify(evaluated, some)["epsilon"] == pytest.approx(certify(evaluated)["epsilon"])


def test_what_the_budget_does_not_allow_was_not_planned_in_earnest():
    plan = Joint(**NUMBERS | {"rounds": 500}, epsilon=4.0, delta=1e-4, noise_multiplier=1.5)
    for charged in (0, 3, 20):
        document = certify(plan, [plan.event()] * charged)
        assert document["certified"] is True
        assert 3.9 < document["epsilon"] <= 4.0


def test_charges_above_the_budget_are_not_certified(plan):
    document = certify(plan, [plan.event()] * 30)
    assert document["certified"] is False
    assert "above the budget of 4" in document["reasons"][0]


def test_wasted_and_recalibrated_charges_count(plan):
    events = [plan.event()] * 11 + [Event(0.2, 1.2 * plan.noise_multiplier)] * 10
    document = certify(plan, events)
    assert document["certified"] is True
    assert document["charges"] == 21
    assert len(document["charged"]) == 2
    assert document["epsilon"] == pytest.approx(epsilon(events, plan.delta))


@pytest.mark.parametrize("kind", [k for k in PLANS.values() if k is not NoPrivacy], ids=lambda k: k.mechanism)
def test_it_follows_from_the_ledger_file_alone(tmp_path, kind):
    plan = make(kind, epsilon=8.0)
    ledger = plan.ledger(tmp_path / "ledger.jsonl", **ABOUT)
    for number in range(1, 21):
        ledger.charge_round(number, plan.round_event(number))
    ledger.close()
    header, charges = read_ledger(tmp_path / "ledger.jsonl")
    assert plan_of(header["plan"]) == plan
    document = certificate(header, charges)
    assert document == certify(plan)
    assert document["epsilon"] == pytest.approx(charges[-1]["epsilon"])


@pytest.mark.parametrize("kind", [Joint, RRSlot], ids=lambda kind: kind.mechanism)
@pytest.mark.parametrize(("delta", "certified"), [(0.01, True), (0.0101, False), (0.5, False)])
def test_a_delta_above_one_in_the_number_of_clients_is_not_certified(kind, delta, certified):
    document = certify(make(kind, delta=delta), [])
    assert document["certified"] is certified
    if not certified:
        (reason,) = document["reasons"]
        assert f"delta = {delta:g} is above 1/100 = 0.01" in reason


@pytest.mark.parametrize(("delta", "certified"), [(1 / 600, True), (1 / 599, False)])
def test_a_delta_above_one_in_the_number_of_records_is_not_certified(delta, certified):
    plan = RecordPlan.calibrated(num_examples=600, batch_size=30, rounds=5, epsilon=5.0, delta=delta)
    document = certify(plan, [])
    assert document["certified"] is certified
    if not certified:
        assert "is above 1/600 = 0.00167: publishing one of the 600 records at random" in document["reasons"][0]


def test_charges_slightly_above_the_budget_are_a_problem():
    plan = Joint(**NUMBERS, epsilon=4.0, delta=1e-4, noise_multiplier=1.5)
    spent = epsilon({plan.event(): 20}, 1e-4)
    for budget, problems in ((spent * 1.01, 0), (spent / 1.01, 1)):
        own = replace(plan, epsilon=budget)
        ledger = Ledger(own.delta, 100.0, about={"plan": own.terms()})
        for number in range(1, 21):
            ledger.charge_round(number, own.event(), **{"for": "training"})
        found = check({**ledger.header, "epsilon": budget}, ledger.charges, None)
        assert len([text for text in found if "above the budget" in text]) == len(found) == problems


def test_entries_that_version_0_2_has_not_may_be_missing_only_together():
    plan = Joint(**NUMBERS, epsilon=4.0, delta=1e-4, noise_multiplier=1.5)
    terms = plan.terms()
    old = {name: value for name, value in terms.items() if name not in ("clip_share", "clip_factor")}
    for stored, problems in ((old, 0), (terms, 2)):
        ledger = Ledger(plan.delta, plan.epsilon, about={"plan": stored})
        ledger.charge_round(1, plan.event(), **{"for": "training"})
        document = certificate(ledger.header, ledger.charges)
        for name in ("clip_share", "clip_factor"):
            del document["public_inputs"][name]
        found = check(ledger.header, ledger.charges, document)
        assert len(found) == problems, found
        assert all("= nothing, but the ledger gives" in text for text in found)
        assert len(check(ledger.header, ledger.charges, {**document, "epsilon": 1.0})) == problems + 1


@pytest.mark.parametrize("noise", [0.7, 1.0, 3.0])
def test_the_odds_are_those_of_the_best_test_between_two_gaussians(noise):
    """Of n releases with noise z, the best attacker is right with probability Φ(√n / 2z)."""
    rounds = 4
    profile = _Profile(1, make(), Counter({Event(1.0, noise): rounds}), False)
    assert profile.attacker_right() == pytest.approx(NormalDist().cdf(rounds**0.5 / 2 / noise), abs=1e-3)
    assert profile.attacker_right() >= NormalDist().cdf(rounds**0.5 / 2 / noise)


@pytest.mark.parametrize("mechanism", ["joint", "banded", "rr-slot", "dp-sgd"])
def test_a_certificate_of_an_earlier_version_may_say_less_of_what_is_outside(mechanism):
    """Version 0.2.0 states no releases (COMPOSED), and neither the server nor what clients declare."""
    plan = plan_with(mechanism, {"rebalance_min": 4} if mechanism == "rr-slot" else {})
    header = {"plan": plan.terms(), "delta": plan.delta, "epsilon": plan.epsilon, "accountant": plan.accountant}
    stated = certificate(header, [])
    assert check(header, [], stated) == []
    earlier = {name: value for name, value in stated.items() if name not in (COMPOSED, ODDS)}
    said = {*ALWAYS, WHO, ATTENDANCE, RECORDS[0], RECORDS[1]}
    earlier["outside"] = [text for text in stated["outside"] if text in said]
    assert len(earlier["outside"]) < len(stated["outside"])
    assert check(header, [], earlier) == []
    assert check(header, [], {**stated, "outside": earlier["outside"]}) != []
    assert check(header, [], {**earlier, "outside": earlier["outside"][1:]}) != []
