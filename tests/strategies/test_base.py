"""The frame of a round: who counts, what is charged when, and what a hostile or absent client can do (nothing)."""

import json
import logging
import math
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from kit.toy_grids import Answering, Kept, changing, quiet, reply_to
from kit.toys import UP, Correlated

from coterie.privacy import (
    Joint,
    Ledger,
    NoPrivacy,
    Plan,
    PrivacyError,
    ReleasedSums,
    RRSlot,
    Streams,
    calibrate,
    certificate,
    epsilon,
    read_ledger,
)
from coterie.privacy.ledger_lines import event_of
from coterie.server import RunConfig, RunFolder
from coterie.strategies import (
    IFCA,
    Checkpoint,
    ClusteredStrategy,
    FedAvg,
    Reseeding,
    StrategyError,
    StrategyOptions,
    SumsPhase,
)
from coterie.strategies.registry import STRATEGIES
from coterie.wire import TrainRequest
from coterie.wire.messages import Layout, pack_models, pack_update, unpack_models

LAYOUT = Layout(("output.weight", "output.bias"), ((2, 1), (2,)))
CLIENTS = 8
ZERO = pack_models(np.zeros((1, 4), np.float32), LAYOUT)


def nothing(**shape):
    return NoPrivacy(**{"clients": CLIENTS, "num_clusters": 1, "sampling_rate": 1.0, "rounds": 1} | shape)


def private(noise=0.5, rounds=1, budget=math.inf, k=1, mechanism=Joint, **numbers):
    shape = {"clients": CLIENTS, "num_clusters": k, "sampling_rate": 1.0, "rounds": rounds, "clip_norm": 0.5}
    privacy = {"epsilon": budget, "delta": 1e-5, "noise_multiplier": noise, "identifier_share": 0.5}
    return mechanism(**shape | privacy | numbers)


class Stub(Answering):
    """Clients that send UP as their update, unless ``spoil`` makes something else of their reply."""

    def __init__(self, spoil=lambda client, content: [content], nodes=range(1, CLIENTS + 1)):
        super().__init__(CLIENTS)
        self.spoil, self.nodes, self.asked = spoil, nodes, []

    def get_node_ids(self):
        return self.nodes

    def answers(self, client, message):
        if message.metadata.message_type != "train":
            return [RecordDict({"reply": ConfigRecord({"client-id": client})})]
        self.asked.append(client)
        return self.spoil(client, reply_to(message, UP, LAYOUT).content)


def start(grid, plan=None, method=FedAvg, rounds=1, config=None, **options):
    plan = plan or nothing()
    strategy = method(plan, **quiet(**{"ledger": Ledger(plan.delta), **options}))
    result = strategy.start(grid, ZERO, rounds, train_config=ConfigRecord(config or {}))
    return unpack_models(result.arrays)[0][0], strategy


def changed(content, record, **values):
    content[record].update(values)
    return content


def array(name, values):
    zeros = {n: np.zeros(s, np.float32) for n, s in zip(LAYOUT.names, LAYOUT.shapes, strict=True)}
    return ArrayRecord({n: Array(found) for n, found in (zeros | {name: values}).items()})


def replaced(content, update):
    content["update"] = update
    return content


SPOILED = {
    "silence": lambda c: [],
    "nothing in it": lambda c: [RecordDict()],
    "another client": lambda c: [changed(c, "reply", **{"client-id": 5})],
    "another round": lambda c: [changed(c, "reply", round=9)],
    "impossible label": lambda c: [changed(c, "reply", label=99)],
    "negative label": lambda c: [changed(c, "reply", **{"redrawn-label": -1})],
    "label of another type": lambda c: [changed(c, "reply", label=True)],
    "NaN": lambda c: [replaced(c, array("output.bias", np.array([0, np.nan], np.float32)))],
    "infinity": lambda c: [replaced(c, array("output.bias", np.array([0, np.inf], np.float32)))],
    "another shape": lambda c: [replaced(c, array("output.bias", np.zeros(3, np.float32)))],
    "another type": lambda c: [replaced(c, array("output.bias", np.zeros(2)))],
    "a parameter too few": lambda c: [replaced(c, ArrayRecord({"output.bias": Array(np.zeros(2, np.float32))}))],
}


