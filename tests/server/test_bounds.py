"""What the server accepts, clients accept: settings and fields of requests have the same bounds."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import ConfigRecord, RecordDict
from kit.tables import for_rows

from coterie.fields import MAX_PLANS, MAX_REDRAWN
from coterie.server import SETTINGS, ConfigError, RunConfig, planning
from coterie.strategies.registry import STRATEGIES
from coterie.wire import ClientConfig, LossesRequest, RequestError, TrainRequest, read_request
from coterie.wire.messages import Layout, pack_models
from coterie.wire.requests import parse_plans

SENT = {each.key: each for each in SETTINGS.values() if each.client}
NUMBERS = [each for each in SETTINGS.values() if each.kind in (int, float)]
RECORD = {"privacy-unit": "record", "samples-per-client": 40, "clients": 12, "groups": "2"}
# Settings whose allowed values depend on others, with a configuration that allows the extremes of their bounds.
NEEDED = {
    "aggregation.rebalance-min": {"clusters": 1, "clients": 12, "groups": "1"},
    **{name: {"strategy": "rc-dpfl", **RECORD} for name in SETTINGS if name.startswith("record-level.")},
    "training.batch-size": {"strategy": "rc-dpfl", **RECORD},
    "training.local-epochs": {"strategy": "rc-dpfl", **RECORD},
    "privacy.epsilon": {"strategy": "rc-dpfl", **RECORD},
    "privacy.clip-norm": {"strategy": "fesem"},
    "rounds": {"strategy": "rc-dpfl", **RECORD},
    "record-level.loss-noise": {"strategy": "lcfl", **RECORD},
    "data.samples-per-client": {"strategy": "rc-dpfl", "privacy-unit": "record", "clients": 12, "groups": "2"},
    "data.clients": {"privacy-unit": "none", "clusters": 1, "groups": "1"},
    "data.num-classes": {"dataset": "own", "input-shape": "4"},
    "max-clusters": {"clusters": 0, "clients": 20_000},
    "privacy.dropout": {"mechanism": "secure"},
    "privacy.corrupt": {"mechanism": "secure"},
    "rc-dpfl.components": RECORD,
}
# Clients of a run, and models of a message, of which a test is quick.
_MANY, _MANY_MODELS = 100_000, 64


def method_of(name):
    """The method that declares a setting, or IFCA."""
    methods = (method for method in STRATEGIES.values() if name in method.settings_class.named())
    return next((method.name for method in methods), "ifca")


def numbers(bounds, kind, rng):
    """Values at, near and between the ends of bounds; infinite ends are replaced."""
    low, high = max(bounds.low, -1e9), min(bounds.high, 1e9 if bounds.high == math.inf else bounds.high)
    if kind is int:
        step = 1
        inner = [low + step, high - step, *(int(low + (high - low) * share) for share in rng.random(3) ** 4)]
    else:
        inner = [math.nextafter(low, math.inf), math.nextafter(high, -math.inf), *rng.uniform(low, high, 3)]
        inner += [float(value) for value in np.geomspace(max(low, 1e-9), high, 4)]
    return [kind(value) for value in (low, high, *inner) if value in bounds]


def beyond(bounds, kind):
    """Values outside bounds."""
    ends = [value for value in (bounds.low, bounds.high) if math.isfinite(value)]
    values = [*(kind(end) + side for end in ends for side in (-1, 1)), -1e300, 1e300, 2**64]
    return [kind(value) for value in values if kind(value) not in bounds]


def requests_of(config):
    """Every request whose fields depend on settings, as the rounds of a run send it."""
    plan = planning.sketch(config)
    strategy = config.strategy(plan)
    if config.method.produces == "labels":
        return [strategy.request(), strategy.evaluation()]
    found = [strategy.training(), strategy.evaluation()]
    if plan.redraws and plan.rebalance_min:
        redraw = tuple(np.eye(config.models).ravel().tolist())
        found.append(replace(found[0], redraw=redraw, rebalance_train=config.aggregation.rebalance_train))
    if config.run.strategy == "lcfl":
        found.append(LossesRequest(compared=config.options.models_per_message))
    return [
        replace(each, round=number, record_plans=plan.record_plans)
        for each in found
        for number in (1, config.run.rounds)
    ]


def check_accepted(config):
    """Check that clients accept all requests of a run."""
    for request in requests_of(config):
        record = {**config.for_clients(), "clients-dir": "clients"}
        record["lr"] *= record["lr-decay"] ** (max(request.round, 1) - 1)
        record |= request.to_record()
        ClientConfig.from_record(record)
        parse_plans(request.record_plans)
        many = request.compared if isinstance(request, LossesRequest) else 1
        if many > _MANY_MODELS:
            assert type(request).from_record(record) == request
            continue
        models = pack_models(np.zeros((many, 1), np.float32), Layout(("w",), ((1,),)))
        content = RecordDict({"config": ConfigRecord(record), "models": models})
        assert read_request(request.message_type, content)[0] == request


@for_rows("key", SENT)
def test_a_client_accepts_every_value_that_a_setting_may_have(key):
    declared, rng = SENT[key], np.random.default_rng(0)
    if declared.kind is str:
        values = [declared.default, *declared.choices] + ([] if declared.choices else ["x" * int(declared.longest)])
    else:
        values = [declared.default, *numbers(declared.bounds, declared.kind, rng)]
    config = RunConfig({}).for_clients()
    for value in values:
        try:
            parsed = declared.parse(value)
        except ConfigError:
            continue  # a further check, such as the form of label-skew
        ClientConfig.from_record({**config, **({} if parsed is None else {key: parsed})})


@for_rows("declared", NUMBERS)
def test_a_client_accepts_the_requests_of_every_configuration(declared):
    rng, accepted = np.random.default_rng(1), 0
    base = {"strategy": method_of(declared.name), "evaluate": "off", **NEEDED.get(declared.name, {})}
    for value in numbers(declared.bounds, declared.kind, rng):
        if declared.key in ("clients", "validation-clients") and value > _MANY:
            continue
        try:
            config = RunConfig({**base, declared.name: value})
        except ConfigError:
            continue
        accepted += 1
        check_accepted(config)
    assert accepted


@for_rows("declared", NUMBERS)
def test_a_value_beyond_a_bound_is_refused_with_the_setting_and_the_bound(declared):
    for value in beyond(declared.bounds, declared.kind):
        with pytest.raises(ConfigError) as caught:
            RunConfig({"strategy": method_of(declared.name), declared.name: value})
        assert str(caught.value).startswith(f"{declared.name} = {value!r}: must be ")
        assert declared.allowed in str(caught.value)


def test_every_number_with_a_fraction_has_a_largest_value():
    unbounded = [each.name for each in NUMBERS if each.kind is float and not math.isfinite(each.bounds.high)]
    assert unbounded == []
    assert [each.name for each in NUMBERS if not math.isfinite(each.bounds.low)] == []


def test_texts_for_clients_have_the_same_longest_length():
    with pytest.raises(ConfigError, match=r"data\.data-dir has 4097 characters: must have at most 4096"):
        RunConfig({"data-dir": "x" * 4097})
    check_accepted(RunConfig({"data-dir": "x" * 4096}))
    with pytest.raises(RequestError, match="data-dir has 4097 characters"):
        ClientConfig.from_record({**RunConfig({}).for_clients(), "data-dir": "x" * 4097})


def test_seeds_are_exact():
    for seed in (2**53 + 1, 2**63 - 1):
        for given in (seed, str(seed)):
            config = RunConfig({"seed": given})
            assert config.seed == config.for_clients()["partition-seed"] == seed
            check_accepted(config)
    assert RunConfig({"seed": "1e3"}).seed == RunConfig({"seed": 1000.0}).seed == 1000


def test_a_step_size_does_not_decay_to_0():
    with pytest.raises(ConfigError, match=r"lr-decay = 1e-10: lr = 0\.2 falls to 0 by round 80"):
        RunConfig({"lr-decay": 1e-10})
    check_accepted(RunConfig({"lr-decay": 1e-4}))
    check_accepted(RunConfig({"lr-decay": 1e-10, "rounds": 20}))


def test_the_redraw_matrix_of_as_many_clusters_as_allowed_is_accepted():
    rebalanced = {"clients": 2000, "rebalance-min": 1.0}
    check_accepted(RunConfig({**rebalanced, "clusters": MAX_REDRAWN}))
    check_accepted(RunConfig({**rebalanced, "clusters": MAX_REDRAWN + 1, "rebalance-min": 0}))
    with pytest.raises(ConfigError, match="clusters = 101: clients redraw their labels among at most 100"):
        RunConfig({**rebalanced, "clusters": MAX_REDRAWN + 1})
    with pytest.raises(RequestError, match="redraw must be a list"):
        TrainRequest.from_record({"round": 1, "redraw": [0.0] * (MAX_REDRAWN**2 + 1)})


def test_a_request_holds_as_many_profiles_as_allowed():
    record = {"strategy": "rc-dpfl", **RECORD}
    (terms,) = json.loads(planning.sketch(RunConfig(record)).record_plans)
    TrainRequest(record_plans=json.dumps([terms] * MAX_PLANS)).to_record()
    with pytest.raises(ConfigError, match="profiles has 10001 profiles: must have at most 10000"):
        RunConfig({**record, "profiles": ";".join(["epsilon=2"] * (MAX_PLANS + 1))})
