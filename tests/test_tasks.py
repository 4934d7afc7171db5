"""What models predict: losses, scores, metrics and names of each task."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from kit.tables import for_rows
from torch.nn.functional import cross_entropy, mse_loss, one_hot

from coterie import models as networks
from coterie.client.backend import train
from coterie.client.clipper import clip_factors
from coterie.client.dpsgd import DPSGD, train_privately
from coterie.client.ghost import ChainClipping
from coterie.client.gradients import BatchesOfOne, MappedClients, check_supported
from coterie.client.sgd import LocalTrainingConfig
from coterie.datasets import Shard, TestSet, Units
from coterie.fields.settings import ConfigError
from coterie.server.config import RunConfig
from coterie.tasks import AUTO, Performance, TaskError, beats_constant, multi_label, of_metrics, task_of
from coterie.wire.messages import Layout

TASKS = [
    task_of(3),
    task_of(2),
    task_of(2).weighted("1,4"),
    multi_label(3),
    multi_label(4).weighted("1,2,3,4"),
    task_of(0),
    task_of(0, 5.0, 2.0),
]


def outputs_of(task, n, seed=0):
    return torch.randn(task.outputs_of(n), generator=torch.Generator().manual_seed(seed))


def right_outputs(task, y):
    """(n, ...) outputs that match the targets."""
    y = torch.as_tensor(y)
    if task.name == "multi-label":
        return 8.0 * (y[:, None] >> torch.arange(task.num_outputs) & 1) - 4
    return 4.0 * one_hot(y, task.num_outputs) if task.has_classes else y


@for_rows("task", TASKS, ids=str)
def test_the_loss_of_a_record_depends_on_no_other(task):
    outputs, y = outputs_of(task, 6), torch.as_tensor(task.examples(6))
    assert task(outputs, y).shape == (6,)
    alone = torch.cat([task(outputs[i : i + 1], y[i : i + 1]) for i in range(6)])
    torch.testing.assert_close(task(outputs, y), alone)


@for_rows("task", TASKS, ids=str)
def test_targets_that_match_score_best_and_lose_least(task):
    y = task.examples(12)
    assert y.dtype == task.dtype
    right = right_outputs(task, y)
    wrong = -right - 1
    for better, worse in ((right, wrong), (right, outputs_of(task, 12))):
        scores = [task.score(task.marks(one, torch.as_tensor(y)).double().numpy(), y) for one in (better, worse)]
        assert 0 <= scores[1] <= scores[0] <= 1
        assert task(better, torch.as_tensor(y)).sum() < task(worse, torch.as_tensor(y)).sum()
        errors = [task.squared_error(one.double().numpy(), y) for one in (better, worse)]
        assert errors[0] < errors[1]


def clients(task, sizes=(5, 8), features=4):
    rng = np.random.default_rng(0)
    shards = []
    for i, n in enumerate(sizes):
        x, y = rng.standard_normal((n, features), np.float32), task.examples(n)
        shards.append(Shard(i, 0, x, y, TestSet(x, y)))
    return shards


def start_of(task, shards, features=4):
    network = networks.build("mlp-32", (features,), task.num_outputs)
    layout = Layout.of(networks.trainable(network))
    vector = layout.flatten(networks.initialise("mlp-32", (features,), task.num_outputs, 0))
    return network, layout, np.tile(vector, (len(shards), 1))


def gradients(task, network, layout, vector, shard):
    """The gradient of each record's loss alone."""
    networks.set_trainable(network, layout.split(vector))
    parameters = list(networks.trainable(network).values())
    rows = []
    for i in range(len(shard.y)):
        loss = task(network(torch.as_tensor(shard.x[i : i + 1])), torch.as_tensor(shard.y[i : i + 1])).sum()
        found = torch.autograd.grad(loss, parameters)
        rows.append(torch.cat([one.flatten() for one in found]).double())
    return torch.stack(rows)


