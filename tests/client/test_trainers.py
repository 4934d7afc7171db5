"""Training loops of users: what a run does with them, and what is refused."""

import hashlib
import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, RecordDict
from kit.tables import for_rows
from torch import nn
from torch.nn.functional import cross_entropy

from coterie.client.backend import train
from coterie.client.cohort import Cohort
from coterie.client.identity import Client
from coterie.client.scores import losses
from coterie.client.sgd import LocalTrainingConfig, schedule
from coterie.client.training_plugins import TrainingPlugins
from coterie.datasets import Shard, TestSet
from coterie.engine.in_process import LocalGrid
from coterie.fields.plugins import PluginError
from coterie.server import ConfigError, RunConfig, RunFolder, planning, run
from coterie.testing import check_trainer
from coterie.wire import RequestError, TrainRequest
from coterie.wire.messages import Layout, pack_models

HERE = "test_trainers"
SETTINGS = LocalTrainingConfig(2, 4, 0.1)


def plain(network, arrays, x, y, settings, rng):
    """Plain SGD, as a user writes it; returns the trained arrays."""
    with torch.no_grad():
        for name, value in arrays.items():
            network.get_parameter(name).copy_(torch.from_numpy(value))
    parameters = [network.get_parameter(name) for name in arrays]
    optimizer = torch.optim.SGD(parameters, lr=settings.lr)
    for batch in schedule(rng, len(y), settings):
        optimizer.zero_grad()
        cross_entropy(network(torch.from_numpy(x[batch])), torch.from_numpy(y[batch])).backward()
        optimizer.step()
    return {name: network.get_parameter(name).detach().numpy() for name in arrays}


class Loop:
    def __init__(self, network):
        self.network = network

    def train(self, arrays, x, y, settings, rng):
        trained = plain(self.network, arrays, x, y, settings, rng)
        return {name: trained[name] - arrays[name] for name in arrays}


class Random(Loop):
    """Draws from PyTorch's generator."""

    def train(self, arrays, x, y, settings, rng):
        return {name: np.float32(0.01) * torch.randn(value.shape).numpy() for name, value in arrays.items()}


class Careless(Loop):
    """Changes all that it receives."""

    def train(self, arrays, x, y, settings, rng):
        update = super().train(arrays, x, y, settings, rng)
        for value in (*arrays.values(), x, y):
            value[...] = 0
        with torch.no_grad():
            for value in self.network.parameters():
                value.fill_(math.nan)
        torch.manual_seed(0)
        return update


class Picky(Loop):
    """Fails for one client."""

    def train(self, arrays, x, y, settings, rng):
        if len(y) == 5:
            raise ValueError("patient 17 is missing")
        return super().train(arrays, x, y, settings, rng)


class Half(Loop):
    """Fails for some clients of the digits."""

    def train(self, arrays, x, y, settings, rng):
        if len(y) > 10 and y[0] > 4:
            raise ValueError("patient 17 is missing")
        return super().train(arrays, x, y, settings, rng)


def opposite(outputs, targets):
    return -cross_entropy(outputs, targets, reduction="none")


def shards(sizes=(9, 9, 9)):
    rng, result = np.random.default_rng(0), []
    for i, size in enumerate(sizes):
        x, y = rng.standard_normal((size, 4)).astype(np.float32), rng.integers(0, 3, size)
        result.append(Shard(i, 0, x, y, TestSet(x, y)))
    return result


def linear():
    torch.manual_seed(1)
    model = nn.Linear(4, 3)
    arrays = {name: value.detach().numpy() for name, value in model.named_parameters()}
    return model, Layout.of(arrays), Layout.of(arrays).flatten(arrays)


def updates(trainer=None, data=None, **loss):
    model, layout, start = linear()
    data = data or shards()
    plugins = TrainingPlugins(**loss, **({} if trainer is None else {"trainer": f"{HERE}:{trainer}"}))
    rngs = [np.random.default_rng(i) for i in range(len(data))]
    return train(model, layout, np.tile(start, (len(data), 1)), data, rngs, replace(SETTINGS, plugins=plugins))


@pytest.mark.parametrize("name", ["Loop", "Careless"])
def test_a_loop_of_sgd_is_the_built_in_one(name):
    data = shards()
    before = [(shard.x.copy(), shard.y.copy()) for shard in data]
    np.testing.assert_allclose(updates(name, data), updates(data=data), atol=1e-6)
    np.testing.assert_array_equal(updates(name, data), updates(name, data))
    for shard, (x, y) in zip(data, before, strict=True):
        np.testing.assert_array_equal(shard.x, x)
        np.testing.assert_array_equal(shard.y, y)


