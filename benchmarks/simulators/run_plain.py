"""A plain loop over clients in PyTorch: ``python run_plain.py FOLDER RESULT [--processes N] [--channels-last]``.

Each process trains its share of a cohort and adds up clipped updates; the first one adds the noise.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from task import Task, initial, report
from torch.nn.functional import cross_entropy


class Trainer:
    """Trains clients, and adds up their updates.

    Args:
        folder: of the task.
        channels_last: whether images and parameters are in this memory format.
    """

    def __init__(self, folder: Path, channels_last: bool) -> None:
        self.task, arrays = Task.read(folder)
        form = torch.channels_last if channels_last else torch.contiguous_format
        self.network = self.task.build().to(self.task.device, memory_format=form)
        self.names = [name for name, _ in self.network.named_parameters()]
        self.parameters = list(self.network.parameters())
        x = torch.as_tensor(arrays["x"], device=self.task.device)
        self.x = [one.contiguous(memory_format=form) if one.dim() == 4 else one for one in x]
        self.y = torch.as_tensor(arrays["y"], device=self.task.device)
        first = initial(arrays)
        self.model = [torch.as_tensor(first[name], device=self.task.device) for name in self.names]

    def total(self, number: int, clients: Sequence[int], model: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the sum of the clipped updates of some clients."""
        total = [torch.zeros_like(value) for value in model]
        optimizer = torch.optim.SGD(self.parameters, lr=self.task.lr)
        for client in clients:
            with torch.no_grad():
                for parameter, value in zip(self.parameters, model, strict=True):
                    parameter.copy_(value)
            for batch in self.task.batches(number, client, len(self.y[client])):
                optimizer.zero_grad()
                torch.autograd.backward(cross_entropy(self.network(self.x[client][batch]), self.y[client][batch]))
                optimizer.step()
            with torch.no_grad():
                update = [p - value for p, value in zip(self.parameters, model, strict=True)]
                norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(u) for u in update]))
                factor = (self.task.clip / norm).clamp(max=1.0)
                for sum_, u in zip(total, update, strict=True):
                    sum_ += factor * u
        return total


def serve(folder: Path, channels_last: bool, threads: int, pipe: Connection) -> None:
    """Train the clients that the first process sends, until it sends None."""
    torch.set_num_threads(threads)
    trainer = Trainer(folder, channels_last)
    while (work := pipe.recv()) is not None:
        number, clients, model = work
        total = trainer.total(number, clients, [torch.as_tensor(v, device=trainer.task.device) for v in model])
        pipe.send([value.cpu().numpy() for value in total])


def main() -> None:
    """Train all rounds, and write the model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--channels-last", action="store_true")
    chosen = parser.parse_args()
    threads = torch.get_num_threads() if chosen.processes == 1 else 1
    torch.set_num_threads(threads)
    trainer, pipes = Trainer(chosen.folder, chosen.channels_last), []
    for _ in range(chosen.processes - 1):
        here, there = multiprocessing.Pipe()
        arguments = (chosen.folder, chosen.channels_last, threads, there)
        multiprocessing.get_context("spawn").Process(target=serve, args=arguments, daemon=True).start()
        pipes.append(here)
    task, rng = trainer.task, np.random.default_rng(trainer.task.seed)
    for number, cohort in enumerate(task.cohorts, start=1):
        for i, pipe in enumerate(pipes, start=1):
            pipe.send((number, cohort[i :: chosen.processes], [value.cpu().numpy() for value in trainer.model]))
        total = trainer.total(number, cohort[:: chosen.processes], trainer.model)
        for pipe in pipes:
            total = [a + torch.as_tensor(b, device=a.device) for a, b in zip(total, pipe.recv(), strict=True)]
        for value, sum_ in zip(trainer.model, total, strict=True):
            noise = rng.standard_normal(value.shape, np.float32) * np.float32(task.noise)
            value += task.scale * (sum_ + torch.as_tensor(noise, device=sum_.device))
        report(number)
    for pipe in pipes:
        pipe.send(None)
    found: dict[str, Any] = {
        name: value.cpu().numpy()[None] for name, value in zip(trainer.names, trainer.model, strict=True)
    }
    np.savez(chosen.result, **found)


if __name__ == "__main__":
    main()