@pytest.mark.parametrize("kind", SPOILED)
@pytest.mark.parametrize("plan", [nothing(), private(), private(mechanism=RRSlot)], ids=["none", "joint", "rr-slot"])
def test_a_bad_reply_contributes_nothing_and_the_round_goes_on(kind, plan):
    bad = Stub(lambda client, content: SPOILED[kind](content) if client == 3 else [content])
    there, strategy = start(bad, plan)
    away, _ = start(Stub(nodes=[n for n in range(1, CLIENTS + 1) if n != 4]), plan)
    np.testing.assert_array_equal(there, away)
    assert strategy.statistics.accepted == 7
    assert len(strategy.ledger.charges) == 1


def test_a_huge_update_moves_a_model_by_the_clipping_norm_at_most():
    def spoil(client, content):
        huge = pack_update(np.full(4, 1e30 if client == 3 else 0.0, np.float32), LAYOUT)
        return [replaced(content, huge)]

    plan = private(noise=0.05)
    moved, _ = start(Stub(spoil), plan)
    noise = plan.noise_multiplier_updates * plan.clip_norm / CLIENTS
    assert np.linalg.norm(moved) < plan.clip_norm / CLIENTS + 6 * noise
    assert np.linalg.norm(moved) > plan.clip_norm / CLIENTS - 6 * noise


@pytest.mark.parametrize("value", [1e18, 3e38])
def test_without_clipping_an_update_that_overflows_is_dropped(value):
    huge = pack_update(np.full(4, value, np.float32), LAYOUT)
    moved, strategy = start(Stub(lambda client, content: [replaced(content, huge) if client == 3 else content]))
    np.testing.assert_allclose(moved, UP, rtol=1e-6)
    assert strategy.statistics.dropped == {f"the update has norm {2 * value:.4g}, expected at most 1e+18": 1}


def test_a_reply_that_comes_twice_counts_once():
    moved, strategy = start(Stub(lambda client, content: [content, content]))
    np.testing.assert_allclose(moved, UP)
    assert strategy.statistics.dropped.total() == CLIENTS


def test_reasons_and_names_are_kept_where_nothing_is_certified_and_a_total_where_it_is():
    spoil = Stub(lambda client, content: [changed(content, "reply", round=9)])
    assert list(start(spoil)[1].statistics.dropped) == ["round is 9, expected 1"]
    withheld = "withheld under client-level privacy: see the clients' logs"
    assert start(spoil, private(), streams=Streams())[1].statistics.dropped == {withheld: CLIENTS}


@pytest.mark.parametrize("said", [False, True, None, "no"])
def test_a_run_whose_clients_refuse_evaluation_says_so_before_round_1(caplog, said):
    def reserve(reply):
        """Odd clients state whether they accept requests for evaluation."""
        if "update" not in reply.content and said is not None and reply.content["reply"]["client-id"] % 2:
            reply.content["reply"]["evaluates"] = said

    grid = changing(Coming([2, 3, 4]), reserve)
    with caplog.at_level(logging.WARNING, "flwr"):
        start(grid, evaluate_every=1)
    warned = [r.getMessage() for r in caplog.records if "refuse evaluation" in r.getMessage()]
    assert [text.split(" (")[0] for text in warned] == [
        "2 of 3 registered clients refuse evaluation, which their guarantees do not cover"
    ] * (said is False)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "flwr"):
        start(changing(Coming([2, 3, 4]), reserve), evaluate_every=0)
    assert not [r for r in caplog.records if "refuse evaluation" in r.getMessage()]


HOSTILE = "a\x1b[2Jb\nround 9/9: epsilon 0.001\u202e" + "c" * 100_050


