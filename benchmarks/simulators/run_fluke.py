"""fluke (https://github.com/makgyver/fluke): ``python run_fluke.py FOLDER RESULT``; it simulates in one process."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from task import Task, initial, report


def train(folder: Path, result: Path) -> None:  # noqa: C901
    """Train all rounds, and write the model."""
    from fluke import FlukeENV
    from fluke.algorithms.fedavg import FedAVG
    from fluke.client import Client
    from fluke.config import OptimizerConfigurator
    from fluke.server import Server

    task, arrays = Task.read(folder)
    FlukeENV().set_device(task.device)
    x, y = (torch.as_tensor(arrays[name], device=task.device) for name in ("x", "y"))
    network = task.build()
    with torch.no_grad():
        for name, values in initial(arrays).items():
            network.get_parameter(name).copy_(torch.as_tensor(values))

    class Examples:
        """Batches of a client in the order of the task, one epoch after the other."""

        def __init__(self, client: int) -> None:
            self._client = client
            self._order: list[np.ndarray] = []
            self._steps = -(-len(y[client]) // task.batch_size)

        def start(self, number: int) -> None:
            """Begin a round."""
            self._order = task.batches(number, self._client, len(y[self._client]))

        def __len__(self) -> int:
            return self._steps

        def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            epoch, self._order = self._order[: self._steps], self._order[self._steps :]
            yield from ((x[self._client][batch], y[self._client][batch]) for batch in epoch)

    class Noisy(Server):  # type: ignore[misc]
        """Trains the cohorts of the task; clips updates, and adds noise to their sum."""

        def __init__(self, model: Any, clients: Sequence[Any]) -> None:
            super().__init__(model, None, clients)
            self._number, self._rng = 0, np.random.default_rng(task.seed)

        def get_eligible_clients(self, eligible_perc: float) -> Sequence[Any]:
            self._number += 1
            chosen = [self.clients[client] for client in task.cohorts[self._number - 1]]
            for client in chosen:
                client.train_set.start(self._number)
            return chosen

        @torch.no_grad()
        def aggregate(self, eligible: Sequence[Any], client_models: Iterable[Any]) -> None:
            parameters = list(self.model.parameters())
            total = [torch.zeros_like(value) for value in parameters]
            for model in client_models:
                update = [new - old for new, old in zip(model.parameters(), parameters, strict=True)]
                norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(u) for u in update]))
                factor = (task.clip / norm).clamp(max=1.0)
                for sum_, u in zip(total, update, strict=True):
                    sum_ += factor * u
            for value, sum_ in zip(parameters, total, strict=True):
                noise = self._rng.standard_normal(value.shape, np.float32) * np.float32(task.noise)
                value += task.scale * (sum_ + torch.as_tensor(noise))
            report(self._number)

    optimizer = OptimizerConfigurator({"name": "SGD", "lr": task.lr})
    clients = [
        Client(
            i, Examples(i), None, optimizer, torch.nn.CrossEntropyLoss(), local_epochs=task.epochs, persistency=False
        )
        for i in range(len(y))
    ]
    server = Noisy(network, clients)
    FedAVG(len(clients), None, {}, clients=clients, server=server).run(len(task.cohorts), 0.1)
    np.savez(result, **{name: value.detach().numpy()[None] for name, value in network.named_parameters()})


def main() -> None:
    """Train, or say why not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("result", type=Path)
    chosen = parser.parse_args()
    if importlib.util.find_spec("fluke") is None:
        reason = f"{sys.executable} has no fluke; give an interpreter that has (--python-fluke)"
        print(json.dumps({"skipped": reason}))
        return
    train(chosen.folder, chosen.result)


if __name__ == "__main__":
    main()
