"""The ServerApp."""

import json
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from quickstart.task import Net

from coterie.privacy import Joint
from coterie.strategies import IFCA

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train a model, and save it."""
    num_rounds = context.run_config["num-server-rounds"]
    lr = context.run_config["learning-rate"]
    out = Path(context.run_config["out"])
    out.mkdir(parents=True, exist_ok=True)

    arrays = ArrayRecord(Net().state_dict())

    clients, epsilon = context.run_config["clients"], context.run_config["epsilon"]
    budget = {"epsilon": epsilon, "delta": 0.1 / clients, "rounds": num_rounds}
    plan = Joint.calibrated(clients=clients, num_clusters=2, sampling_rate=1.0, clip_norm=0.3, **budget)
    strategy = IFCA(plan, ledger=plan.ledger(out / "ledger.jsonl"))

    result = strategy.start(
        grid=grid, initial_arrays=arrays, train_config=ConfigRecord({"lr": lr}), num_rounds=num_rounds
    )
    (out / "privacy.json").write_text(json.dumps(strategy.certificate(), indent=2))
    strategy.ledger.close()
    print(f"Held-out records: {result.evaluate_metrics_clientapp[num_rounds]}")
    torch.save(result.arrays.to_torch_state_dict(), out / "final_model.pt")
