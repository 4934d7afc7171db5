"""The mean of the last models, and that a run evaluates and returns it while clients train from the last ones."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from kit.toy_grids import Kept

from coterie.privacy import NoPrivacy
from coterie.strategies import Averaging, FedAvg, Reseeding, StrategyError
from coterie.testing.toys import CLIENTS, ToyGrid
from coterie.wire.messages import Layout, unpack_models

LAYOUT = Layout(("w",), ((1,),))
PLAN = NoPrivacy(clients=CLIENTS, num_clusters=1, sampling_rate=1.0, rounds=10)


class Counting(FedAvg):
    """Round t makes the model t."""

    def round(self, number, models):
        self.started_from = models.item()
        yield from self.sums(self.training(), models)
        return np.full_like(models, number)


def go(last):
    seen, kept = [], Kept()
    strategy = Counting(PLAN, averaging=Averaging(last), evaluate_every=0, registration_timeout=0.0, recorder=kept)
    result = strategy.start(
        ToyGrid(),
        ArrayRecord({"w": Array(np.zeros(1, np.float32))}),
        10,
        evaluate_fn=lambda number, arrays: seen.append(unpack_models(arrays)[0].item()),
    )
    return unpack_models(result.arrays)[0].item(), seen, kept.states, strategy


def test_the_last_models_are_averaged_and_training_goes_on_from_the_last():
    final, seen, states, strategy = go(0.4)
    assert seen == [1, 2, 3, 4, 5, 6, 7, 7.5, 8, 8.5]
    assert final == 8.5
    assert strategy.started_from == 9
    assert [s.models.item() for s in states] == list(range(1, 11))
    assert [None if s.mean is None else s.mean.item() for s in states] == [None] * 6 + [7, 7.5, 8, 8.5]
    assert go(0.0)[0] == 10


@pytest.mark.parametrize(
    ("last", "reseeding"), [(-0.1, None), (1.5, None), (0.5, Reseeding(until=0.6)), (float("nan"), None)]
)
def test_means_over_a_re_seeding_are_refused(last, reseeding):
    with pytest.raises(StrategyError, match="average-last"):
        FedAvg(PLAN, averaging=Averaging(last), reseeding=reseeding)
