"""pfl-research (https://github.com/apple/pfl-research): ``python run_pfl.py FOLDER RESULT [--processes N]``.

Several processes are what ``torchrun`` starts: each simulates its share of a cohort, and the sums are all-reduced with
gloo. Runs in an interpreter that has pfl.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from task import Task, initial, report
from torch.nn.functional import cross_entropy


def train(folder: Path, result: Path, channels_last: bool) -> None:  # noqa: C901
    """Train all rounds in this process, one of WORLD_SIZE; the first one writes the model."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDatasetBase
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.internal.ops import get_ops
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel
    from pfl.privacy import CentrallyAppliedPrivacyMechanism, GaussianMechanism

    task, arrays = Task.read(folder)
    form = torch.channels_last if channels_last else torch.contiguous_format
    x = [one.to(task.device, memory_format=form) for one in torch.as_tensor(arrays["x"])]
    y = torch.as_tensor(arrays["y"], device=task.device)
    network = task.build().to(memory_format=form)
    with torch.no_grad():
        for name, values in initial(arrays).items():
            network.get_parameter(name).copy_(torch.as_tensor(values))
    network.loss = lambda images, labels: cross_entropy(network(images), labels)
    network.metrics = lambda images, labels: {"loss": Weighted(cross_entropy(network(images), labels).item(), 1)}

    class Client(Dataset):  # type: ignore[misc]
        """Yields its batches in the order of the task."""

        def __init__(self, number: int, client: int) -> None:
            super().__init__((x[client], y[client]), user_id=str(client))
            self._order = task.batches(number, client, len(y[client]))
            self._steps = len(self._order) // task.epochs

        def iter(self, batch_size: int | None) -> Iterator[tuple[Any, Any]]:
            if batch_size is None or not self._order:  # an evaluation, in the first round only
                yield self.raw_data
                return
            epoch, self._order = self._order[: self._steps], self._order[self._steps :]
            yield from ((self.raw_data[0][batch], self.raw_data[1][batch]) for batch in epoch)

    class Clients(FederatedDatasetBase):  # type: ignore[misc]
        """The cohorts of the task, shared out to the processes."""

        def __init__(self) -> None:
            super().__init__()
            self._round = 0

        def __next__(self) -> Any:
            raise NotImplementedError

        def get_cohort(self, cohort_size: int) -> Iterator[tuple[Any, int]]:
            self._round += 1
            distributed = get_ops().distributed
            for client in task.cohorts[self._round - 1][distributed.global_rank :: distributed.world_size]:
                yield Client(self._round, client), client

    class FixedDivisor(FederatedAveraging):  # type: ignore[misc]
        """Federated averaging whose divisor is constant; the step size of the server holds it."""

        def process_aggregated_statistics(
            self, central_context: Any, aggregate_metrics: Any, model: Any, statistics: Any
        ) -> Any:
            return model.apply_model_update(statistics)

    class Report(TrainingProcessCallback):  # type: ignore[misc]
        def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
            if get_ops().distributed.global_rank == 0:
                report(central_iteration + 1)
            return False, Metrics()

    optimizer = torch.optim.SGD(network.parameters(), lr=task.scale)
    model = PyTorchModel(network, torch.optim.SGD, optimizer)
    mechanism = CentrallyAppliedPrivacyMechanism(GaussianMechanism(task.clip, task.noise / task.clip))
    rounds = len(task.cohorts)
    FixedDivisor().run(
        NNAlgorithmParams(rounds, rounds + 1, round(np.mean([len(c) for c in task.cohorts])), None),
        SimulatedBackend(Clients(), Clients(), postprocessors=[mechanism]),
        model,
        NNTrainHyperParams(local_batch_size=task.batch_size, local_num_epochs=task.epochs, local_learning_rate=task.lr),
        callbacks=[Report()],
        send_metrics_to_platform=False,
    )
    if get_ops().distributed.global_rank == 0:
        np.savez(result, **{k: v.detach().cpu().numpy()[None] for k, v in network.named_parameters()})


def main() -> None:
    """Train in this process and in others."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--channels-last", action="store_true")
    chosen = parser.parse_args()
    if importlib.util.find_spec("pfl") is None:
        print(json.dumps({"skipped": f"{sys.executable} has no pfl; give an interpreter that has (--python-pfl)"}))
        return
    task, _ = Task.read(chosen.folder)
    os.environ["PFL_PYTORCH_DEVICE"] = task.device
    others = []
    if chosen.processes > 1:
        torch.set_num_threads(1)
        if "RANK" not in os.environ:
            others = _start_others(chosen.processes)
    train(chosen.folder, chosen.result, chosen.channels_last)
    for process in others:
        process.wait()


def _start_others(processes: int) -> list[subprocess.Popen[bytes]]:
    """Start the processes of rank 1 and above, as ``torchrun`` does, and become rank 0."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    common = {"TORCHELASTIC_RUN_ID": "speed", "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    variables = [{k: str(v) for k, v in {**common, "RANK": i, "LOCAL_RANK": i}.items()} for i in range(processes)]
    os.environ.update(variables[0])
    return [subprocess.Popen([sys.executable, *sys.argv], env=os.environ | own) for own in variables[1:]]


if __name__ == "__main__":
    main()
