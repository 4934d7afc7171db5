"""What models predict: losses, scores, metrics and names of each task."""

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, mse_loss

from coterie.client.sgd import LocalTrainingConfig
from coterie.results import Performance
from coterie.tasks import AUTO, beats_constant, of_metrics, task_of

TASKS = [task_of(3), task_of(2), task_of(0), task_of(0, 5.0, 2.0)]


def outputs_of(task, n, seed=0):
    return torch.randn(task.outputs_of(n), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_the_loss_of_a_record_depends_on_no_other(task):
    outputs, y = outputs_of(task, 6), torch.as_tensor(task.examples(6))
    assert task(outputs, y).shape == (6,)
    alone = torch.cat([task(outputs[i : i + 1], y[i : i + 1]) for i in range(6)])
    torch.testing.assert_close(task(outputs, y), alone)


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_targets_that_match_score_best_and_lose_least(task):
    y = task.examples(12)
    assert y.dtype == task.dtype
    right = task.right_outputs(torch.as_tensor(y))
    wrong = -right - 1
    for better, worse in ((right, wrong), (right, outputs_of(task, 12))):
        scores = [task.score(task.marks(one, torch.as_tensor(y)).double().numpy(), y) for one in (better, worse)]
        assert 0 <= scores[1] <= scores[0] <= 1
        assert task(better, torch.as_tensor(y)).sum() < task(worse, torch.as_tensor(y)).sum()
        errors = [task.squared_error(one.double().numpy(), y) for one in (better, worse)]
        assert errors[0] < errors[1]


def test_losses_are_those_of_pytorch():
    for task, wanted in ((task_of(3), cross_entropy), (task_of(0), mse_loss)):
        outputs, y = outputs_of(task, 6), torch.as_tensor(task.examples(6))
        expected = wanted(outputs, y, reduction="none")
        for one in (task, AUTO, LocalTrainingConfig(1, 1, 0.1, task=task).loss):
            torch.testing.assert_close(one(outputs, y), expected, rtol=0, atol=0)
        assert task(outputs.half(), y).dtype == torch.float32


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_metrics_tell_their_task(task):
    y = task.examples(20)
    outputs = task.right_outputs(torch.as_tensor(y)).numpy()
    metrics = task.measure(y, outputs)(None)
    assert of_metrics(metrics).name == task.name
    assert beats_constant(metrics) is True
    assert beats_constant(task.measure(y, outputs_of(task, 20).numpy() * 0 + 9)(None)) is False


def test_no_metrics_are_no_better_than_none():
    assert beats_constant(Performance()) is None
    assert of_metrics(Performance()).score_name == "Accuracy"


def test_equal_tasks_are_one():
    assert task_of(3) == task_of(3) != task_of(2)
    assert task_of(0) != AUTO
    assert task_of(0, 1.0) != task_of(0)
    assert np.isclose(task_of(0, 5.0, 2.0).in_units(np.ones(1)), 7.0)
