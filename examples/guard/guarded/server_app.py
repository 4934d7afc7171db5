"""The ServerApp."""

from flwr.app import ArrayRecord
from flwr.serverapp.strategy import FedAvg
from quickstart.task import Net

from coterie.guard import GuardedServerApp

app = GuardedServerApp(delta=1e-4)


@app.main()
def main(grid, context):
    """Train by federated averaging."""
    arrays = ArrayRecord(Net().state_dict())
    FedAvg().start(grid=grid, initial_arrays=arrays, num_rounds=context.run_config["num-server-rounds"])