def test_pytorchs_generator_is_seeded_for_each_client_and_put_back():
    linear()
    before = torch.get_rng_state()
    first = updates("Random")
    assert torch.equal(torch.get_rng_state(), before)
    np.testing.assert_array_equal(first, updates("Random"))
    assert len(np.unique(first, axis=0)) == 3


def test_a_client_without_records_does_not_call_it():
    found = updates("Picky", shards((9, 0, 9)))
    assert not found[1].any()
    assert found[0].any()
    with pytest.raises(PluginError, match="trainer 'test_trainers:Picky' fails: ValueError: patient 17 is missing"):
        updates("Picky", shards((9, 5, 9)))


def test_a_loss_beside_a_trainer_only_chooses_among_models():
    np.testing.assert_array_equal(updates("Loop"), updates("Loop", loss=OWN["loss"]))
    model, layout, start = linear()
    models, loss = np.stack([start, -start]), replace(SETTINGS, plugins=TrainingPlugins(**OWN)).loss
    found = losses(model, layout, models, shards(), loss=loss)
    np.testing.assert_allclose(found, -losses(model, layout, models, shards()), rtol=1e-6)


# ---- contracts --------------------------------------------------------------------------------------------


def returning(make):
    """A trainer that returns what a function makes of received and trained arrays."""

    class Trainer(Loop):
        def train(self, arrays, x, y, settings, rng):
            return make(
                {name: value.copy() for name, value in arrays.items()}, super().train(arrays, x, y, settings, rng)
            )

    return Trainer


def changed(update, **new):
    return {**update, **new}


MEMORY = []


class Remembering(Loop):
    def train(self, arrays, x, y, settings, rng):
        MEMORY.append(1)
        return {name: value * len(MEMORY) for name, value in super().train(arrays, x, y, settings, rng).items()}


class NoMethod:
    def __init__(self, network):
        pass


class Few(NoMethod):
    def train(self, arrays, x, y):
        return {}


class NoNetwork:
    def train(self, arrays, x, y, settings, rng):
        return {}


class Exits(NoMethod):
    def train(self, arrays, x, y, settings, rng):
        raise SystemExit(1)


