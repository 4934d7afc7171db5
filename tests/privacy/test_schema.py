"""privacy.schema.json describes every certificate, and nothing that only looks like one."""

import copy
import json
import math
from importlib.resources import files

import jsonschema
import pytest

from coterie.audit.printed import Paper
from coterie.privacy import (
    PLANS,
    Banded,
    Event,
    Joint,
    Ledger,
    NoPrivacy,
    RecordPlan,
    RRSlot,
    Secure,
    SharedBudget,
    certificate,
)
from coterie.privacy.accounting import ACCOUNTANTS
from coterie.privacy.mechanisms import IDENTIFIERS
from coterie.privacy.record import SELECTIONS

SCHEMA = json.loads(files("coterie.privacy").joinpath("privacy.schema.json").read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)

NUMBERS = {"clients": 100, "num_clusters": 2, "sampling_rate": 0.2, "rounds": 20, "clip_norm": 0.5}
RECORD = {"num_examples": 600, "batch_size": 30, "rounds": 10, "epsilon": 5.0, "delta": 1e-4}
ABOUT = {
    "seed": None,
    "diagnostics": ["exact accuracies"],
    "public": {"server-lr": 1.5, "reseed-every": 5},
    "tuned": {"lr": 0.2, "model": "mlp-32"},
}


def make(kind=Joint, **numbers):
    return kind.calibrated(**NUMBERS | {"epsilon": 4.0, "delta": 1e-4} | numbers)


def ledger_of(plan, **about):
    """As a run opens it: a client's plan is not yet one that opens its own."""
    about = ABOUT | about
    if isinstance(plan, RecordPlan):
        return Ledger(plan.delta, plan.epsilon, accountant=plan.accountant, about={"plan": plan.terms(), **about})
    return plan.ledger(**about)


def run(plan, events=None, **about):
    """The certificate of a run in memory, after a round trip through JSON."""
    ledger = ledger_of(plan, **about)
    for number, event in enumerate(plan.planned().elements() if events is None else events, start=1):
        ledger.charge_round(number, event)
    header = {"plan": plan.terms(), **ABOUT, **about}
    return json.loads(json.dumps(certificate(header, ledger.charges), allow_nan=False))


def valid(document):
    assert [error.message for error in VALIDATOR.iter_errors(document)] == []
    return document


@pytest.fixture(scope="module")
def joint():
    return make()


@pytest.fixture(scope="module")
def document(joint):
    return run(joint)


# ---- the schema itself ------------------------------------------------------------------------------------


def test_the_schema_is_one_and_says_something_of_every_field(document):
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["additionalProperties"] is False
    assert set(SCHEMA["required"]) == set(SCHEMA["properties"]) - {"started_from"} == set(document)
    charged = SCHEMA["$defs"]["releases"]
    public = SCHEMA["properties"]["public_inputs"]
    profile = SCHEMA["properties"]["profiles"]["items"]
    assert set(profile["required"]) == set(profile["properties"])
    shared = SCHEMA["properties"]["shared_budget"]
    assert set(shared["required"]) == set(shared["properties"])
    assert {*charged["required"], "slots"} == set(charged["properties"]) >= set(document["charged"][0])
    for where in (SCHEMA, charged, public, profile, shared):
        for name, field in where["properties"].items():
            assert field.get("description"), name
            assert "\n" not in field["description"]


def test_the_schema_knows_every_name():
    fields = SCHEMA["properties"]
    assert set(fields["mechanism"]["enum"]) == {*PLANS, RecordPlan.mechanism}
    assert set(fields["accountants"]["propertyNames"]["enum"]) == set(ACCOUNTANTS)
    public = fields["public_inputs"]["properties"]
    assert set(public["identifiers"]["enum"]) == set(IDENTIFIERS)
    assert set(public["selection"]["enum"]) == set(SELECTIONS)


def test_every_public_input_is_described():
    public = SCHEMA["properties"]["public_inputs"]["properties"]
    numbers = NUMBERS | {"epsilon": 4.0, "delta": 1e-4, "noise_multiplier": 2.0, "identifier_share": 0.2}
    plans = [*(plan(**numbers) for plan in (Joint, Banded, Secure, RRSlot)), RecordPlan(**RECORD, noise_multiplier=1.0)]
    for plan in plans:
        assert set(plan.terms()) <= set(public)


# ---- certificates that validate; what they say is tested in test_certificate.py ----------------------------


SPENT = [Event(0.2, 2.0)] * 3
CERTIFICATES = {
    "as planned": lambda: run(make()),
    "not begun": lambda: run(make(), []),
    "seeded": lambda: run(make(), seed=7),
    "recalibrated": lambda: run(make(), [*SPENT, Event(0.2, 2.5)]),
    "private evaluations": lambda: run(make(evaluations=4)),
    "exponential identifiers": lambda: run(make(RRSlot, rebalance_min=4, identifiers="exponential")),
    "the paper": lambda: run(make(Paper, rebalance_min=4, epsilon=8.0)),
    "no privacy": lambda: run(NoPrivacy(clients=10, num_clusters=1, sampling_rate=0.5, rounds=2)),
    **{
        name: lambda kind=kind: run(
            make(kind, epsilon=8.0), [make(kind, epsilon=8.0).round_event(n) for n in (1, 2, 3)]
        )
        for name, kind in PLANS.items()
        if kind is not NoPrivacy
    },
}


