"""Record level: what each method does, by hand, and that no client can break a round or spend more than its budget."""

import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import ConfigRecord, RecordDict
from kit.toy_grids import Kept, lying
from kit.toys import UP, strategy_of
from test_toy import APART, CLIENTS, CONFIG, LAYOUT, LR, towards

from coterie.client.answer import handle
from coterie.client.app import _handle
from coterie.client.budget import spend
from coterie.client.cohort import Cohort
from coterie.client.identity import Client
from coterie.client.state import ClientError
from coterie.engine.in_process import LocalGrid
from coterie.privacy import (
    ClientLedger,
    Event,
    LedgerError,
    NoPrivacy,
    PrivacyError,
    RecordLevel,
    RecordPlan,
    ReleasedUpdates,
    Streams,
    certificate,
    epsilon,
    selection_event,
)
from coterie.privacy.check import check
from coterie.privacy.ledger_lines import event_of, read_ledger
from coterie.server.metrics import summarise
from coterie.strategies import FCDPFL, KMCDPFL, LCFL, RCDPFL, Aggregator, FedAvg, Oracle, StrategyError
from coterie.strategies.oracle import OracleSettings
from coterie.wire import ClientConfig, LossesRequest, TrainRequest
from coterie.wire.messages import pack_models, pack_update, unpack_models
from coterie.wire.requests import parse_plans

RECORDS = 5
GROUPS = [0, 1] * 4


def client_plan(rounds=1, noise=0.05, choices=0, **numbers):
    """Nearly no noise: what happens can be worked out by hand."""
    numbers = {"epsilon": 1e9, "first_batch_size": RECORDS, **numbers}
    return RecordPlan(
        num_examples=RECORDS,
        batch_size=RECORDS,
        rounds=rounds,
        delta=1e-5,
        noise_multiplier=noise,
        clip_norm=1.0,
        selection="gumbel" if choices else "none",
        selections=choices,
        selection_epsilon=20.0,
        **numbers,
    )


def plan(k, rounds=1, weights="examples", plans=None, **numbers):
    plans = plans or (client_plan(rounds, **numbers),)
    return RecordLevel.of(tuple(plans), clients=CLIENTS, num_clusters=k, weights=weights)


def train(method, plan, start, folder, rounds=1, grid=None, config=CONFIG, **options):
    options = {"evaluate_metrics_aggr_fn": summarise, "streams": Streams(0), "registration_timeout": 0.0} | options
    strategy = strategy_of(method, plan, **options)
    grid = grid or LocalGrid(CLIENTS)
    config = ConfigRecord({"loss-bound": 4.0, **config, "groups": "4:4", "clients-dir": str(folder)})
    result = strategy.start(grid, pack_models(np.asarray(start, np.float32), LAYOUT), rounds, train_config=config)
    return unpack_models(result.arrays)[0], result, strategy


def collected(**rows):
    """What a phase gives that collects."""
    return ReleasedUpdates(charge=1, epsilon=1.0, **{"assigned": rows.get("labels"), **rows})


STEP = towards(0.5)  # of a client whose model knows nothing
# Noise of one step: z c lr / N in every coordinate; four clients' mean halves it.
TOLERANCE = 5 * 0.05 * LR / RECORDS / 2 + 1e-5


def test_one_model_for_all_is_the_weighted_mean(tmp_path):
    models, result, _ = train(FedAvg, plan(1), np.zeros((1, 4)), tmp_path)
    np.testing.assert_allclose(models[0], 0, atol=TOLERANCE)  # as many pull up as down
    assert result.evaluate_metrics_clientapp[1]["accuracy"] == 0.5


def test_weights_are_public_numbers_of_records(tmp_path):
    small = RecordPlan(**{**client_plan().__dict__, "num_examples": 1, "batch_size": 1, "first_batch_size": 1})
    every_other = plan(1, plans=[client_plan(), small])  # clients 0, 2, ... have 5 records, clients 1, 3, ... one
    assert every_other.weight_of_clients().tolist() == [5, 1] * 4
    assert plan(1, plans=[client_plan(), small], weights="equal").weight_of_clients().tolist() == [1] * 8
    models, *_ = train(FedAvg, every_other, np.zeros((1, 4)), tmp_path)
    np.testing.assert_allclose(models[0], (5 - 1) / 6 * STEP, atol=3 * TOLERANCE)  # those with 5 pull up
    alike = plan(1, plans=[client_plan(), small], weights="equal")
    models, *_ = train(FedAvg, alike, np.zeros((1, 4)), tmp_path / "alike")
    np.testing.assert_allclose(models[0], 0, atol=8 * TOLERANCE)
    with pytest.raises(PrivacyError, match="weights must be examples or equal"):
        plan(1, weights="loud")


def test_the_oracle_trains_true_groups_from_the_first_round(tmp_path):
    models, result, _ = train(Oracle, plan(2), np.zeros((1, 4)), tmp_path, true_groups=GROUPS)
    np.testing.assert_allclose(models, [STEP, -STEP], atol=TOLERANCE)
    assert result.evaluate_metrics_clientapp[1]["clustering_accuracy"] == 1.0
    with pytest.raises(StrategyError, match="set clusters to 2"):
        Oracle(plan(1), true_groups=GROUPS)