def test_text_of_clients_is_escaped_and_cut_where_it_is_kept(caplog):
    def spoil(client, content):
        if client % 2:
            return [changed(content, "reply", label=HOSTILE)]
        content["update"][HOSTILE] = content["update"]["output.bias"]
        return [content]

    recorder = Kept()
    with caplog.at_level(logging.WARNING, "flwr"):
        _, strategy = start(Stub(spoil), recorder=recorder)
    assert strategy.statistics.dropped.total() == CLIENTS
    kept = [*strategy.statistics.dropped, *recorder.lines[0]["replies"]["dropped"]]
    written = [record.getMessage() for record in caplog.records] + [record.reason for record in caplog.records]
    assert len(kept) == 4
    assert len(written) == 2 * (CLIENTS + 1)  # one of the round, in which no reply was valid
    for text in kept + written:
        assert text.isprintable()
        assert len(text) < 300


def test_reasons_of_errors_are_escaped_and_bounded_in_number():
    class Failing(Stub):
        def _answers(self, questions):
            for message in questions:
                if message.metadata.message_type == "train":
                    reason = f"{message.metadata.dst_node_id} {message.content['config']['round']} {HOSTILE}"
                    yield Message(Error(0, reason), reply_to=message)
                else:
                    yield from super()._answers([message])

    _, strategy = start(Failing(), nothing(rounds=20), rounds=20)
    assert strategy.statistics.dropped.total() == 20 * CLIENTS
    assert len(strategy.statistics.dropped) == 101
    assert strategy.statistics.dropped["other reasons"] == 20 * CLIENTS - 100
    assert all(reason.isprintable() and len(reason) <= 200 for reason in strategy.statistics.dropped)


def test_an_empty_cohort_is_a_round_too():
    plan = private(noise=1.0, sampling_rate=1e-9)
    grid = Stub()
    moved, strategy = start(grid, plan)
    assert grid.asked == []
    assert len(strategy.ledger.charges) == 1
    assert np.all(moved != 0)


def test_the_cohort_is_the_plan_s():
    plan = nothing(sampling_rate=0.5, rounds=40)
    grid = Stub()
    start(grid, plan, rounds=40)
    expected = [c for t in range(1, 41) for c in plan.sample(Streams(0).stream("cohort", t, t), t)]
    assert grid.asked == expected


def test_the_charge_is_written_before_the_release(monkeypatch):
    events = []
    charge, release = Ledger.charge_round, Plan.release
    monkeypatch.setattr(Ledger, "charge_round", lambda *a, **k: (events.append("charge"), charge(*a, **k))[1])
    monkeypatch.setattr(Plan, "release", lambda *a, **k: (events.append("release"), release(*a, **k))[1])
    start(Stub(), private(rounds=2), rounds=2)
    assert events == ["charge", "release"] * 2


def test_a_method_sees_nothing_but_what_was_released():
    seen = []

    class Curious(FedAvg):
        name = "curious"

        def round(self, number, models):
            steps = super().round(number, models)
            released = yield next(steps)
            seen.append(released)
            return self.step(models, released)

    plan = private(noise=0.2)
    start(Stub(), plan, Curious)
    (released,) = seen
    assert isinstance(released, ReleasedSums)
    exact = CLIENTS * 0.5 * (1 - 1e-6) * UP
    assert np.all(released.sums[0] != exact)
    assert np.abs(released.sums[0] - exact).max() < 6 * plan.noise_multiplier_updates * 0.5


def test_the_budget_stops_a_run_and_keeps_its_models():
    noise = calibrate(2.0, 1e-5, 1.0, 2)
    plan = private(noise=noise, rounds=4, budget=2.0)
    ledger = plan.ledger()
    moved, strategy = start(Stub(), plan, rounds=4, ledger=ledger)
    assert "round 3 would raise epsilon" in strategy.stopped
    assert len(ledger.charges) == 2
    assert ledger.spent() <= 2.0
    two, _ = start(Stub(), private(noise=noise, rounds=2, budget=2.0), rounds=2)
    np.testing.assert_array_equal(moved, two)