@for_rows("batched", [False, True])
@for_rows("task", TASKS, ids=str)
def test_a_client_takes_steps_of_the_gradient_of_its_task(task, batched):
    shards = clients(task)
    network, layout, start = start_of(task, shards)
    config = LocalTrainingConfig(1, 8, 0.1, task=task)
    rngs = [np.random.default_rng(i) for i in range(2)]
    moved = train(network, layout, start, shards, rngs, config, batched=batched)
    for update, vector, shard in zip(moved, start, shards, strict=True):
        wanted = -0.1 * gradients(task, network, layout, vector, shard).mean(0).numpy()
        np.testing.assert_allclose(update, wanted, atol=1e-5)


@for_rows("way", [{"batched": True}, {"batched": False}, {"batched": False, "ghost": False}], ids=str)
@for_rows("task", TASKS, ids=str)
def test_dp_sgd_clips_the_gradient_of_each_record_of_a_task(task, way):
    """Weights scale a record's gradient before the clip, so that no weight lets a record count for more than c."""
    shards = clients(task)
    network, layout, start = start_of(task, shards)
    check_supported(network, (4,), task, "vectors")
    settings = [DPSGD(len(shard.y), len(shard.y), 1, 1.0, 0.4, 0.0, task=task) for shard in shards]
    coins, noises = ([np.random.default_rng(seed) for seed in seeds] for seeds in ((1, 2), (3, 4)))
    moved = train_privately(network, layout, start, shards, coins, noises, settings, **way)
    for update, vector, shard in zip(moved, start, shards, strict=True):
        each = gradients(task, network, layout, vector, shard)
        factors, _ = clip_factors(each.norm(dim=1), 0.4)
        assert (each.norm(dim=1) > 0.4).any()
        np.testing.assert_allclose(update, -(0.4 / len(shard.y)) * (factors @ each).numpy(), atol=1e-5)


@for_rows("task", TASKS, ids=str)
def test_all_ways_of_dp_sgd_agree_on_a_task(task):
    """One after the other by torch.func, all at once by vmap, and by ghost norms of a chain."""
    (shard,) = clients(task, (6,))
    network, layout, start = start_of(task, [shard])
    x, y = torch.as_tensor(shard.x)[None], torch.as_tensor(shard.y)[None]
    counted, clip_norms = torch.ones(1, 6, dtype=torch.bool), torch.full((1, 1), 0.4, dtype=torch.float64)
    batch = layout.split(torch.tensor(start)), x, y, counted, clip_norms
    definition = BatchesOfOne(network, task)
    wanted = definition.sums(*batch)
    for clipper in (ChainClipping(network, task), MappedClients(definition)):
        for sums, expected in zip(clipper.sums(*batch), wanted, strict=True):
            torch.testing.assert_close(sums, expected, rtol=1e-4, atol=1e-5)


@for_rows("task", TASKS, ids=str)
def test_a_patient_takes_the_mean_loss_of_its_records(task):
    (shard,) = clients(task, (6,))
    shard = replace(shard, units=Units.named(np.array(["a", "a", "b", "b", "b", "c"]), 3))
    network, layout, start = start_of(task, [shard])
    check_supported(network, (4,), task, "vectors", units=True)
    settings = DPSGD(3, 3, 1, 1.0, 0.3, 0.0, task=task)
    rngs = [np.random.default_rng(1)], [np.random.default_rng(2)]
    (moved,) = train_privately(network, layout, start, [shard], *rngs, [settings], batched=False)
    each = gradients(task, network, layout, start[0], shard)
    units = torch.stack([each[rows].mean(0) for rows in ([0, 1], [2, 3, 4], [5])])
    factors, _ = clip_factors(units.norm(dim=1), 0.3)
    np.testing.assert_allclose(moved, -(0.3 / 3) * (factors @ units).numpy(), atol=1e-5)


def test_losses_are_those_of_pytorch():
    for task, wanted in ((task_of(3), cross_entropy), (task_of(0), mse_loss)):
        outputs, y = outputs_of(task, 6), torch.as_tensor(task.examples(6))
        expected = wanted(outputs, y, reduction="none")
        for one in (task, AUTO, LocalTrainingConfig(1, 1, 0.1, task=task).loss):
            torch.testing.assert_close(one(outputs, y), expected, rtol=0, atol=0)
        assert task(outputs.half(), y).dtype == torch.float32