def test_clients_alone_have_a_released_model_each_with_the_noise_of_one(tmp_path):
    models, _, strategy = train(Oracle, plan(CLIENTS), np.zeros((1, 4)), tmp_path, alone=True, true_groups=GROUPS)
    np.testing.assert_allclose(models, [STEP if group == 0 else -STEP for group in GROUPS], atol=2 * TOLERANCE)
    assert len({model.tobytes() for model in models}) == CLIENTS
    assert strategy.membership(1) == {client: client for client in range(CLIENTS)}
    shared = train(FedAvg, plan(1), np.zeros((1, 4)), tmp_path / "shared")[2]
    assert strategy.certificate()["epsilon"] == shared.certificate()["epsilon"]
    with pytest.raises(StrategyError, match=f"set clusters to {CLIENTS}"):
        Oracle(plan(2), OracleSettings(alone=True), true_groups=GROUPS)


def test_k_means_parts_clients_by_their_updates(tmp_path):
    models, result, strategy = train(KMCDPFL, plan(2, rounds=2), np.zeros((1, 4)), tmp_path, rounds=2)
    labels = strategy.state["labels"]
    assert set(labels[::2]) != set(labels[1::2])
    assert result.evaluate_metrics_clientapp[2]["clustering_accuracy"] == 1.0
    again = STEP + towards(1 / (1 + math.exp(-4 * LR / 2)))
    first = models[labels[0]]
    np.testing.assert_allclose(first, again, atol=3 * TOLERANCE)


def test_losses_part_clients_and_every_choice_is_charged(tmp_path):
    setting = plan(2, choices=1)
    models, result, strategy = train(FCDPFL, setting, APART, tmp_path)
    step = towards(1 / (1 + math.exp(-2)))
    np.testing.assert_allclose(models, [UP + step, -UP - step], atol=TOLERANCE)
    assert len(strategy.ledger.charges) == 2  # the gradients, and the choice
    _, charges = read_ledger(tmp_path / "client-3.ledger.jsonl")
    assert [charge["noise_multiplier"] for charge in charges] == [
        event.noise_multiplier for event in client_plan(choices=1).part(chooses=True)
    ]
    assert result.evaluate_metrics_clientapp[1]["groups_found"] == 2


def test_rc_dpfl_finds_groups_in_round_one_and_starts_round_two_as_it_was(tmp_path):
    start = np.full((1, 4), 0.1)
    models, result, strategy = train(RCDPFL, plan(2, rounds=8, choices=7), start, tmp_path, rounds=1)
    np.testing.assert_array_equal(models, np.repeat(start, 2, axis=0).astype(np.float32))  # line 9: next round
    pi = strategy.state["pi"]
    np.testing.assert_allclose(pi.max(axis=1), 1, atol=1e-6)
    assert set(pi[::2].argmax(axis=1)) != set(pi[1::2].argmax(axis=1))
    assert strategy.switch == 4  # (1 - 0) 8 / 2
    assert strategy.assignments(4) is not None
    assert strategy.assignments(5) is None  # then clients choose
    assert result.evaluate_metrics_clientapp[1]["clustering_accuracy"] == 1.0


def test_rc_dpfl_trains_the_groups_that_it_found(tmp_path):
    models, result, strategy = train(RCDPFL, plan(2, rounds=2, choices=1), np.zeros((1, 4)), tmp_path, rounds=2)
    mine = int(strategy.state["pi"][0].argmax())
    assert strategy.switch == 1
    # Round 2 is by loss, and both models are equal: whom a client chose is a coin. Models move along UP alone.
    along = models @ UP
    np.testing.assert_allclose(models, along[:, None] * UP, atol=0.05)
    longer, result, strategy = train(RCDPFL, plan(2, rounds=6, choices=5), np.zeros((1, 4)), tmp_path / "6", rounds=3)
    mine = int(strategy.state["pi"][0].argmax())
    second = STEP + towards(1 / (1 + math.exp(-2 * LR)))
    np.testing.assert_allclose(longer[mine], second, atol=3 * TOLERANCE)
    np.testing.assert_allclose(longer[1 - mine], -second, atol=3 * TOLERANCE)
    assert result.evaluate_metrics_clientapp[3]["groups_found"] == 2


def test_the_number_of_groups_can_be_found(tmp_path):
    setting = plan(1, rounds=4, choices=3)
    models, _, strategy = train(RCDPFL, setting, np.zeros((1, 4)), tmp_path, rounds=3, clusters=0)
    assert len(models) == 2
    assert strategy.plan.num_clusters == 2