class Graded(Stub):
    """Clients that report an accuracy when they are asked to evaluate."""

    def __init__(self, accuracy, nodes=range(1, CLIENTS + 1)):
        super().__init__(nodes=nodes)
        self.accuracy = accuracy

    def answers(self, client, message):
        if message.metadata.message_type == "evaluate":
            return [RecordDict({"diagnostics": MetricRecord({"accuracy": self.accuracy, "cluster": 0, "group": 0})})]
        return super().answers(client, message)


def evaluated(accuracy, nodes=range(1, CLIENTS + 1), noise=1e-4, rounds=3, every=2):
    plan = private(rounds=rounds, noise=1.0, evaluations=2, evaluation_noise=noise)
    ledger = plan.ledger()
    strategy = FedAvg(plan, ledger=ledger, **quiet(evaluate="private", evaluate_every=every))
    return strategy.start(Graded(accuracy, nodes), ZERO, rounds), ledger, plan


def test_a_private_evaluation_is_charged_and_releases_a_noisy_mean_alone():
    result, ledger, plan = evaluated(0.75, noise=0.1)
    assert [charge["for"] for charge in ledger.charges] == ["training"] * 2 + ["evaluation", "training", "evaluation"]
    assert event_of(ledger.charges[2]) == plan.evaluation_event()
    assert sorted(result.evaluate_metrics_clientapp) == [2, 3]
    for metrics in result.evaluate_metrics_clientapp.values():
        assert set(metrics) == {"accuracy", "epsilon", "epsilon_rdp"}
        assert metrics["accuracy"] != 0.75
        assert metrics["accuracy"] == pytest.approx(0.75, abs=0.4)
    assert ledger.spent() == pytest.approx(epsilon(plan.planned(), plan.delta))


@pytest.mark.parametrize(
    ("accuracy", "present", "seen"), [(0.75, 8, 0.75), (1e9, 8, 1.0), (-3.0, 8, 0.0), (1.0, 4, 0.75)]
)
def test_a_client_counts_for_one_in_a_private_evaluation_and_an_absent_one_for_half(accuracy, present, seen):
    result, *_ = evaluated(accuracy, nodes=range(1, present + 1))
    assert result.evaluate_metrics_clientapp[3]["accuracy"] == pytest.approx(seen, abs=1e-3)


def test_private_evaluations_that_the_plan_does_not_pay_for_are_refused():
    with pytest.raises(StrategyError, match="covers 0 private evaluations"):
        FedAvg(private(rounds=3), evaluate="private")
    with pytest.raises(StrategyError, match="evaluate must be"):
        FedAvg(private(), evaluate="loud")


def test_what_a_method_does_not_support_is_refused_before_it_starts():
    class Peeking(IFCA):
        name = "peeking"
        row_wise = False

    with pytest.raises(
        StrategyError,
        match="peeking supports privacy-unit none, not 'client': its labels depend on the data of several clients",
    ):
        Peeking(private(k=2))
    Peeking(nothing(num_clusters=2))
    with pytest.raises(PrivacyError, match="at most qM/k = 4"):
        private(k=2, rebalance_min=5)
    with pytest.raises(PrivacyError, match="identifier-share above 0"):
        private(k=2, identifier_share=0.0, rebalance_min=2)
    with pytest.raises(StrategyError, match="identifier_share above 0"):
        IFCA(private(k=2, rounds=10, identifier_share=0.0), reseeding=Reseeding())
    with pytest.raises(StrategyError, match="identifier_share above 0"):
        IFCA(private(k=2, rounds=10, identifier_share=0.04, sizes_until=4), reseeding=Reseeding())
    IFCA(private(k=2, rounds=10, identifier_share=0.04, sizes_until=5), reseeding=Reseeding())
    IFCA(private(k=2, rounds=8, identifier_share=0.0), reseeding=Reseeding())  # the first would be after round 4.8