@for_rows("task", TASKS, ids=str)
def test_metrics_tell_their_task(task):
    y = task.examples(20)
    outputs = right_outputs(task, y).numpy()
    metrics = task.measure(y, outputs)(None)
    assert of_metrics(metrics).name == task.name
    assert beats_constant(metrics) is True
    assert beats_constant(task.measure(y, outputs_of(task, 20).numpy() * 0 + 9)(None)) is False


def test_no_metrics_are_no_better_than_none():
    assert beats_constant(Performance()) is None
    assert of_metrics(Performance()).score_name == "accuracy"


def test_equal_tasks_are_one():
    assert task_of(3) == task_of(3) != task_of(2)
    assert task_of(0) != AUTO
    assert task_of(0, 1.0) != task_of(0)
    assert np.isclose(task_of(0, 5.0, 2.0).in_units(np.ones(1)), 7.0)


def test_class_weights_scale_losses_and_not_scores():
    outputs, y = outputs_of(task_of(3), 6), torch.as_tensor(task_of(3).examples(6))
    weighted = task_of(3).weighted("1, 2,0.5")
    factors = torch.tensor([1.0, 2.0, 0.5])[y]
    torch.testing.assert_close(weighted(outputs, y), factors * task_of(3)(outputs, y))
    torch.testing.assert_close(weighted.marks(outputs, y), task_of(3).marks(outputs, y))
    assert task_of(2).weighted("") is task_of(2)
    assert not weighted.has_softmax_gradient  # the chains' gradient by hand is that of plain cross-entropy


@for_rows(
    ("classes", "weights", "message"),
    [
        (3, "1,2", "class-weights = '1,2': one number for each of 3 classes is required"),
        (2, "1,0", "must be numbers from 1e-06 to 1e.06, separated by commas"),
        (2, "1,-3", "must be numbers"),
        (2, "1,nan", "must be numbers"),
        (2, "1,inf", "must be numbers"),
        (2, "one,two", "must be numbers"),
        (2, "1,,2", "must be numbers"),
        (0, "2", "regression has no weights; leave it out"),
    ],
)
def test_weights_that_do_not_fit_are_refused_in_one_line(classes, weights, message):
    with pytest.raises(TaskError, match=message) as raised:
        task_of(classes).weighted(weights)
    assert "\n" not in str(raised.value)


@for_rows(
    ("values", "message"),
    [
        ({"task": "binary"}, "task = 'binary': the data have 10 classes, whose task is multi-class; leave it out"),
        ({"task": "regression"}, "the data have 10 classes"),
        ({"task": "yes"}, "task = 'yes': must be auto, multi-class, binary"),
        ({"class-weights": "1,2"}, "class-weights = '1,2': one number for each of 10 classes"),
        ({"class-weights": "a"}, "class-weights = 'a': must be numbers such as 1,5"),
        ({"dataset": "diabetes", "class-weights": "2"}, "regression has no weights"),
        ({"strategy": "kfed", "class-weights": ",".join("1" * 10)}, "kfed has no loss of classes; leave them out"),
    ],
)
def test_a_run_refuses_what_does_not_fit_its_task(values, message):
    with pytest.raises(ConfigError, match=message):
        RunConfig(values)


def test_a_run_states_its_task():
    assert RunConfig({"task": "multi-class"}).task == task_of(10)
    assert RunConfig({"dataset": "breast-cancer", "task": "binary"}).task == task_of(2)
    assert RunConfig({"dataset": "breast-cancer", "class-weights": "1,3"}).task.weights == (1.0, 3.0)
    own = {"dataset": "own", "input-shape": "3", "clients": 4}
    assert RunConfig({**own, "task": "binary"}).data.num_classes == 2
    assert RunConfig({**own, "task": "regression"}).training.model == "regression"
    with pytest.raises(ConfigError, match="task = 'binary'"):
        RunConfig({**own, "task": "binary", "num-classes": 3})