def test_without_privacy_all_of_it_runs_as_well(tmp_path):
    for method, options in ((RCDPFL, {}), (KMCDPFL, {}), (FCDPFL, {}), (Oracle, {"true_groups": GROUPS})):
        setting = NoPrivacy(clients=CLIENTS, num_clusters=2, sampling_rate=1.0, rounds=6)
        start = APART if method is FCDPFL else np.zeros((1, 4))
        models, result, _ = train(method, setting, start, tmp_path / method.name, rounds=3, **options)
        assert result.evaluate_metrics_clientapp[3]["groups_found"] == 2
        np.testing.assert_allclose(models[0], -models[1], atol=1e-5)


# ---- clients that do not keep the contract ---------------------------------------------------------------------------


def many_records(content):
    content["reply"] = ConfigRecord({**content["reply"], "num-examples": 10**12})


def another_shape(content):
    content["update"] = pack_update(np.zeros(4, np.float32), type(LAYOUT)(LAYOUT.names, ((1, 2), (2,))))


def too_long(content):
    content["update"] = pack_update(np.full(4, 1.0, np.float32), LAYOUT)


def another_cluster(content):
    content["reply"] = ConfigRecord({**content["reply"], "label": 1, "redrawn-label": 1})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (another_shape, "expected float32"),
        (too_long, "the update has norm"),
        (another_cluster, "the server assigned cluster 0"),
    ],
)
def test_a_client_that_lies_is_left_out(change, reason, tmp_path):
    options = {"grid": lying(CLIENTS, change), "true_groups": GROUPS}
    models, _, strategy = train(Oracle, plan(2), np.zeros((1, 4)), tmp_path, **options)
    assert strategy.statistics.dropped.total() == 1
    assert reason in next(iter(strategy.statistics.dropped))
    np.testing.assert_allclose(models, [STEP, -STEP], atol=2 * TOLERANCE)  # the mean of the others


def test_what_a_client_says_of_its_records_is_not_believed(tmp_path):
    options = {"grid": lying(CLIENTS, many_records), "true_groups": GROUPS}
    lied, *_ = train(Oracle, plan(2), np.zeros((1, 4)), tmp_path / "l", **options)
    true, *_ = train(Oracle, plan(2), np.zeros((1, 4)), tmp_path / "t", true_groups=GROUPS)
    np.testing.assert_array_equal(lied, true)


def test_no_honest_client_is_too_long():
    rng = np.random.default_rng(0)
    setting = RecordPlan(num_examples=100, batch_size=10, rounds=2, epsilon=5.0, delta=1e-5, noise_multiplier=0.5)
    longest = setting.max_update_norm(50, lr=0.1)
    for _ in range(2000):  # the worst data: every gradient is the same vector of norm c
        records = rng.binomial(100, 0.1, size=10).sum()
        update = 0.1 / 10 * (np.eye(50)[0] * records + 0.5 * np.sqrt(10) * rng.standard_normal(50))
        assert np.linalg.norm(update) < longest
    assert longest < 0.1 / 10 * 10 * 10 * 4  # and the bound is of use


# ---- budgets ---------------------------------------------------------------------------------------------------------


def test_a_client_refuses_what_its_budget_does_not_allow_and_the_others_go_on(tmp_path):
    cheap = RecordPlan.calibrated(num_examples=RECORDS, batch_size=RECORDS, rounds=3, epsilon=50.0, delta=1e-5)
    ledger = ClientLedger(1e-5, 50.0, tmp_path / "client-2.ledger.jsonl", "pld")
    ledger.spend(1, cheap.planned())  # client 2 has spent all of it, in another run
    ledger.close()
    _, _, strategy = train(FedAvg, plan(1, plans=[cheap]), np.zeros((1, 4)), tmp_path, rounds=3)
    assert strategy.statistics.dropped.total() == 3
    assert "client 2 rejects the request: round 1 would raise epsilon" in next(iter(strategy.statistics.dropped))
    assert strategy.statistics.accepted == 3 * (CLIENTS - 1)


def test_a_charge_is_on_disk_and_a_repeated_round_is_another_one(tmp_path):
    setting = client_plan(rounds=2)
    events = setting.part(first=True)
    assert spend(Client(7), tmp_path, setting, 1, events) == 1
    assert spend(Client(7), tmp_path, setting, 1, events) == 2
    _, charges = read_ledger(tmp_path / "client-7.ledger.jsonl")
    assert [charge["round"] for charge in charges] == [1, 1]
    with pytest.raises(ClientError, match="requires a state folder"):
        spend(Client(7), None, setting, 1, events)
    with pytest.raises(ClientError, match="with another plan"):
        spend(Client(7, budget=(1.0, 1e-6)), tmp_path, setting, 1, events)  # its budget is set once


def test_a_deployed_client_s_own_budget_wins(tmp_path):
    plan = RecordPlan.calibrated(num_examples=100, batch_size=10, rounds=5, epsilon=8.0, delta=1e-4)
    reason = "client 1 rejects the request: round 1 would raise epsilon to .* above the budget of 0.01"
    with pytest.raises(ClientError, match=reason):
        spend(Client(1, budget=(0.01, 1e-4)), tmp_path, plan, 1, plan.part())
    _, charges = read_ledger(tmp_path / "client-1.ledger.jsonl")
    assert charges == []  # nothing was revealed
    assert Client(1, "x", (0.01, 1e-4)).budget == (0.01, 1e-4)