@pytest.mark.parametrize("made", CERTIFICATES.values(), ids=CERTIFICATES)
def test_the_certificate_of_every_run_is_valid(made):
    stated = valid(made())
    assert stated["certified"] is not bool(stated["reasons"])
    assert stated["mechanism"] == stated["public_inputs"]["mechanism"]


def test_runs_with_a_shared_budget_and_above_a_budget_are_valid(joint, tmp_path):
    header = {"plan": joint.terms(), **ABOUT}
    ledger = joint.ledger(**ABOUT)
    ledger.share(SharedBudget(tmp_path / "b", clients=100, sampler="poisson", epsilon=4.0, delta=1e-4))
    ledger.charge_round(1, joint.event())
    ledger.close()
    shared = valid(json.loads(json.dumps(certificate(header, ledger.charges))))
    assert shared["shared_budget"]["other_charges"] == 0
    charges = [{**vars(joint.event()), "charge": n, "round": n} for n in range(1, 31)]  # no ledger would take them
    above = valid(json.loads(json.dumps(certificate(header, charges))))
    assert above["certified"] is False


@pytest.mark.parametrize(("selection", "certified"), [("none", True), ("gumbel", True), ("exact", False)])
def test_records(selection, certified):
    plan = RecordPlan.calibrated(**RECORD, selection=selection, selections=9, first_batch_size=600)
    record = valid(run(plan))
    assert record["certified"] is certified
    assert record["unit"] == "record"
    assert [each["num_examples"] for each in record["profiles"]] == [600]
    assert len(record["charged"]) == (3 if selection == "gumbel" else 2)
    assert any("selection exact" in reason for reason in record["reasons"]) is not certified


def test_a_plan_without_a_budget():
    """Noise chosen by hand: what it costs is certified, whatever that is."""
    plan = Joint(**NUMBERS, epsilon=math.inf, delta=1e-4, noise_multiplier=1.0)
    free = valid(run(plan))
    assert free["epsilon_budget"] is None
    assert free["certified"] is True
    assert free["epsilon"] > 4


@pytest.mark.parametrize("kind", [Joint, RRSlot])
def test_an_infinite_epsilon_is_never_certified(kind):
    plan = kind(**NUMBERS, epsilon=math.inf, delta=1e-4, noise_multiplier=0.01, identifier_share=0.2)
    assert valid(run(plan))["certified"] is False


# ---- documents that do not --------------------------------------------------------------------------------

TAMPERED = {
    "certified in spite of a reason": {"reasons": ["the noise was seeded"]},
    "neither certified nor a reason": {"certified": False},
    "certified without a number": {"epsilon": None},
    "certified without a delta": {"delta": None},
    "certified by the paper": {"mechanism": "paper", "sampler": "fixed"},
    "certified by nothing": {"mechanism": "none", "unit": "none"},
    "certified by a theorem that is not sound": {"accountant": "RR-Cluster, Theorem 4.2"},
    "certified with nothing outside": {"outside": []},
    "certified with nothing covered": {"covers": []},
    "the wrong unit": {"unit": "record"},
    "the wrong sampler": {"sampler": "fixed"},
    "a unit that there is not": {"unit": "group"},
    "a mechanism that there is not": {"mechanism": "shuffle"},
    "a sampler that there is not": {"sampler": "shuffled"},
    "an accountant that there is not": {"accountants": {"moments": 1.0}},
    "no accountant": {"accountants": {}},
    "less than nothing spent": {"epsilon": -1.0},
    "a certain failure": {"delta": 1.0},
    "a word for a number": {"epsilon": "4"},
    "a word for a truth": {"certified": "yes"},
    "half a charge": {"charges": 0.5},
    "no rounds": {"rounds": 0},
    "a reason that says nothing": {"certified": False, "reasons": [""]},
    "an unknown field": {"guarantee": "strong"},
}


@pytest.mark.parametrize("change", TAMPERED.values(), ids=TAMPERED)
def test_a_tampered_certificate_is_rejected(document, change):
    assert not VALIDATOR.is_valid(document | change)


@pytest.mark.parametrize("field", sorted(SCHEMA["required"]))
def test_a_certificate_without_a_field_is_rejected(document, field):
    assert not VALIDATOR.is_valid({key: value for key, value in document.items() if key != field})


@pytest.mark.parametrize(
    "change",
    [
        {"sampling_rate": 0.0},
        {"sampling_rate": 1.5},
        {"noise_multiplier": -1.0},
        {"noise_multiplier": None},
        {"charges": 0},
        {"sampler": "shuffled"},
        {"epsilon": 1.0},
    ],
    ids=str,
)
def test_a_tampered_charge_is_rejected(document, change):
    other = copy.deepcopy(document)
    other["charged"][0] |= change
    assert not VALIDATOR.is_valid(other)


@pytest.mark.parametrize("change", [{"delta": None}, {"clients": 0}, {"clip_norm": 0}, {"divisor": "true"}], ids=str)
def test_a_tampered_public_input_is_rejected(document, change):
    other = copy.deepcopy(document)
    other["public_inputs"] |= change
    assert not VALIDATOR.is_valid(other)
