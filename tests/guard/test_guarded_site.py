"""A guarded site: what it charges, what it sends, and what it refuses."""

import fcntl
import json
import math
import os
import signal
import sys
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from federation import (
    BATCH,
    QUIET,
    STEPS,
    TERMS,
    N,
    client_app,
    context,
    dp_training,
    epoch,
    message,
    net,
    private,
    records,
)
from flwr.app import Array, ArrayRecord, RecordDict
from kit.opacus_epsilons import opacus_epsilon
from kit.tables import for_rows
from opacus import PrivacyEngine
from opacus.optimizers import DPOptimizer
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch.utils.data import DataLoader

import coterie.audit.printed  # noqa: F401 - adds the mechanism of the paper
from coterie.client.budget import BUDGET_FILE, spend
from coterie.client.identity import Client
from coterie.fields import Bounds
from coterie.guard import REFUSAL, Guard, certificate
from coterie.guard.report import GUARD
from coterie.guard.watched_training import PoissonBatches, Watch, watched
from coterie.privacy import ClientLedger, Event, LedgerError, RecordPlan, epsilon, read_ledger
from coterie.privacy.ledger_lines import count_events

pytestmark = QUIET
RATE = BATCH / N
EPOCH = Counter({Event(RATE, 1.0): STEPS})


@pytest.fixture
def site(tmp_path):
    """A node's configuration."""
    return TERMS | {"state-dir": str(tmp_path / "site")}


def ledger(site):
    path = Path(site["state-dir"]) / "client-0.ledger.jsonl"
    return count_events(read_ledger(path)[1]) if path.exists() else Counter()


def ask(app, site, **changes):
    return app(message(**changes), context(**site))


def assert_refused(reply):
    assert reply.has_error()
    assert reply.error.reason == REFUSAL
    assert reply.error.code == 6


# ---- what is charged ----------------------------------------------------------------------------------------


def test_what_the_app_executes_is_charged_and_sent(site):
    seen = []

    def train(model, config):
        dp_training(model, config)
        seen.append({name: values.numpy().copy() for name, values in model.state_dict().items()})

    reply = ask(client_app(Guard(), train), site)
    assert not reply.has_error()
    assert ledger(site) == EPOCH
    arrays = {name: array.numpy() for name, array in reply.content["arrays"].items()}
    assert arrays.keys() == net().state_dict().keys()
    for name, values in arrays.items():
        np.testing.assert_array_equal(values, seen[0][name])
        assert not np.array_equal(values, net().state_dict()[name].numpy())
    assert set(reply.content) == {"arrays", "metrics", GUARD}
    assert dict(reply.content["metrics"]) == {"num-examples": N}  # neither the true number nor the loss


def test_epsilon_is_coteries_and_opacus(site):
    engines = []

    def train(model, config):
        engines.append(PrivacyEngine(accountant="rdp"))
        parts = private(model, engine=engines[-1])
        for _ in range(2):
            epoch(*parts)

    app = client_app(Guard(), train)
    for _ in range(2):
        assert not ask(app, site).has_error()
    delta = TERMS["delta"]
    document = certificate(Path(site["state-dir"]) / "client-0.ledger.jsonl")
    plan = RecordPlan(
        num_examples=N, batch_size=BATCH, rounds=2, local_epochs=2, noise_multiplier=1.0, epsilon=8.0, delta=delta
    )
    (rdp,) = (value for name, value in document["accountants"].items() if "RDP" in name)
    assert document["epsilon"] == pytest.approx(plan.cost(), rel=1e-9)
    assert rdp == pytest.approx(plan.cost("rdp"), rel=1e-9)
    assert [engine.accountant.history for engine in engines] == [[(1.0, RATE, 2 * STEPS)]] * 2
    opacus = PrivacyEngine(accountant="rdp").accountant
    opacus.history = engines[0].accountant.history + engines[1].accountant.history
    events = {Event(RATE, 1.0): 4 * STEPS}
    assert opacus.get_epsilon(delta) == pytest.approx(opacus_epsilon(events, delta, "rdp"), rel=1e-9)
    assert rdp == pytest.approx(opacus.get_epsilon(delta), rel=5e-3)  # other orders
    assert document["certified"]
    assert not any("several kinds" in line for line in document["assumed"])
    assert document["epsilon"] == pytest.approx(opacus_epsilon(events, delta, "prv"), abs=0.05)