@pytest.mark.parametrize("losses", [False, True])
def test_the_plan_fits_its_budget_to_the_last_round(losses, tmp_path):
    own = {"first_batch_size": 60, "selection": "gumbel", "selections": 11}
    own = {"compared": 41, "loss_noise": 4.0, "models_per_message": 16} if losses else own
    plan = RecordPlan.calibrated(num_examples=60, batch_size=7, rounds=12, epsilon=3.0, delta=1e-4, **own)
    for number in range(1, 13):
        part = plan.part() if losses else plan.part(first=number == 1, chooses=number > 1)
        asked = [plan.losses(models) for models in (16, 16, 9)] if losses and number == 1 else []
        for events in (part, *asked):
            spend(Client(0), tmp_path, plan, number, events)
    for events in (plan.part(), *([plan.losses(16)] if losses else [])):
        with pytest.raises(ClientError, match="round 13"):
            spend(Client(0), tmp_path, plan, 13, events)


class Wary(LocalGrid):
    """Clients that trust nobody."""

    def __init__(self, folder, diagnostics=False):
        super().__init__(CLIENTS)
        self._folder, self._diagnostics = str(folder), diagnostics

    def _client(self, client_id):
        return Client(client_id, self._folder, (5.0, 1e-4), self._diagnostics, "record-level")


def test_a_client_with_a_budget_of_its_own_gives_nothing_away(tmp_path):
    none = NoPrivacy(clients=CLIENTS, num_clusters=2, sampling_rate=1.0, rounds=1)
    options = {"grid": Wary(tmp_path / "own"), "true_groups": GROUPS}
    _, result, strategy = train(Oracle, none, np.zeros((1, 4)), tmp_path, **options)
    assert strategy.statistics.accepted == 0
    reasons = " ".join(strategy.statistics.dropped)
    assert "guarantee = record-level refuses" in reasons
    assert "does not cover evaluation" in reasons
    assert not result.evaluate_metrics_clientapp
    unseeded = {key: value for key, value in CONFIG.items() if key != "seed"}
    honest = RecordPlan.calibrated(num_examples=RECORDS, batch_size=RECORDS, rounds=1, epsilon=4.9, delta=1e-4)
    for config, accepted in ((unseeded, CLIENTS), (CONFIG, 0)):
        grid = Wary(tmp_path / f"seed-{accepted}", diagnostics=True)
        terms = plan(2, plans=[honest])
        _, _, strategy = train(Oracle, terms, np.zeros((1, 4)), tmp_path, grid=grid, config=config, true_groups=GROUPS)
        assert strategy.statistics.accepted == accepted
    assert "a seed reveals the noise" in next(iter(strategy.statistics.dropped))
    for selection, choices in (("exact", 1), ("none", 0)):
        own = {"num_examples": RECORDS, "batch_size": RECORDS, "rounds": 1, "epsilon": 5.0, "delta": 1e-4}
        one = RecordPlan.calibrated(**own, selection=selection, selections=choices)
        grid = Wary(tmp_path / selection, diagnostics=True)
        terms = plan(2, plans=[one])
        _, result, strategy = train(FCDPFL, terms, APART, tmp_path, grid=grid, config=unseeded)
        assert strategy.statistics.accepted == 0
        assert "its plan does not cover the choice of a cluster by loss" in next(iter(strategy.statistics.dropped))
        assert result.evaluate_metrics_clientapp[1]["accuracy"] == 1.0  # that it agreed to
        assert not list((tmp_path / selection).glob("*.jsonl"))


@pytest.fixture
def done(monkeypatch):
    """Settings of DP-SGD that was asked for; nothing is trained."""
    found = []

    def train_nothing(model, layout, start, shards, coins, noises, settings, *, batched, below):
        found.append(settings[0])
        return np.zeros_like(start)

    monkeypatch.setattr("coterie.client.record_level.by_dpsgd", train_nothing)
    return found


def steps_of(ledger):
    """All charges, and of each round that for its steps."""
    _, charges = read_ledger(ledger)
    return charges, {each["round"]: each for each in charges if each.get("count", 1) > 1 or each["round"] == 1}


