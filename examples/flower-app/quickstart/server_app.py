"""The ServerApp."""

from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from quickstart.task import Net

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train a model, and save it."""
    num_rounds = context.run_config["num-server-rounds"]
    lr = context.run_config["learning-rate"]
    out = Path(context.run_config["out"])
    out.mkdir(parents=True, exist_ok=True)

    arrays = ArrayRecord(Net().state_dict())

    strategy = FedAvg()

    result = strategy.start(
        grid=grid, initial_arrays=arrays, train_config=ConfigRecord({"lr": lr}), num_rounds=num_rounds
    )
    print(f"Held-out records: {result.evaluate_metrics_clientapp[num_rounds]}")
    torch.save(result.arrays.to_torch_state_dict(), out / "final_model.pt")
