"""The ServerApp: Coterie's IFCA under the joint mechanism, and the certificate of the run."""

import json
from contextlib import closing
from logging import INFO
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp

from coterie.privacy import Joint
from coterie.strategies import IFCA
from flower_app.task import Net

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train two models, for the upright and for the rotated digits."""
    config = context.run_config
    clients, rounds = int(config["clients"]), int(config["rounds"])
    plan = Joint.calibrated(
        clients=clients,
        num_clusters=2,
        sampling_rate=0.5,
        rounds=rounds,
        clip_norm=0.5,
        epsilon=float(config["epsilon"]),
        delta=1 / (100 * clients),
    )
    out = Path(str(config["out"]))
    out.mkdir(parents=True, exist_ok=True)
    with closing(plan.ledger(out / "ledger.jsonl")) as ledger:
        strategy = IFCA(plan, ledger=ledger, server_lr=1.5)
        train_config = ConfigRecord({"lr": float(config["lr"])})
        result = strategy.start(grid, ArrayRecord(Net().state_dict()), rounds, train_config=train_config)
    certificate = strategy.certificate()
    (out / "privacy.json").write_text(json.dumps(certificate, indent=2))
    accuracy = result.evaluate_metrics_clientapp[rounds]["accuracy"]
    log(INFO, "accuracy %.3f, epsilon %.2f, certified %s", accuracy, certificate["epsilon"], certificate["certified"])