def test_what_a_client_does_is_what_it_was_charged_for(tmp_path, monkeypatch, done):
    chosen = []

    def choose_nothing(losses, bound, epsilon, rng):
        chosen.append((losses.noisy_sum(bound, np.zeros).shape, bound, epsilon))
        return 0

    monkeypatch.setattr("coterie.client.record_level.noisy_argmin", choose_nothing)
    # All updates are equal, so there are no groups: told two, the mixture takes the first it finds.
    terms = client_plan(rounds=3, choices=2)
    terms = replace(terms, batch_size=2, clip_norm=0.7, first_noise_multiplier=0.3, noise_multiplier=0.1)
    terms = replace(terms, local_epochs=3)
    train(RCDPFL, plan(2, plans=[terms]), np.zeros((1, 4)), tmp_path, rounds=3)
    charges, charged = steps_of(tmp_path / "client-0.ledger.jsonl")
    for number, settings in enumerate(done, 1):
        charge = charged[number]
        assert settings.batch_size / settings.num_examples == charge["sampling_rate"]
        assert settings.noise_multiplier == charge["noise_multiplier"]
        assert settings.steps == charge["count"]
        assert settings.clip_norm == 0.7
    assert [settings.batch_size for settings in done] == [5, 2, 2]
    assert [settings.noise_multiplier for settings in done] == [0.3, 0.1, 0.1]
    assert chosen
    assert set(chosen) == {((2,), 4.0, 20.0)}
    choices = [charge for charge in charges if charge["sampling_rate"] == 1 and charge["round"] > 1]
    assert {charge["noise_multiplier"] for charge in choices} == {selection_event(20.0).noise_multiplier}