def test_a_method_that_does_not_declare_row_wise_is_refused_at_client_level():
    class Silent(ClusteredStrategy):
        name = "silent"
        title = "no declaration"

        def round(self, number, models):
            return self.step(models, (yield from self.sums(self.training(), models)))

    with pytest.raises(StrategyError, match="silent does not declare row_wise, as client-level privacy requires"):
        Silent(private())
    moved, _ = start(Stub(), nothing(), Silent)
    np.testing.assert_allclose(moved, UP)


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_method_declares_row_wise_itself(name):
    assert isinstance(vars(STRATEGIES[name])["row_wise"], bool)


@pytest.mark.parametrize(
    ("hook", "instead"),
    [
        ("configure_train", "round, or training for the request alone"),
        ("aggregate_train", "round, or step for the update of the models alone"),
        ("configure_evaluate", "evaluation"),
        ("aggregate_evaluate", "evaluated"),
    ],
)
def test_a_subclass_that_overrides_a_hook_is_told_what_to_override_instead(hook, instead):
    with pytest.raises(TypeError, match=f"^Mine overrides {hook}, which no run calls: override {instead}$"):
        type("Mine", (FedAvg,), {hook: lambda *_: None})
    mixin = type("Mixin", (), {hook: lambda *_: None})
    with pytest.raises(TypeError, match=f"Mine overrides {hook}"):
        type("Mine", (mixin, FedAvg), {})
    assert callable(getattr(FedAvg, instead.partition(",")[0]))


class Twice(FedAvg):
    """Two exchanges in a round."""

    def round(self, number, models):
        first = yield from self.sums(self.training(), models)
        models = self.step(models, first)
        return self.step(models, (yield from self.sums(self.training(), models)))


def test_the_loop_and_the_hooks_release_the_same():
    plan = private(rounds=2)
    by_loop, strategy = start(Stub(), plan, Twice, rounds=2)
    hooked, arrays, grid = Twice(plan, streams=Streams(0), registration_timeout=0.0), ZERO, Stub()
    for number in (1, 2):
        updated = None
        while updated is None:
            messages = hooked.configure_train(number, arrays, ConfigRecord(), grid)
            assert isinstance(messages, list)
            updated, metrics = hooked.aggregate_train(number, grid.send_and_receive(messages))
        arrays = updated
    assert metrics["epsilon"] == hooked.ledger.spent()
    with pytest.raises(StrategyError, match="before configure_train"):
        hooked.aggregate_train(3, [])
    np.testing.assert_array_equal(by_loop, unpack_models(arrays)[0][0])
    assert len(strategy.ledger.charges) == len(hooked.ledger.charges) == 4
    assert strategy.statistics.accepted == hooked.statistics.accepted == 4 * CLIENTS


