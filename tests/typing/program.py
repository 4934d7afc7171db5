"""A small program of a user, which mypy checks strictly: the public API has types."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from coterie.datasets import Partition, Source, federate
from coterie.fields.settings import Settings, setting
from coterie.privacy import Joint, RecordPlan, read_ledger
from coterie.strategies import CFL, IFCA, LCFL, ClusteredStrategy, Reseeding, Round, StrategyOptions
from coterie.strategies.method import Models
from coterie.testing import check_client, check_strategy

app = ServerApp()


@dataclass(frozen=True)
class MomentumSettings(Settings):
    """Settings of Momentum."""

    table: ClassVar[str] = "momentum"
    beta: float = setting(0.5, "weight of the last step", at_least=0, below=1)


class Momentum(IFCA):
    """IFCA with momentum."""

    name: ClassVar[str] = "momentum"
    title: ClassVar[str] = "IFCA with momentum"
    row_wise: ClassVar[bool] = True
    settings_class: ClassVar[type[Settings]] = MomentumSettings
    settings: MomentumSettings

    def round(self, number: int, models: Models) -> Round:
        """One round."""
        new = yield from super().round(number, models)
        step = np.asarray(new - models + self.settings.beta * self.state.get("step", np.zeros_like(models)), np.float32)
        self.state = {"step": step}
        return np.asarray(models + step, np.float32)


def strategies(folder: str) -> list[ClusteredStrategy]:
    """Every way to build one."""
    plan = Joint.calibrated(
        clients=500, num_clusters=4, sampling_rate=0.2, rounds=80, clip_norm=0.3, epsilon=8, delta=2e-5
    )
    noise: float = Joint.calibrated(
        clients=9, num_clusters=1, sampling_rate=1, rounds=1, clip_norm=1, epsilon=1, delta=1e-3
    ).noise_multiplier
    ledger = plan.ledger(Path(folder) / "ledger.jsonl", seed=None)
    again = plan.ledger(folder + "/other.jsonl", tuned={"noise": noise})
    options = StrategyOptions(server_lr=1.5, min_clients=3, ledger=again)
    return [
        IFCA(plan, reseeding=Reseeding(), ledger=ledger),
        Momentum(plan, MomentumSettings(beta=0.9), options),
        LCFL(plan, clusters=2),
        CFL(plan, evaluate_every=0),
    ]


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run."""
    strategy = strategies("runs")[0]
    config = ConfigRecord({"lr": 0.1})
    strategy.start(grid, ArrayRecord({}), num_rounds=80, train_config=config)
    certified: bool = strategy.certificate()["certified"]
    header, charges = read_ledger("runs/ledger.jsonl")
    print(certified, header, len(charges))


def other(client_app: ClientApp) -> Source:
    """Other parts of the API."""
    check_strategy(Momentum, settings=MomentumSettings(0.1))
    check_client(client_app, ArrayRecord({}), node_config={"partition-id": 0})
    RecordPlan.calibrated(num_examples=100, batch_size=10, rounds=5, epsilon=8.0, delta=1e-4)
    shard = federate("digits", Partition(clients=4), data_dir=Path("data")).shard(0)
    return Source("mine", shard.x, shard.y, shard.test.x, shard.test.y, 10)
