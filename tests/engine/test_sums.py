"""Updates that are summed where they are computed: the models, counts and refusals of replies sent as messages."""

from contextlib import closing

import numpy as np
import pytest
from flwr.app import Message, RecordDict
from kit.run_folders import assert_agree, networks
from kit.tables import for_rows

from coterie.engine.in_process import LocalGrid, SummingGrid
from coterie.privacy.mechanisms import joint
from coterie.rounds.batches import PartialSums
from coterie.server import RunConfig, RunError, RunFolder, run
from coterie.strategies.registry import STRATEGIES

CLIENTS = 12
CASES = [
    (name, unit)
    for name, method in STRATEGIES.items()
    if method.produces == "models"
    for unit in ("none", "client", "record")
    if unit in method.units
]


class Counting(SummingGrid):
    """Counts the clients whose updates came back in sums."""

    summed = 0

    def send_and_sum(self, messages, new_sums):
        for reply in super().send_and_sum(messages, new_sums):
            self.summed += len(reply.messages) if isinstance(reply, PartialSums) else 0
            yield reply


def outcome(folder, settings, grid):
    """The result, and all models of server and clients."""
    with closing(grid), closing(RunFolder.create(folder, RunConfig(settings))) as opened:
        result = run(opened, grid)
    return result, networks(folder)


def settings(**given):
    return {"clients": CLIENTS, "rounds": 2, "samples-per-client": 20, "seed": 7, "groups": "2", **given}


@pytest.mark.parametrize(("strategy", "unit"), CASES)
def test_sums_give_the_models_of_messages(strategy, unit, tmp_path):
    given = settings(strategy=strategy, **{"privacy-unit": unit})
    if unit == "record":
        given["first-round-noise-ratio"] = 1  # that of rc-dpfl takes seconds to plan
    elif "client" in STRATEGIES[strategy].units:
        given["sampling-rate"] = 0.6
    ours, models = outcome(tmp_path / "messages", given, LocalGrid(CLIENTS))
    grid = Counting(CLIENTS)
    theirs, summed = outcome(tmp_path / "sums", given, grid)
    assert_agree(models, summed, 1e-6)
    for key in ("charges", "epsilon", "messages_up", "bytes_up", "messages_down", "bytes_down"):
        assert ours.get(key) == theirs.get(key)
    assert ours["diagnostics"]["accuracy"] == pytest.approx(theirs["diagnostics"]["accuracy"], abs=1e-6)
    if unit == "client" and RunConfig(given).privacy.mechanism == "joint":
        assert grid.summed > 0
    if unit == "record":
        assert grid.summed == 0


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp-32", "cnn-tiny"])
def test_the_number_of_workers_changes_no_model(model, tmp_path):
    given = settings(strategy="ifca", model=model, rounds=1, **{"sampling-rate": 1.0})
    _, alone = outcome(tmp_path / "0", given, Counting(CLIENTS))
    for workers in (1, 2, 4):
        grid = Counting(CLIENTS, workers)
        _, together = outcome(tmp_path / str(workers), given, grid)
        assert_agree(alone, together, 1e-6)
        assert grid.summed == CLIENTS


class Idle:
    """A pool of two workers that receives no call."""

    count = 2


@for_rows(("clients", "calls"), [(100, 2), (62, 8), (9, 5)])
def test_a_call_with_sums_gets_every_nth_client(clients, calls):
    """Natural clients may be sorted by size, so every call gets clients of all sizes."""
    grid, content = LocalGrid(clients, workers=Idle()), RecordDict()
    messages = [Message(content, dst_node_id=node, message_type="train") for node in range(1, clients + 1)]
    chunks = [[message.metadata.dst_node_id for message in some] for some in grid._chunks(messages, summed=True)]
    assert chunks == [list(range(1, clients + 1))[first::calls] for first in range(calls)]
    others = [message.metadata.dst_node_id for some in grid._chunks(messages, summed=False) for message in some]
    assert others == list(range(1, clients + 1))


def test_updates_that_the_server_drops_are_dropped_with_their_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(joint, "_MAX_NORM", 1e-3)
    given, reasons = settings(strategy="fedavg", **{"privacy-unit": "none"}), []
    for kind in (LocalGrid, Counting):
        with pytest.raises(RunError, match="has norm") as failed:
            outcome(tmp_path / kind.__name__, given, kind(CLIENTS))
        reasons.append(str(failed.value))
    assert reasons[0] == reasons[1]


def test_a_client_that_fails_leaves_the_sums_of_the_others(tmp_path):
    for client in range(6):
        rng = np.random.default_rng(client)
        x = np.full((10, 2), -9.0, np.float32) if client == 1 else rng.standard_normal((10, 2)).astype(np.float32)
        np.savez(tmp_path / f"client-{client}.npz", x=x, y=np.arange(10) % 2)
    given = settings(strategy="fedavg", dataset="own", clients=6, model="kit.toys:deadly", rounds=1, evaluate="off")
    given |= {"input-shape": "2", "num-classes": 2, "data-dir": str(tmp_path), "sampling-rate": 1.0, "groups": "1"}
    given |= {"shift": "none", "samples-per-client": 0, "privacy-unit": "none"}
    grid = Counting(6, workers=2)
    result, models = outcome(tmp_path / "run", given, grid)
    assert result["messages_up"] == 6
    assert all(np.isfinite(values).all() and values.any() for values in models.values())