def test_options_are_one_object_or_keywords():
    options = StrategyOptions(server_lr=2.0, evaluate_every=0)
    assert FedAvg(nothing(), None, options, evaluate_every=3).options == replace(options, evaluate_every=3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'sever_lr'"):
        FedAvg(nothing(), sever_lr=2.0)


@pytest.mark.parametrize(
    ("name", "option"), [("oracle", "true_groups"), ("kfed", "example_shape"), ("ffcm", "clusters")]
)
def test_an_option_that_a_method_needs_is_named(name, option):
    options = {"example_shape": (2,)} if option == "clusters" else {}
    with pytest.raises(StrategyError, match=f"{name} requires the option {option}"):
        STRATEGIES[name](nothing(), **options)


@pytest.mark.parametrize("name", ["plan", "layout", "histogram", "stopped"])
def test_the_state_of_a_run_is_not_written_from_outside(name):
    with pytest.raises(AttributeError):
        setattr(FedAvg(nothing()), name, None)


def correlated():
    shape = {"clients": CLIENTS, "num_clusters": 1, "sampling_rate": 1.0, "rounds": 3}
    return Correlated(**shape)


def test_the_state_of_a_mechanism_lives_as_long_as_its_run(monkeypatch):
    created, new_state = [], Correlated.new_state
    monkeypatch.setattr(Correlated, "new_state", lambda plan: created.append(new_state(plan)) or created[-1])
    moved, strategy = start(Stub(), correlated(), rounds=3)
    assert len(created) == 1
    assert created[0]["rounds"] == 3
    np.testing.assert_allclose(moved, 3 * UP + created[0]["last"][0, 0] / CLIENTS, rtol=1e-5)
    assert [charge["count"] for charge in strategy.ledger.charges] == [2, 2, 2]  # both groups, in one cohort
    start(Stub(), correlated(), rounds=3)
    assert len(created) == 2


def test_the_state_of_a_mechanism_never_reaches_the_disk(tmp_path):
    plan = correlated()
    with closing(RunFolder.create(tmp_path / "run", RunConfig({"clients": CLIENTS, "rounds": 3}))) as folder:
        ledger = plan.ledger(tmp_path / "ledger.jsonl")
        _, strategy = start(Stub(), plan, rounds=3, recorder=folder, ledger=ledger)
        ledger.close()
    last = strategy.run.mechanism_state["last"].ravel()
    forms = {value.astype(kind).tobytes() for value in last for kind in (np.float32, np.float64)}
    forms |= {repr(float(value)).encode() for value in last}
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) >= 4
    assert not [form for form in forms for content in files if form in content]
    resumed = FedAvg(plan, recorder=Kept(), resume_from=Checkpoint(3, np.zeros((1, 4), np.float32), LAYOUT, None))
    assert resumed.run.mechanism_state == {"last": 0.0, "rounds": 0}


# ---- who is there ----------------------------------------------------------------------------------------------------


class Coming(Stub):
    """Nodes come and go: ``there`` says which are registered before each round; two of them can be one client."""

    def __init__(self, *there, client_of=lambda node: node - 1):
        super().__init__(nodes=there[0])
        self.there, self.client_of, self.rounds, self.greeted = there, client_of, [], []

    def _answers(self, questions):
        for message in questions:
            node = message.metadata.dst_node_id
            if message.metadata.message_type == "query.identity":
                self.greeted.append(node)
                content = RecordDict({"reply": ConfigRecord({"client-id": self.client_of(node)})})
                yield Message(content, reply_to=message)
                continue
            number = message.content["config"]["round"]
            while len(self.rounds) < number:
                self.rounds.append([])
                self.nodes = self.there[min(len(self.rounds), len(self.there) - 1)]
            self.rounds[-1].append(node)
            said = {"client-id": self.client_of(node), "round": number, "label": 0, "redrawn-label": 0}
            update = pack_update(UP.astype(np.float32), LAYOUT)
            yield Message(RecordDict({"update": update, "reply": ConfigRecord(said)}), reply_to=message)


@pytest.mark.parametrize("method", [FedAvg, IFCA])
@pytest.mark.parametrize("plan", [nothing(rounds=3), private(rounds=3)], ids=["none", "joint"])
def test_a_late_node_takes_part_from_the_round_after_it_registered(method, plan):
    grid = Coming([2, 3], [2, 3, 7], [2, 3, 7])
    _, strategy = start(grid, plan, method, rounds=3)
    assert grid.rounds == [[2, 3], [2, 3, 7], [2, 3, 7]]
    assert grid.greeted == [2, 3, 7]  # once each
    assert strategy.present == [1, 2, 6]
    assert strategy.statistics.accepted == 8


def test_a_later_node_that_claims_a_client_expels_no_other(caplog):
    twins = {4: 3, 20: 3, 2: 1, 30: 99}
    there = [2, 4], [2, 4, 20, 30], [2, 4, 20, 30], [2, 20], [2, 4, 20]
    grid = Coming(*there, client_of=twins.__getitem__)
    with caplog.at_level(logging.WARNING, "flwr"):
        _, strategy = start(grid, nothing(rounds=5), rounds=5)
    assert grid.rounds == [[2, 4], [2, 4], [2, 4], [2, 20], [2, 4]]  # node 20 while node 4 is offline
    assert strategy.present == [1, 3]  # 99 is none of the eight clients
    (warning,) = [r.getMessage() for r in caplog.records if "it claims" in r.getMessage()]
    assert warning.startswith("ignoring node 20: it claims client-id 3, which node 4 was registered with before")


