"""A strategy starts with parameters alone: other arrays of a state_dict are refused before round 1, by name."""

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord
from kit.tables import for_rows
from torch import nn

from coterie.privacy import Joint
from coterie.strategies import FedAvg, StrategyError
from coterie.wire import trainable_arrays
from coterie.wire.messages import check_trainable, unpack_models


class Untouched:
    """A grid that nobody uses."""

    def __getattr__(self, name):
        raise AssertionError(f"{name} is called")


def private():
    shape = {"clients": 100, "num_clusters": 1, "sampling_rate": 0.2, "rounds": 2}
    return Joint.calibrated(**shape, clip_norm=1.0, epsilon=2, delta=1e-4)


def normalised():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 10))


def state(**more):
    return ArrayRecord(nn.Linear(2, 2).state_dict() | more)


ARRAYS = {
    "state_dict": (lambda: ArrayRecord(normalised().state_dict()), "'1.running_mean' is a stat.*without_batch_norm"),
    "int64": (lambda: state(ids=torch.arange(4)), "'ids' is int64: .*trainable_arrays"),
    "uint8": (lambda: state(image=torch.zeros(4, dtype=torch.uint8)), "'image' is uint8"),
    "bool": (lambda: state(mask=torch.ones(4, dtype=torch.bool)), "'mask' is bool"),
    "complex": (lambda: state(turn=torch.ones(4, dtype=torch.complex64)), "'turn' is complex64"),
    "counter": (lambda: state(**{"a.num_batches_tracked": torch.tensor(0)}), "'a.num_batches_tracked' is int64"),
    "second cluster": (
        lambda: ArrayRecord({"0/w": Array(np.zeros(2)), "1/w": Array(np.zeros(2, np.int32))}),
        "'1/w' is int32",
    ),
    "variance": (lambda: state(**{"norm.running_var": torch.ones(2)}), "'norm.running_var' is a statistic"),
}


@for_rows("name", ARRAYS)
def test_what_is_no_parameter_is_refused_before_round_1(name):
    make, message = ARRAYS[name]
    strategy = FedAvg(private())
    with pytest.raises(StrategyError, match=message):
        strategy.start(Untouched(), make(), 2, train_config=ConfigRecord({"lr": 0.1}))
    with pytest.raises(StrategyError, match=message):
        strategy.configure_train(1, make(), ConfigRecord(), Untouched())
    assert strategy.ledger.charges == []


def test_without_privacy_statistics_are_averaged_and_counters_refused():
    check_trainable(state(**{"norm.running_var": torch.ones(2)}), private=False)
    with pytest.raises(ValueError, match="'ids' is int64"):
        check_trainable(state(ids=torch.arange(4)), private=False)


def test_the_trainable_part_of_a_network_starts_a_strategy():
    network = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2, dtype=torch.bfloat16)).requires_grad_(True)
    network[0].weight.requires_grad_(False)
    network.register_buffer("ids", torch.arange(4))
    network.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))
    arrays = trainable_arrays(network)
    assert list(arrays) == ["scale", "0.bias", "1.weight", "1.bias"]
    check_trainable(arrays, private=True)
    models, layout = unpack_models(arrays)
    assert layout.shapes == ((), (3,), (2, 3), (2,))
    assert models[0, 0] == 2