class Whole(Loop):
    """Fails for fewer examples than a batch."""

    def train(self, arrays, x, y, settings, rng):
        update = super().train(arrays, x, y, settings, rng)
        return {name: value * np.float32(1 / (len(y) // settings.batch_size)) for name, value in update.items()}


@for_rows(
    ("trainer", "text"),
    [
        (plain, "trainer is a function, not a class"),
        (NoNetwork, r"trainer must accept \(network\)"),
        (NoMethod, r"trainer needs a method train\(self, arrays, x, y, settings, rng\)"),
        (Few, r"trainer needs a method train\(self, arrays, x, y, settings, rng\)"),
        (Exits, "trainer fails: SystemExit: 1"),
        (Remembering, "two trainings from the same start differ"),
        (Whole, "trainer fails: ZeroDivisionError"),
        (returning(lambda start, update: None), "returns NoneType, expected a dict of arrays"),
        (returning(lambda start, update: list(update.values())), "returns list, expected a dict of arrays"),
        (returning(lambda start, update: {"weight": update["weight"]}), "returns no update of bias"),
        (returning(lambda start, update: changed(update, other=update["bias"])), "returns other, which it did not"),
        (
            returning(lambda start, update: changed(update, bias=update["bias"][:1])),
            r"shape \(1,\) for 'bias', expected \(3,\)",
        ),
        (returning(lambda start, update: changed(update, bias=update["bias"][:, None])), r"shape \(3, 1\) for 'bias'"),
        (returning(lambda start, update: changed(update, bias=np.zeros(3, int))), "returns int64 for 'bias'"),
        (returning(lambda start, update: changed(update, bias=np.zeros(3, complex))), "returns complex128 for 'bias'"),
        (returning(lambda start, update: changed(update, bias=torch.zeros(3))), "returns Tensor for 'bias'"),
        (returning(lambda start, update: changed(update, bias=0.0)), "returns float for 'bias'"),
        (returning(lambda start, update: changed(update, bias=np.full(3, np.nan))), "returns NaN or Inf for 'bias'"),
        (returning(lambda start, update: changed(update, bias=np.full(3, 1e300))), "returns NaN or Inf for 'bias'"),
        (returning(lambda start, update: {k: 0 * v for k, v in update.items()}), "its update is zero"),
        (returning(lambda start, update: {k: start[k] + v for k, v in update.items()}), "returns the trained arrays"),
        (returning(lambda start, update: start), "returns the trained arrays"),
    ],
)
def test_what_a_trainer_may_not_be(trainer, text):
    with pytest.raises(PluginError, match=text):
        check_trainer(trainer)


@pytest.mark.parametrize("trainer", [Loop, Random, Careless])
def test_trainers_that_conform(trainer):
    check_trainer(trainer)
    check_trainer(trainer, nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)), (6,))
    double = returning(lambda start, update: {k: v.astype(np.float64) for k, v in update.items()})
    check_trainer(double)


def test_the_documented_trainer_conforms():
    page = (Path(__file__).parents[2] / "docs/networks.md").read_text()
    code = page.partition("## A training loop")[2].partition("```python\n")[2].partition("```")[0]
    names = {}
    exec(code, names)
    check_trainer(names["Trainer"])


# ---- runs -------------------------------------------------------------------------------------------------

RUN = {"dataset": "digits", "clients": 8, "clusters": 2, "rounds": 2, "epsilon": 8.0, "samples-per-client": 20}
OWN = {"trainer": f"{HERE}:Loop", "loss": f"{HERE}:opposite"}


@pytest.mark.parametrize("strategy", ["ifca", "fedcam"])
def test_a_certified_run_with_both(tmp_path, strategy):
    with closing(RunFolder.create(tmp_path / "run", RunConfig({**RUN, **OWN, "strategy": strategy}))) as folder:
        result = run(folder, LocalGrid(8))
        certificate = folder.certify()
    assert result["rounds"] == 2
    assert certificate["certified"]
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    for kind, name in OWN.items():
        assert certificate["tuned_outside"][f"training.{kind}"] == name
        assert certificate["public_inputs"][f"{kind}-sha256"] == digest


def test_a_trainer_gives_the_run_of_the_built_in_training(tmp_path):
    found = []
    for i, own in enumerate(({}, {"trainer": f"{HERE}:Loop"})):
        settings = {**RUN, **own, "privacy-unit": "none", "strategy": "fedper", "clusters": 1, "seed": 1}
        del settings["epsilon"]
        with closing(RunFolder.create(tmp_path / str(i), RunConfig(settings))) as folder:
            found.append(run(folder, LocalGrid(8))["diagnostics"]["accuracy"])
    assert found[0] == pytest.approx(found[1], abs=1e-6)


def test_the_failure_of_one_client_is_its_own(tmp_path, caplog):
    settings = {**RUN, "trainer": f"{HERE}:Half", "rounds": 1}
    with closing(RunFolder.create(tmp_path / "run", RunConfig(settings))) as folder:
        assert run(folder, LocalGrid(8))["certified"]
    failed = [record for record in caplog.records if "fails: ValueError: patient 17" in record.getMessage()]
    assert 0 < len(failed) < 8


@for_rows(
    ("settings", "text"),
    [
        (
            {"trainer": f"{HERE}:Loop", "strategy": "f-cdpfl"},
            "trainer = 'test_trainers:Loop': at record level clients train by DP-SGD.*coterie.guard",
        ),
        ({"trainer": f"{HERE}:Loop", "strategy": "fedprox", "clusters": 1}, "fedprox adds a penalty"),
        ({"trainer": f"{HERE}:Loop", "optimizer": "torch.optim:Adam"}, "optimizer = .* has no effect with .*trainer"),
        ({"trainer": "fast"}, "must be default, or module:Class"),
        ({"scheduler": "torch:x"}, "scheduler was removed: a trainer changes the step size"),
        ({"training.choose": "loss"}, "choose was removed: clients choose by the loss, which `loss` changes"),
    ],
)
def test_settings_without_effect_are_refused(settings, text):
    with pytest.raises(ConfigError, match=text):
        RunConfig({**RUN, **settings})


def asked(settings, strategy, **request):
    """A request of a server that ignores what a run refuses."""
    record = {**RunConfig({**RUN, "strategy": strategy}).for_clients(), **settings}
    models = pack_models(np.zeros((2, 2), np.float32), Layout(("w",), ((2,),)))
    return RecordDict(
        {"models": models, "config": ConfigRecord({**record, **TrainRequest(round=1, **request).to_record()})}
    )


@pytest.mark.parametrize(("kind", "name"), [*OWN.items(), ("optimizer", "torch.optim:Adam")])
def test_a_client_refuses_them_beside_a_plan_of_dp_sgd(kind, name):
    plans = planning.sketch(RunConfig({**RUN, "strategy": "f-cdpfl"})).record_plans
    with pytest.raises(RequestError, match=f"{kind}: at record level"):
        Cohort.of("train", asked({kind: name}, "f-cdpfl", record_plans=plans), [Client(0)])


def test_a_client_refuses_a_penalty_that_its_loop_would_not_add():
    with pytest.raises(RequestError, match="knows nothing of a penalty"):
        Cohort.of("train", asked(OWN, "ifca", penalty="proximal", penalty_weight=0.1), [Client(0)])