def test_a_node_is_the_one_that_was_asked_whatever_its_reply_claims():
    def pose(reply):
        """Node 3 claims in its reply to be node 2, and client 1."""
        if reply.metadata.src_node_id == 3:
            reply.metadata.__dict__["_src_node_id"] = 2

    grid = changing(Coming([2, 3], client_of={2: 1, 3: 5}.__getitem__), pose)
    _, strategy = start(grid)
    assert strategy.present == [1, 5]
    assert grid.rounds == [[2, 3]]


@pytest.mark.parametrize("client", [HOSTILE, [1, 2], 1.0, True, -1, CLIENTS, None])
def test_a_client_id_that_is_none_is_left_out_and_logged_in_one_line(client, caplog):
    def claim(reply):
        if reply.metadata.src_node_id == 3:
            record = ConfigRecord({} if client is None else {"client-id": client})
            reply.__dict__["_content"] = RecordDict({"reply": record})

    with caplog.at_level(logging.WARNING, "flwr"):
        _, strategy = start(changing(Coming([2, 3]), claim))
    assert strategy.present == [1]
    (text,) = [r.getMessage() for r in caplog.records if "ignoring node" in r.getMessage()]
    assert text.startswith("ignoring node 3: invalid client-id ")
    assert text.isprintable()
    assert len(text) < 250


def test_a_node_whose_error_is_hostile_text_is_logged_in_one_line(caplog):
    class Failing(Coming):
        def _answers(self, questions):
            for message in questions:
                if message.metadata.dst_node_id == 3:
                    yield Message(Error(0, HOSTILE), reply_to=message)
                else:
                    yield from super()._answers([message])

    with caplog.at_level(logging.WARNING, "flwr"):
        _, strategy = start(Failing([2, 3]))
    assert strategy.present == [1]
    texts = [r.getMessage() for r in caplog.records if "did not send its client-id" in r.getMessage()]
    assert texts
    assert all(text.startswith("node 3 ") and text.isprintable() and len(text) < 250 for text in texts)


def test_the_step_decays_from_round_to_round():
    class Rates(Stub):
        def _answers(self, questions):
            for message in questions:
                if message.metadata.message_type == "train":
                    seen.append(message.content["config"]["lr"])
            return super()._answers(questions)

    seen = []
    grid = Rates(nodes=[1])
    start(grid, nothing(rounds=3), rounds=3, config={"lr": 0.4, "lr-decay": 0.5})
    assert seen == [0.4, 0.2, 0.1]


class Done(FedAvg):
    """Nothing more to do once the model has moved twice."""

    name = "done"

    def round(self, number, models):
        models = yield from super().round(number, models)
        self.state = {"rounds": np.array([number])}
        return models

    @property
    def finished(self):
        return bool(self.state) and self.state["rounds"][0] >= 2


@pytest.mark.parametrize("plan", [nothing(rounds=3), private(rounds=3)], ids=["none", "joint"])
def test_each_round_s_traffic_is_counted_but_not_where_the_cohort_is_secret(plan):
    recorder = Kept()
    start(Stub(), plan, rounds=3, recorder=recorder)
    size = 2 * 128 + 4 * 4  # two arrays, with NumPy's headers
    counted = {"messages_down": 8, "messages_up": 8, "bytes_down": 8 * size, "bytes_up": 8 * size}
    expected = counted if plan.unit == "none" else {}
    if expected:
        expected |= {"clients_present": 8, "replies": {"asked": 8, "accepted": 8, "dropped": {}}}
    seen = {*counted, "clients_present", "replies"}
    assert [{key: line[key] for key in seen & line.keys()} for line in recorder.lines] == [expected] * 3