def test_the_charge_is_on_disk_before_the_first_batch(site):
    charged = []

    def train(model, config):
        module, optimizer, loader = private(model)
        charged.append(ledger(site))
        for _ in loader:
            charged.append(ledger(site))
            break
        epoch(module, optimizer, loader)

    ask(client_app(Guard(), train), site)
    assert charged == [Counter(), EPOCH]


def test_less_noise_costs_more_and_the_server_cannot_hide_it(site):
    app = client_app(Guard())
    assert not ask(app, site, noise=2.0).has_error()
    assert_refused(ask(app, site, noise=0.4))
    assert ledger(site) == Counter({Event(RATE, 2.0): STEPS})
    for noise in (0.0, 0.05, 0.1, -1.0, math.nan, math.inf, 1e308, 1e-320):
        assert_refused(ask(app, site, noise=noise))
    assert ledger(site) == Counter({Event(RATE, 2.0): STEPS})


def test_rate_and_steps_do_not_depend_on_the_true_number_of_records(site, tmp_path):
    for count in (N - 1, N, N + 1, 3 * N):
        own = site | {"state-dir": str(tmp_path / str(count))}
        reply = ask(client_app(Guard()), own, count=count)
        assert ledger(own) == EPOCH
        assert reply.content["metrics"]["num-examples"] == N


def test_every_message_is_charged_also_a_repeated_one(site):
    app, same = client_app(Guard()), message()
    replies = [app(same, context(**site)) for _ in range(2)]
    assert ledger(site) == EPOCH + EPOCH
    first, second = (reply.content["arrays"]["0.weight"].numpy() for reply in replies)
    assert not np.array_equal(first, second)


def test_past_the_budget_nothing_is_trained_and_the_reply_tells_nothing(site, caplog):
    trained, replies = [], []

    def train(model, config):
        for batch in private(model)[2]:
            trained.append(batch)

    app = client_app(Guard())
    while not (reply := ask(app, site)).has_error():
        replies.append(reply)
    assert len(replies) > 2
    spent = ledger(site)
    assert epsilon(spent, 1e-3, "pld") <= 8.0
    assert epsilon(spent + EPOCH, 1e-3, "pld") > 8.0
    assert_refused(reply)
    assert "above the budget of 8" in caplog.text  # to the owner
    app = client_app(Guard(), train)
    assert_refused(ask(app, site))
    assert trained == []
    assert ledger(site) == spent


# ---- one budget for the data ----------------------------------------------------------------------------------