def test_gradients_and_the_number_of_short_ones_share_the_charged_noise(tmp_path, done):
    terms = client_plan(rounds=3, choices=2, clip_share=0.2, clip_factor=0.8, first_noise_multiplier=0.3, noise=0.1)
    train(RCDPFL, plan(2, plans=[replace(terms, batch_size=2, local_epochs=3)]), np.zeros((1, 4)), tmp_path, rounds=3)
    _, charged = steps_of(tmp_path / "client-0.ledger.jsonl")
    noises = [0.3, 0.1, 0.1]
    assert [charged[number]["noise_multiplier"] for number in (1, 2, 3)] == noises
    for settings, noise in zip(done[:: len(done) // 3], noises, strict=True):
        assert settings.noise_multiplier == pytest.approx(noise / math.sqrt(0.8))
        assert settings.noise_of_norms == pytest.approx(noise / 2 / math.sqrt(0.2))
        assert settings.norm_threshold == pytest.approx(settings.clip_norm / 0.8)  # the norm follows the shares


@pytest.mark.parametrize("draw", ["noisy_argmin", "by_dpsgd"])
def test_a_charge_is_on_disk_before_anything_is_drawn(draw, tmp_path, monkeypatch):
    charged = []

    def power_cut(*arguments, **options):
        charged.append(len(read_ledger(tmp_path / "client-0.ledger.jsonl")[1]))
        raise RuntimeError("the power went out")

    monkeypatch.setattr(f"coterie.client.record_level.{draw}", power_cut)
    _, _, strategy = train(FCDPFL, plan(2, choices=1), APART, tmp_path)
    assert charged[0] == 2  # the gradients and the choice
    assert min(charged[1:]) > 2  # asked again alone, it was charged again before it drew
    assert strategy.statistics.accepted == 0


def test_no_record_of_a_real_client_makes_room_for_another(tmp_path):
    """Cut to N records, a client that holds more would put another one in a removed one's place."""
    terms = plan(2, plans=[replace(client_plan(), num_examples=3, batch_size=3, first_batch_size=3)])
    config, plans = ClientConfig.from_record({**CONFIG, "groups": "4:4"}), parse_plans(terms.record_plans)
    cohort = Cohort(config, TrainRequest(), plans, None, None, [Client(0)], None)
    assert len(cohort.shard(Client(0)).y) == 3  # a simulated one is given no more
    assert len(cohort.shard(Client(0, str(tmp_path))).y) == RECORDS


def test_a_release_at_record_level_must_be_paid_for():
    level = plan(2, choices=1)
    contributions, ledger = level.contributions(4), level.ledger()
    paid = ledger.charge_round(1, next(iter(level.worst.part())))
    level.release(paid, contributions, Streams(0), 1)
    with pytest.raises(LedgerError, match="already used"):
        level.release(paid, contributions, Streams(0), 1)
    with pytest.raises(LedgerError, match="no release of round 2"):
        level.release(ledger.charge_round(2, Event(0.5, 3.0)), contributions, Streams(0), 2)


@pytest.mark.parametrize("half", [{"epsilon": 2.0}, {"delta": 1e-5}])
def test_half_a_budget_is_refused(half):
    with pytest.raises(ClientError, match="the node configuration has errors"):
        _handle(None, SimpleNamespace(node_config={"client-id": 1, **half}))


def test_a_cluster_of_km_cdpfl_is_the_mean_of_where_its_members_ended():
    strategy = KMCDPFL(plan(2), streams=Streams(0))
    models = np.array([[0.0, 0, 0, 0], [10.0, 0, 0, 0]], np.float32)
    moving = strategy.round(1, models)
    next(moving)
    released = collected(
        clients=np.array([0, 1, 2, 3]),
        labels=np.array([0, 1, 0, 1]),
        weights=np.array([1.0, 3.0, 1.0, 1.0]),
        updates=np.array([[1.0, 5, 0, 0], [1.0, 5, 0, 0], [1.0, -5, 0, 0], [1.0, -5, 0, 0]], np.float32),
    )
    with pytest.raises(StopIteration) as done:
        moving.send(released)
    up = strategy.state["labels"][0]  # clients 0 and 1 moved up together, from two models
    assert strategy.state["labels"][:4].tolist() == [up, up, 1 - up, 1 - up]
    np.testing.assert_allclose(done.value.value[up], [(1 * 1 + 3 * 11) / 4, 5, 0, 0])
    np.testing.assert_allclose(done.value.value[1 - up], [(1 + 11) / 2, -5, 0, 0])


@pytest.mark.parametrize(("method", "options"), [(RCDPFL, {}), (KMCDPFL, {}), (Oracle, {"true_groups": GROUPS})])
def test_models_start_equal(method, options):
    strategy = strategy_of(method, plan(2), streams=Streams(0), **options)
    np.testing.assert_array_equal(strategy.initial_models(APART), APART[[0, 0]])
    assert FCDPFL(plan(2), streams=Streams(0)).initial_models(APART).tolist() == APART.tolist()


# ---- losses of each other's models (LCFL) ----------------------------------------------------------------------------

#: Eight first models and the untrained one, in messages of 4, 4 and 1; the noise on a mean loss is 0.03.
COMPARED = {"compared": 9, "models_per_message": 4, "loss_noise": 0.05}
BOUND_1 = {**CONFIG, "loss-bound": 1.0}


def tell(plans, models, bound=1.0, client=None, **changed):
    """What clients 0 and 1 answer to a message of models, or the one given."""
    level = plan(2, plans=plans) if plans else NoPrivacy(clients=CLIENTS, num_clusters=2, sampling_rate=1.0, rounds=1)
    request = LossesRequest(round=1, record_plans=level.record_plans, compared=len(models))
    config = {**CONFIG, **request.to_record(), "groups": "4:4", "loss-bound": bound, **changed}
    if config["seed"] is None:
        del config["seed"]
    models = np.asarray(models, np.float32)
    content = RecordDict({"models": pack_models(models, LAYOUT), "config": ConfigRecord(config)})
    answers = handle("query.losses", content, [client] if client else [Client(0), Client(1)])
    return [a if isinstance(a, ClientError) else a["update"]["losses"].numpy() for a in answers]


def loss_at(confidence):
    return -math.log(confidence)


def test_clusters_from_noisy_losses_by_hand_and_every_message_is_charged(tmp_path):
    setting = plan(2, rounds=2, **COMPARED)
    options = {"models_per_message": 4}
    models, result, strategy = train(LCFL, setting, np.zeros((1, 4)), tmp_path, 2, config=BOUND_1, **options)
    assert strategy.state["labels"].tolist() == GROUPS
    again = STEP + towards(1 / (1 + math.exp(-2 * LR)))
    np.testing.assert_allclose(models, [again, -again], atol=3 * TOLERANCE)
    assert result.evaluate_metrics_clientapp[2]["groups_found"] == 2
    client = setting.worst
    steps = next(iter(client.part()))
    messages = [next(iter(client.losses(m))) for m in (4, 4, 1)]
    assert [event_of(charge) for charge in strategy.ledger.charges] == [steps, *messages, steps]
    assert [event.noise_multiplier for event in messages] == pytest.approx([0.075, 0.075, 0.15])  # 0.05 sqrt(9 / m)
    _, charges = read_ledger(tmp_path / "client-3.ledger.jsonl")
    assert [event_of(charge) for charge in charges] == [steps, *messages, steps]
    assert [charge["round"] for charge in charges] == [1, 1, 1, 1, 2]
    assert strategy.ledger.events == client.planned()


def test_what_a_client_tells_is_clipped_and_divided_by_a_public_number(tmp_path):
    models = [np.zeros(4), UP, 0.1 * UP]
    own, other = [1 / 2, 1 / (1 + math.exp(-2)), 1 / (1 + math.exp(-0.2))], [1 / 2, 1 / (1 + math.exp(2)), None]
    other[2] = 1 - own[2]
    quiet, folder = client_plan(compared=3, loss_noise=0.05), {"clients-dir": str(tmp_path)}
    noise = 6 * 0.05 * math.sqrt(3) / RECORDS
    first, second = tell([quiet], models, **folder)
    np.testing.assert_allclose(first, [loss_at(p) for p in own], atol=noise)
    np.testing.assert_allclose(second, [min(loss_at(p), 1.0) for p in other], atol=noise)  # 2.1 is clipped
    assert not np.any(first == [np.float32(loss_at(p)) for p in own])
    twice = replace(quiet, num_examples=2 * RECORDS)  # 10 are public, and 5 are there
    np.testing.assert_allclose(tell([twice], models, **folder)[0], [loss_at(p) / 2 for p in own], atol=noise / 2)
    exact, _ = tell(None, models)
    np.testing.assert_allclose(exact, [loss_at(p) for p in own], atol=1e-6)


@pytest.mark.slow
def test_the_noise_of_a_client_s_losses_has_the_planned_scale(tmp_path):
    """L loss_noise sqrt(compared) / N, for a part of the models as well. Fails for one fresh seed in 10,000."""
    terms = client_plan(compared=4000, loss_noise=0.3, models_per_message=4000)
    for count, bound, seed in ((4000, 1.0, 0), (2000, 3.0, 1)):
        told = tell([terms], np.zeros((count, 4)), bound, seed=seed, **{"clients-dir": str(tmp_path / str(count))})
        for each in told:
            scale = bound * 0.3 * math.sqrt(4000) / RECORDS
            assert each.std() == pytest.approx(scale, rel=4 / math.sqrt(2 * count))
            assert each.mean() == pytest.approx(math.log(2), abs=4 * scale / math.sqrt(count))
        assert abs(np.corrcoef(told)[0, 1]) < 4 / math.sqrt(count)  # every client has its own


def test_a_repeated_message_has_fresh_noise(tmp_path):
    terms, models = client_plan(compared=2, loss_noise=1.0), np.zeros((2, 4))
    first = tell([terms], models, **{"clients-dir": str(tmp_path)})
    again = tell([terms], models, **{"clients-dir": str(tmp_path)})
    assert not np.isin(first, again).any()
    assert len(read_ledger(tmp_path / "client-0.ledger.jsonl")[1]) == 2


@pytest.mark.parametrize("loss", [math.inf, math.nan])
def test_a_model_that_diverged_has_a_loss_that_can_travel(loss):
    exact, _ = tell(None, [np.full(4, loss), UP])
    assert exact[0] == 1e6
    assert exact[1] == pytest.approx(math.log1p(math.exp(-2)))


def test_a_client_tells_no_losses_that_nobody_planned_or_that_it_cannot_pay_for(tmp_path):
    folder = {"clients-dir": str(tmp_path)}
    for answer, client in zip(tell([client_plan()], APART, **folder), (0, 1), strict=True):
        assert str(answer) == f"client {client} rejects the request: this plan does not cover losses of other models"
    assert not list(tmp_path.iterdir())
    small = client_plan(compared=2, loss_noise=5.0, epsilon=1.0)
    once = [tell([small], APART, **folder) for _ in range(12)]
    assert not any(isinstance(answer, ClientError) for answer in once[0])
    assert "client 1 rejects the request: round 1 would raise epsilon" in str(once[-1][1])
    _, charges = read_ledger(tmp_path / "client-1.ledger.jsonl")
    assert epsilon(Counter(map(event_of, charges)), 1e-5) <= 1.0


def test_a_client_with_a_budget_of_its_own_tells_losses_under_a_plan_and_without_a_seed_alone(tmp_path):
    wary = Client(0, str(tmp_path), (1.0, 1e-5), guarantee="record-level")
    asked = {"client": wary, "seed": None}
    (answer,) = tell(None, APART, **asked)
    assert "guarantee = record-level refuses" in str(answer)
    terms = client_plan(compared=2, loss_noise=8.0)
    (answer,) = tell([terms], APART, client=wary)
    assert "a seed reveals the noise" in str(answer)
    assert not list(tmp_path.iterdir())
    (answer,) = tell([terms], APART, **asked)
    assert answer.shape == (2,)
    (answer,) = tell([replace(terms, loss_noise=0.1)], APART, **asked)  # the plan's epsilon is not this client's
    assert str(answer) == "client 0 rejects the request: it exceeds the client's budget"


def test_losses_are_charged_on_disk_before_they_are_drawn(tmp_path, monkeypatch):
    charged = []

    def power_cut(*arguments):
        charged.append(len(read_ledger(tmp_path / "client-0.ledger.jsonl")[1]))
        raise RuntimeError("the power went out")

    monkeypatch.setattr("coterie.client.record_level.noisy_losses", power_cut)
    with pytest.raises(RuntimeError):
        tell([client_plan(compared=2)], APART, **{"clients-dir": str(tmp_path)})
    assert charged == [1]


class Latecomer(LocalGrid):
    """Client 5 registers after round 1."""

    rounds = 0

    def get_node_ids(self):
        return [n for n in super().get_node_ids() if n != 6 or self.rounds >= 2]

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        if messages and messages[0].metadata.message_type == "train":
            self.rounds = messages[0].content["config"]["round"]
        return super().send_and_receive(messages, timeout=timeout)


@pytest.mark.parametrize("metric", ["loss", "params", "gradcos"])
def test_late_clients_pay_by_themselves(metric, tmp_path):
    setting = plan(2, rounds=3, noise=0.2, **(COMPARED | {"loss_noise": 0.1} if metric == "loss" else {}))
    _, _, strategy = train(
        LCFL, setting, np.zeros((1, 4)), tmp_path, 3, Latecomer(CLIENTS), BOUND_1, models_per_message=4, metric=metric
    )
    assert strategy.state["labels"].tolist() == GROUPS
    steps = next(iter(setting.worst.part()))
    messages = [next(iter(setting.worst.losses(m))) for m in (4, 4)] if metric == "loss" else []
    assert [event_of(charge) for charge in strategy.ledger.charges] == [steps, *messages, steps, steps]
    _, charges = read_ledger(tmp_path / "client-5.ledger.jsonl")
    placed = next(iter(setting.worst.losses(2))) if metric == "loss" else steps
    assert [event_of(charge) for charge in charges] == [placed, steps]
    assert [charge["round"] for charge in charges] == [3, 3]


def test_an_unseeded_run_of_lcfl_is_certified_within_its_budget(tmp_path):
    unseeded = {key: value for key, value in BOUND_1.items() if key != "seed"}
    numbers = {"num_examples": RECORDS, "batch_size": RECORDS, "rounds": 2, "epsilon": 6.0, "delta": 1e-5}
    setting = plan(2, plans=[RecordPlan.calibrated(**numbers, **COMPARED | {"loss_noise": 3.0})])
    ledger = setting.ledger(tmp_path / "ledger.jsonl", seed=None)
    options = {"config": unseeded, "ledger": ledger, "streams": Streams(), "models_per_message": 4}
    _, _, strategy = train(LCFL, setting, np.zeros((1, 4)), tmp_path, 2, **options)
    ledger.close()
    assert strategy.statistics.accepted == strategy.statistics.asked == (1 + 3 + 1) * CLIENTS
    header, charges = read_ledger(tmp_path / "ledger.jsonl")
    paper = certificate(header, charges)
    assert paper["certified"] is True
    assert 5.9 < paper["epsilon"] <= 6.0
    assert paper["epsilon"] == pytest.approx(strategy.ledger.spent())
    assert check(header, charges, paper) == []
    assert check(header, [c for c in charges if c["charge"] != 4], paper) != []


def test_the_model_of_a_cluster_is_the_weighted_mean_of_its_members():
    strategy = strategy_of(LCFL, plan(2), streams=Streams(0), metric="params")
    moving = strategy.round(1, np.full((2, 4), 7.0, np.float32))
    phase = next(moving)
    assert list(phase.clients) == list(range(CLIENTS))
    released = collected(
        clients=np.array([0, 2, 3, 6]),
        labels=np.zeros(4, np.int64),
        weights=np.array([1.0, 3.0, 1.0, 1.0]),
        updates=np.array([[1.0, 5, 0, 0], [3.0, 5, 0, 0], [1.0, -5, 0, 0], [2.0, -5, 0, 0]], np.float32),
    )
    with pytest.raises(StopIteration) as done:
        moving.send(released)
    assert strategy.state["labels"].tolist() == [0, -1, 0, 1, -1, -1, 1, -1]
    np.testing.assert_allclose(done.value.value - 7, [[(1 + 3 * 3) / 4, 5, 0, 0], [1.5, -5, 0, 0]])


def adaptive(rounds, **numbers):
    return plan(1, rounds, clip_share=0.5, clip_factor=0.5, **numbers)


def recorded(tmp_path, rounds, plan, grid=None, **options):
    recorder = Kept()
    _, _, strategy = train(FedAvg, plan, np.zeros((1, 4)), tmp_path, rounds, grid, recorder=recorder, **options)
    return [line["clip_norm"] for line in recorder.lines], recorder.states, strategy


def test_the_clipping_norm_of_gradients_follows_their_norms(tmp_path):
    """All gradients are shorter than the first threshold of 2, so c shrinks from 1."""
    norms, states, strategy = recorded(tmp_path, 4, adaptive(4))
    assert norms[0] == 1.0
    assert norms[1] == pytest.approx(math.exp(-0.2 * 0.5), rel=1e-2)
    assert strategy.plan.clip_norm == strategy.plan.of_client(3).clip_norm < norms[-1]
    again, _, _ = recorded(tmp_path / "again", 4, adaptive(4), resume_from=states[2])
    assert again == pytest.approx(norms[2:], rel=1e-2)


def dishonest(share):
    """A grid in which client 0 sends another share."""

    def change(content):
        del content["reply"]["below"]
        if share is not None:
            content["reply"]["below"] = share

    return lying(CLIENTS, change)


@pytest.mark.parametrize("share", [1e300, -1e300])
def test_one_client_moves_the_clipping_norm_by_at_most_its_part(tmp_path, share):
    norms, _, _ = recorded(tmp_path, 2, adaptive(2), dishonest(share))
    honest = math.exp(-0.2 * 0.5)
    assert honest * 0.99 <= norms[1] <= honest * math.exp(0.2 / CLIENTS) * 1.01


def test_with_a_robust_aggregator_one_client_does_not_move_the_clipping_norm(tmp_path):
    norms, _, _ = recorded(tmp_path, 2, adaptive(2), dishonest(-1e300), aggregator=Aggregator("median"))
    assert norms[1] == pytest.approx(math.exp(-0.2 * 0.5), rel=1e-3)


@pytest.mark.parametrize("share", [math.nan, math.inf, 1, "many", None])
def test_a_reply_with_an_invalid_share_is_dropped(tmp_path, share):
    norms, _, strategy = recorded(tmp_path, 2, adaptive(2), dishonest(share))
    assert sum(strategy.statistics.dropped.values()) == 2
    assert norms[1] == pytest.approx(math.exp(-0.2 * 0.5), rel=1e-2)