@pytest.mark.parametrize("every", [1, 5])
def test_a_run_that_is_finished_ends_early_and_evaluates_its_last_round(every):
    recorder = Kept()
    options = quiet(evaluate_every=every)
    strategy = Done(nothing(rounds=9), recorder=recorder, **options)
    result = strategy.start(Graded(0.5), ZERO, 9)
    np.testing.assert_allclose(unpack_models(result.arrays)[0][0], 2 * UP)
    assert sorted(result.evaluate_metrics_clientapp) == ([1, 2] if every == 1 else [2])
    assert sorted(result.train_metrics_clientapp) == [1, 2]
    assert [line["round"] for line in recorder.lines] == [1, 2]
    assert strategy.stopped is None
    # Killed between the release of its last round and the evaluation, it evaluates and trains no more.
    again = Done(nothing(rounds=9), recorder=Kept(), resume_from=recorder.states[-1], **options)
    resumed = again.start(Graded(0.5), ZERO, 9)
    np.testing.assert_allclose(unpack_models(resumed.arrays)[0][0], 2 * UP)
    assert sorted(resumed.evaluate_metrics_clientapp) == [2]
    assert not resumed.train_metrics_clientapp
    assert again.statistics.asked == 0


def test_sizes_of_other_clusters_are_forgotten():
    """A method that goes from one model to three: the running mean of sizes has no meaning for them."""

    class Growing(FedAvg):
        name = "growing"

        def round(self, number, models):
            yield from super().round(number, models)
            return np.zeros((1 if number < 3 else 3, 4), np.float32)

    _, strategy = start(Stub(), nothing(rounds=3), Growing, rounds=3)
    assert strategy.histogram is None
    assert strategy.plan.num_clusters == 3
    _, strategy = start(Stub(), nothing(rounds=4), Growing, rounds=4)
    assert strategy.histogram.tolist() == [8.0, 0.0, 0.0]


@pytest.mark.parametrize("key", ["redraw", "cluster", "choice", "record-plans", "round"])
def test_a_configuration_changes_no_request(key):
    """Clients would execute what no plan has priced."""
    with pytest.raises(
        StrategyError, match=f"the client configuration must not set {key}: the strategy sets these fields"
    ):
        start(Stub(), nothing(), FedAvg, config={key: 1})


def test_chosen_clients_are_never_summed():
    with pytest.raises(StrategyError, match="must be an UpdatesPhase"):
        SumsPhase(TrainRequest(), np.zeros((1, 4), np.float32), clients=[1])


def test_the_certificate_of_a_strategy_is_that_of_its_ledger(tmp_path):
    plan = private(noise=2.0, rounds=4, budget=50.0)
    _, strategy = start(Stub(), plan, rounds=2, streams=Streams(), evaluate_every=1)
    found = strategy.certificate()
    assert (found["certified"], found["charges"], found["rounds"]) == (True, 2, 4)
    assert found["epsilon"] == pytest.approx(epsilon({plan.event(): 4}, plan.delta))
    assert found["outside"][0] == "what clients send in evaluations, exact, and its means"
    assert json.loads(json.dumps(found)) == found
    _, quiet = start(Stub(), plan, rounds=1, streams=Streams(), evaluate_every=0)
    assert not any("evaluations" in each for each in quiet.certificate()["outside"])
    kept = plan.ledger(tmp_path / "ledger.jsonl", seed=None, tuned={"lr": 0.1})
    _, strategy = start(Stub(), plan, rounds=1, ledger=kept, streams=Streams())
    assert strategy.certificate()["tuned_outside"] == {"lr": 0.1}
    kept.close()
    header, charges = read_ledger(str(tmp_path / "ledger.jsonl"))
    assert strategy.certificate()["epsilon"] == certificate(header, charges)["epsilon"]


def test_a_seeded_strategy_is_never_certified():
    """Also if its ledger does not say so."""
    plan = private(noise=2.0, rounds=1, budget=50.0)
    _, strategy = start(Stub(), plan, ledger=plan.ledger(seed=None), streams=Streams(3))
    found = strategy.certificate()
    assert not found["certified"]
    assert "seeded noise (seed 3)" in found["reasons"][0]