def test_two_apps_two_processes_and_coteries_client_share_one_budget(site, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    one = site | {"data": str(data)}
    other = one | {"state-dir": str(tmp_path / "other")}
    assert not ask(client_app(Guard()), one).has_error()
    assert not ask(client_app(Guard()), other).has_error()
    assert count_events(read_ledger(data / BUDGET_FILE)[1]) == EPOCH + EPOCH
    client = Client(5, str(tmp_path / "coterie"), (8.0, 1e-3), data=str(data))
    spend(client, tmp_path / "coterie", None, 1, EPOCH)
    assert count_events(read_ledger(data / BUDGET_FILE)[1]) == EPOCH + EPOCH + EPOCH
    assert certificate(data / BUDGET_FILE)["charges"] == 3


def test_another_budget_for_the_same_ledger_is_refused(site):
    app = client_app(Guard())
    assert not ask(app, site).has_error()
    assert_refused(ask(app, site | {"epsilon": 80.0}))
    assert_refused(ask(app, site | {"delta": 1e-2}))


def test_parallel_messages_are_all_charged(site):
    app, replies = client_app(Guard()), []
    threads = [threading.Thread(target=lambda: replies.append(ask(app, site))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not any(reply.has_error() for reply in replies)
    assert ledger(site) == EPOCH + EPOCH + EPOCH


def test_a_charge_waits_for_another_process(site):
    assert not ask(client_app(Guard()), site).has_error()
    replies = []
    with (Path(site["state-dir"]) / "client-0.ledger.jsonl.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=lambda: replies.append(ask(client_app(Guard()), site)))
        thread.start()
        thread.join(0.5)
        assert thread.is_alive()
        assert ledger(site) == EPOCH
    thread.join()
    assert not replies[0].has_error()
    assert ledger(site) == EPOCH + EPOCH


def killed_while_training(site):
    """Train in another process that dies in its first step, after the charge; the status of its end."""

    def train(model, config):
        parts = private(model)
        for _ in parts[-1]:
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        try:
            client_app(Guard(), train)(message(), context(**site))
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_kill_9_between_charge_and_reply_loses_no_charge(site):
    for attempt in (1, 2):
        assert killed_while_training(site) == -signal.SIGKILL
        assert ledger(site).total() == attempt * STEPS
    assert not ask(client_app(Guard()), site).has_error()
    assert ledger(site).total() == 3 * STEPS


# ---- what leaves ---------------------------------------------------------------------------------------------


def test_other_messages_are_answered_only_by_permission(site):
    app = client_app(Guard())
    for kind in ("evaluate", "query.records"):
        assert_refused(ask(app, site, kind=kind))
    assert ledger(site) == Counter()
    reply = ask(app, site | {"allow": "evaluate accuracy"}, kind="evaluate")
    assert dict(reply.content["m"]) == {"num-examples": N, "accuracy": 0.75}
    assert set(reply.content) == {"m", GUARD}
    reply = ask(app, site | {"allow": "query.records"}, kind="query.records")
    assert set(reply.content) == {GUARD}  # arrays never leave but by private training
    reply = ask(app, site | {"allow": "train_loss"})
    assert dict(reply.content["metrics"]) == {"num-examples": N, "train_loss": 0.125}
    document = certificate(Path(site["state-dir"]) / "client-0.ledger.jsonl")
    assert any("train_loss" in line for line in document["outside"])


def arrays_of(values):
    return ArrayRecord({name: Array(array) for name, array in values.items()})


def changed(**others):
    """A reply with further arrays, or others."""
    return lambda content: RecordDict({"arrays": ArrayRecord(dict(content["arrays"]) | others)})


extra_array = changed(record=Array(np.zeros(4, np.float32)))


def another_record(content):
    return RecordDict({**content, "more": ArrayRecord({"x": Array(np.zeros(1, np.float32))})})


def one_bit(content):
    arrays = {name: array.numpy().copy() for name, array in content["arrays"].items()}
    arrays["2.bias"][0] = np.nextafter(arrays["2.bias"][0], np.float32(9))
    return RecordDict({"arrays": arrays_of(arrays)})


def not_finite(content):
    nan = {name: array.numpy() * np.float32(np.nan) for name, array in content["arrays"].items()}
    return RecordDict({"arrays": arrays_of(nan)})


REPLIES = [extra_array, changed(**{"0.bias": Array(np.zeros(4, np.float32))}), another_record, one_bit, not_finite]


@for_rows("change", REPLIES)
def test_a_reply_that_private_training_did_not_produce(site, change):
    assert_refused(ask(client_app(Guard(), reply=change), site | {"epsilon": 80.0}))


def no_privacy(model, config):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    epoch(model, optimizer, DataLoader(records(), batch_size=8))


def per_layer_clipping(model, config):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = {"module": model, "optimizer": optimizer, "data_loader": DataLoader(records(), batch_size=8)}
    PrivacyEngine().make_private(**parts, noise_multiplier=1.0, max_grad_norm=[1.0] * 4, clipping="per_layer")


def no_batch_size(model, config):
    private(model, batch=None)


def too_large_batches(model, config):
    epoch(*private(model, batch=N + 1))


def exits(model, config):
    sys.exit("of a record")


def fails(model, config):
    raise ValueError("of a record")


@for_rows("train", [no_privacy, per_layer_clipping, no_batch_size, too_large_batches, exits, fails])
def test_training_that_is_not_private(site, train):
    """See test_faulty_apps.py for others."""
    assert_refused(ask(client_app(Guard(), train), site))


def test_an_error_that_the_app_hides_leaves_nothing_private(site):
    def train(model, config):
        try:
            epoch(*private(model, noise=0.01))  # beyond the budget
        except Exception:
            no_privacy(model, config)

    assert_refused(ask(client_app(Guard(), train), site))


def test_memory_manager_and_noise_schedules(site):
    def train(model, config):
        module, optimizer, loader = private(model)
        with BatchMemoryManager(data_loader=loader, max_physical_batch_size=3, optimizer=optimizer) as smaller:
            epoch(module, optimizer, smaller)
        optimizer.noise_multiplier = 0.9
        epoch(module, optimizer, loader)

    assert not ask(client_app(Guard(), train), site).has_error()
    assert ledger(site) == EPOCH + Counter({Event(RATE, 0.9): STEPS})
    assert "several kinds" in certificate(Path(site["state-dir"]) / "client-0.ledger.jsonl")["assumed"][-1]


def test_poisson_batches_whatever_the_app_asks_for(site):
    def train(model, config):
        epoch(*private(model, noise=2.0, batch=2, poisson_sampling=False))

    assert not ask(client_app(Guard(), train), site).has_error()
    assert ledger(site) == Counter({Event(2 / N, 2.0): N // 2})


def test_an_enormous_cost_is_refused_before_it_is_composed(site, monkeypatch):
    called = []
    monkeypatch.setattr("coterie.guard.mod.spend", lambda *args, **kwargs: called.append(args))
    assert_refused(ask(client_app(Guard()), site, noise=0.1))
    assert called == []
    assert not ask(client_app(Guard()), site, noise=0.5).has_error()
    assert len(called) == 1


def test_more_noise_multipliers_than_a_report_holds(site):
    def train(model, config):
        module, optimizer, loader = private(model)
        for step in range(17):
            optimizer.noise_multiplier = 30.0 + step
            epoch(module, optimizer, loader)

    assert_refused(ask(client_app(Guard(), train), site))
    assert ledger(site).total() == 17 * STEPS


def test_an_app_that_returns_the_received_model_pays_nothing(site):
    reply = ask(client_app(Guard(), lambda model, config: None), site)
    assert not reply.has_error()
    assert ledger(site) == Counter()


# ---- the mechanism ---------------------------------------------------------------------------------------------


def steps_of(model, lr=1.0, noise=1e-9, count=N, batch=N):
    """The sums of gradients of full batches: parameters before minus after."""
    before = {name: values.clone() for name, values in model.state_dict().items()}
    received = {name: values.numpy().copy() for name, values in before.items()}
    with pytest.MonkeyPatch.context() as patch, watched(Watch(received, N, lambda events: None)):
        patch.setattr("coterie.guard.terms._NOISES", Bounds(0.0, 1e6))
        epoch(*private(model, noise=noise, count=count, batch=batch, lr=lr))
    return torch.cat([(before[name] - values).flatten() for name, values in model.state_dict().items()]).double()


def test_without_noise_a_step_is_opacus_own():
    model = net()
    ours = steps_of(model)
    module, optimizer, _ = private(net(), noise=0.0, batch=N, lr=1.0)
    assert type(optimizer) is DPOptimizer
    x, y = records().tensors
    start = torch.cat([p.detach().flatten().clone() for p in module.parameters()])
    torch.nn.functional.cross_entropy(module(x), y).backward()
    optimizer.step()
    theirs = start - torch.cat([p.detach().flatten() for p in module.parameters()])
    torch.testing.assert_close(ours.float(), theirs, rtol=1e-4, atol=1e-6)


def test_one_record_of_any_gradient_moves_the_sum_by_at_most_the_clipping_norm():
    for scale in (1.0, 1e3, 1e30, math.inf, math.nan):
        model, shifted = net(), records().tensors[0].clone()
        shifted[0] *= scale
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "federation.records", lambda count, x=shifted: torch.utils.data.TensorDataset(x, records().tensors[1])
            )
            with_it = steps_of(model)
            rest = torch.utils.data.TensorDataset(shifted[1:], records().tensors[1][1:])
            patch.setattr("federation.records", lambda count, rest=rest: rest)
            without = steps_of(net())
        assert torch.isfinite(with_it).all()
        assert float((with_it - without).norm()) * N <= 1 + 1e-5  # the divisor is the public number


def test_the_noise_has_the_charged_scale_and_ignores_the_apps_seed():
    draws = []
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 2000), torch.nn.Tanh(), torch.nn.Linear(2000, 2))
        draws.append(steps_of(model, noise=2.0) * N)
    assert not torch.equal(*draws)
    z = draws[0] - draws[1]  # the sums cancel: the same data and start
    assert float(z.std()) / math.sqrt(2) == pytest.approx(2.0, rel=0.05)  # 14,002 numbers: 8 standard errors


def test_batches_are_poisson_samples():
    watch = Watch({}, 1000, lambda events: None)
    watch.optimizer = private(net())[1]
    torch.manual_seed(0)
    sizes = [len(batch) for batch in PoissonBatches(watch, 1000, 0.1, 400)]
    torch.manual_seed(0)
    assert sizes != [len(batch) for batch in PoissonBatches(watch, 1000, 0.1, 400)]
    assert np.mean(sizes) == pytest.approx(100, abs=3)  # 6 standard errors
    assert np.std(sizes) == pytest.approx(math.sqrt(90), rel=0.25)


# ---- terms -----------------------------------------------------------------------------------------------------


@for_rows(
    "change",
    [
        {"epsilon": 0.0},
        {"epsilon": math.inf},
        {"epsilon": math.nan},
        {"epsilon": "much"},
        {"delta": 0.0},
        {"delta": 0.5},
        {"num-examples": 0},
        {"num-examples": 10**12},
        {"state-dir": "relative"},
        {"data": "relative"},
        {"site": ""},
        {"site": " a"},
        {"site": "a\nb"},
        {"site": "a" * 65},
        {"noise-multiplier": 1.0},
        {"noise-multiplier": 1.0, "sampling-rate": 2.0, "steps": 3},
        {"noise-multiplier": 1.0, "sampling-rate": 0.2, "steps": 0},
    ],
)
def test_bad_terms_refuse_everything(site, change):
    assert_refused(ask(client_app(Guard()), site | change))


def test_missing_terms_refuse_everything(site, caplog):
    for missing in ("epsilon", "delta", "num-examples", "state-dir"):
        assert_refused(ask(client_app(Guard()), {key: value for key, value in site.items() if key != missing}))
        assert missing in caplog.text
        caplog.clear()


def test_terms_of_the_node_replace_those_of_the_app(site, tmp_path):
    guard = Guard(epsilon=1e9, delta=1e-3, num_examples=N, state_dir=str(tmp_path / "app"), allow=["evaluate", "loss"])
    app = client_app(guard)
    assert_refused(ask(app, site, kind="evaluate"))
    assert_refused(ask(app, site, noise=0.2))
    assert not (tmp_path / "app").exists()
    assert not ask(app, {"partition-id": 4}, noise=0.2).has_error()
    assert (tmp_path / "app" / "client-4.ledger.jsonl").exists()


@for_rows(
    ("node", "name"),
    [
        ({}, ""),
        ({"partition-id": 4}, "4"),
        ({"client-id": 5, "partition-id": 4}, "5"),
        ({"site": "Hôpital A", "partition-id": 4}, "Hôpital A"),
        ({"site": 7}, "7"),
    ],
)
def test_the_name_of_a_site_is_its_owners_or_a_number_of_a_simulation(site, tmp_path, node, name):
    app = client_app(Guard(epsilon=8.0, delta=1e-3, num_examples=N, state_dir=str(tmp_path / "app")))
    for own in (site | node, node):  # terms of the node, and of the app
        for kind in ("train", "evaluate"):
            reply = ask(app, own | ({"allow": "evaluate"} if own is not node else {}), kind=kind)
            if not reply.has_error():
                assert reply.content[GUARD]["site"] == name


def test_a_site_keeps_its_name_in_a_run(site):
    """Under another name, the ledger of the run would not add up what it spent."""
    app = client_app(Guard())
    assert not app(message(), context(run=1, **site)).has_error()
    assert_refused(app(message(), context(run=1, **site, site="a")))
    assert not app(message(), context(run=2, **site, site="a")).has_error()
    assert_refused(app(message(), context(run=2, **site, site="b")))
    assert not app(message(), context(run=2, **site, site="a")).has_error()
    assert ledger(site).total() == 3 * STEPS


def test_a_ledger_of_before_sites_had_names_can_be_continued(site):
    path = Path(site["state-dir"]) / "client-0.ledger.jsonl"
    path.parent.mkdir(mode=0o700)
    old = ClientLedger(TERMS["delta"], TERMS["epsilon"], path)
    old.spend(1, EPOCH, guard={"run": "7", "num_examples": N, "verified": True, "allow": []})
    old.close()
    assert not ask(client_app(Guard()), site | {"site": "a"}).has_error()


def test_declared_training_is_charged_first_and_never_certified(site):
    own = site | {"noise-multiplier": 1.5, "sampling-rate": 0.2, "steps": 5}
    charged = []
    app = client_app(Guard(), lambda model, config: (charged.append(ledger(own)), no_privacy(model, config)))
    reply = ask(app, own)
    assert not reply.has_error()
    events = Counter({Event(0.2, 1.5): 5})
    assert charged == [events] == [ledger(own)]
    assert_refused(ask(client_app(Guard(), no_privacy, reply=extra_array), own))
    assert_refused(ask(client_app(Guard(), no_privacy, reply=not_finite), own))
    document = certificate(Path(site["state-dir"]) / "client-0.ledger.jsonl")
    assert not document["certified"]
    assert document["verified"] == []
    assert "not verify" in document["reasons"][0]
    assert document["epsilon"] == pytest.approx(epsilon({Event(0.2, 1.5): 15}, 1e-3))


def test_the_reply_says_the_same_whatever_was_spent(site, tmp_path):
    """Two sites that differ in their records and in what they spent before: all they send but arrays is the same."""
    fresh = site | {"state-dir": str(tmp_path / "fresh")}
    for _ in range(2):
        ask(client_app(Guard()), site)
    replies = [
        ask(client_app(Guard(), metrics={"num-examples": count, "loss": count / 7}), own, count=count)
        for own, count in ((site, 30), (fresh, 33))
    ]
    said = [json.dumps([dict(reply.content[GUARD]), dict(reply.content["metrics"])]) for reply in replies]
    assert said[0] == said[1]


def test_a_message_without_arrays_or_with_two_records_is_refused(site):
    app = client_app(Guard())
    two, none = message(), message()
    two.content["more"] = ArrayRecord({"x": Array(np.zeros(1, np.float32))})
    del none.content["arrays"]
    for each in (two, none):
        assert_refused(app(each, context(**site)))


def test_a_ledger_that_is_not_a_guards(site, tmp_path, coterie):
    path = tmp_path / "client-0.ledger.jsonl"
    ledger = ClientLedger(1e-3, 8.0, path)
    ledger.spend(1, EPOCH)
    ledger.close()
    with pytest.raises(LedgerError, match="not a ledger of a guard"):
        certificate(path)
    ledger = ClientLedger(1e-3, 8.0, path)
    ledger.spend(1, EPOCH, guard={"verified": True, "num_examples": "many", "allow": 1})
    ledger.close()
    with pytest.raises(LedgerError, match="not a ledger of a guard"):
        certificate(path)
    status, out, err = coterie("privacy", "guard", path)
    assert (status, out) == (1, "")
    assert err.count("error:") == 1


def test_the_command_prints_the_certificate_of_a_site(site, coterie):
    ask(client_app(Guard()), site)
    path = Path(site["state-dir"]) / "client-0.ledger.jsonl"
    status, out, _ = coterie("privacy", "guard", path, "--json")
    assert (status, json.loads(out)) == (0, certificate(path))
    status, out, _ = coterie("privacy", "guard", path)
    assert status == 0
    assert "verified" in out
