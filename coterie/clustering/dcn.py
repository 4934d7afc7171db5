"""The deep clustering network (Yang et al. 2017): an autoencoder trained for codes that k-means can cluster.

    minimise  sum_i |x_i - f_d(f_e(x_i))|^2 + lambda/2 |f_e(x_i) - C s_i|^2        PPFC-GAN, Equation (1)

     1  f_e, f_d <- train on the first term only, for some epochs
     2  C, s <- k-means of the codes
     3  for some epochs:
     4      f_e, f_d <- train on both terms with C and s fixed
     5      C, s <- k-means of the codes, initialised with C
     6  of several restarts, take the one with the smallest objective

Without lines 3 to 5, it is an autoencoder followed by k-means: the ablation PPFC-GAN†.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from coterie.clustering.kmeans import k_means
from coterie.logs import ProgressCallback, ignore_progress
from coterie.models.autoencoder import ENCODERS, Autoencoder, Labeller, folded

Arrays = dict[str, npt.NDArray[Any]]

# Points per forward pass without gradients.
_CHUNK = 8192
# Difference of the seeds of two restarts.
_APART = 1_000_003
# Epochs between two saved states.
_KEEP_EVERY = 5
_NETWORK, _OPTIMISER, _CENTROIDS, _LABELS, _EPOCH = "network/", "optimiser/", "centroids", "labels", "epoch"
_BEST, _LEAST, _START = "best/", "least", "start"


@dataclass(frozen=True)
class DCN:
    """Training of a deep clustering network.

    Attributes:
        k: number of clusters.
        pretrain_epochs: epochs of line 1.
        joint_epochs: epochs of line 3; 0: autoencoder and k-means in sequence.
        weight: lambda.
        noise: standard deviation of the Gaussian noise on the input of the autoencoder, whose target is the clean
            input (Vincent et al. 2010, the stacked denoising autoencoder named by PPFC-GAN); 0: none.
        encoder: a key of :data:`~coterie.models.autoencoder.ENCODERS`.
        restarts: number of networks trained; the one with the smallest objective is used.
        lr: Adam's step size (Table A.8).
        batch_part: batch size as a share of the number of points (Table A.8).
        precision: of matrix products in training, "float32" or "bfloat16" (torch.autocast). On processors with
            bfloat16 instructions, the latter takes a third of the time.
        seed: of initial parameters, batches and k-means.
        device: torch device, or "auto": a GPU if available.
    """

    k: int
    pretrain_epochs: int = 10
    joint_epochs: int = 15
    weight: float = 4.0
    noise: float = 0.4
    encoder: str = "sae"
    restarts: int = 2
    lr: float = 2e-3
    batch_part: float = 0.01
    precision: str = "float32"
    seed: int = 0
    device: str = "cpu"

    @property
    def _device(self) -> str:
        if self.device == "auto":
            return "cuda" if torch.cuda.is_available() else "cpu"
        return self.device

    @property
    def starts(self) -> int:
        """Number of networks trained: one without joint training, because codes then have no common scale."""
        return self.restarts if self.joint_epochs else 1

    def fit(
        self,
        points: npt.NDArray[np.float32],
        *,
        state: Mapping[str, npt.NDArray[Any]] | None = None,
        keep: Callable[[Arrays], None] = lambda state: None,
        progress: ProgressCallback = ignore_progress,
    ) -> Labeller:
        """Train, and return the labeller of the restart with the smallest Equation (1).

        It labels a point by the centroid nearest to its code.

        Args:
            points: (n, *shape).
            state: last argument of ``keep``, to resume from; None: start from the beginning.
            keep: called periodically with the state that is required to resume.
            progress: called with progress reports.

        Raises:
            ValueError: there are fewer points than clusters.
        """
        if not self.k <= len(points):
            raise ValueError(f"the number of points, {len(points)}, must be at least the number of clusters, {self.k}")
        x = torch.as_tensor(points.reshape(len(points), -1), device=self._device)
        state = dict(state or {})
        best = Labeller(points.shape[1:], self.k, self.encoder)
        least = float(state.get(_LEAST, np.inf))
        if np.isfinite(least):
            best.load_state_dict({name: torch.tensor(state[_BEST + name]) for name in best.state_dict()})
        for start in range(int(state.get(_START, 0)), self.starts):
            so_far: Arrays = {_START: np.array(start), _LEAST: np.array(least)}
            so_far |= {_BEST + name: value.numpy() for name, value in best.state_dict().items()}
            labeller, objective = self._fit(
                x, points.shape[1:], start, state, partial(_keep_all, keep, so_far), progress
            )
            if objective < least:
                best, least = labeller, objective
            state = {}
        return best

    def _fit(
        self,
        x: Tensor,
        shape: tuple[int, ...],
        start: int,
        state: Arrays,
        keep: Callable[[Arrays], None],
        progress: ProgressCallback,
    ) -> tuple[Labeller, float]:
        """Return the labeller of one restart, and its Equation (1)."""
        with torch.random.fork_rng(devices=()):
            torch.default_generator.manual_seed(self.seed + start * _APART)
            network = Autoencoder(x.shape[1], linear_code=ENCODERS[self.encoder]).to(self._device)
        adam = torch.optim.Adam(network.parameters(), self.lr, fused=True)
        centroids, labels, done = None, None, 0
        if _EPOCH in state:
            done, centroids, labels = _restore(network, adam, state)
        epochs = self.pretrain_epochs + self.joint_epochs
        for epoch in range(done, epochs):
            joint = epoch >= self.pretrain_epochs
            if joint and centroids is None:
                centroids, labels = self._cluster(network, x, (start, epoch), None)  # line 2
            progress(f"deep clustering {start + 1} of {self.starts}: epoch {epoch + 1} of {epochs}")
            self._train(network, adam, x, (start, epoch), centroids if joint else None, labels)
            if joint:
                centroids, labels = self._cluster(network, x, (start, epoch), centroids)  # line 5
            if (epoch + 1) % _KEEP_EVERY == 0:
                keep(_state(network, adam, epoch + 1, centroids, labels))
        if centroids is None:
            centroids, _ = self._cluster(network, x, (start, epochs), None)
        return self._labeller(network, centroids, shape), self._objective(network, x, centroids)

    def _train(
        self,
        network: Autoencoder,
        adam: torch.optim.Optimizer,
        x: Tensor,
        when: tuple[int, int],
        centroids: Tensor | None,
        labels: Tensor | None,
    ) -> None:
        """Lines 1 and 4: one epoch; on both terms if there are centroids."""
        rng = np.random.default_rng([self.seed, *when])
        size = max(2, math.ceil(self.batch_part * len(x)))
        for batch in torch.split(torch.as_tensor(rng.permutation(len(x)), device=self._device), size):
            if len(batch) < 2:  # batch normalisation needs a variance
                continue
            noise = self.noise * rng.standard_normal((len(batch), x.shape[1]), np.float32)
            dirty = x[batch] + torch.as_tensor(noise, device=self._device)
            with torch.autocast(x.device.type, torch.bfloat16, enabled=self.precision == "bfloat16"):
                codes, again = (output.to(x.dtype) for output in network(dirty))
            loss = (again - x[batch]).square().sum(dim=1).mean()
            if centroids is not None and labels is not None:
                apart = (codes - centroids[labels[batch]]).square().sum(dim=1).mean()
                loss = loss + self.weight / 2 * apart
            adam.zero_grad()
            loss.backward()
            adam.step()

    def _cluster(
        self, network: Autoencoder, x: Tensor, when: tuple[int, int], start: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the (k, code) centroids of the codes, initialised with ``start`` if given, and (n,) labels."""
        network.eval()
        with torch.no_grad():
            codes = torch.cat([network.encoder(chunk) for chunk in torch.split(x, _CHUNK)])
        network.train()
        rng = np.random.default_rng([self.seed, *when, 1])
        begin = None if start is None else start.cpu().numpy()
        centroids = torch.as_tensor(k_means(codes.cpu().numpy(), self.k, rng, start=begin), dtype=torch.float32)
        centroids = centroids.to(self._device)
        return centroids, torch.cat(
            [torch.cdist(chunk, centroids).argmin(dim=1) for chunk in torch.split(codes, _CHUNK)]
        )

    @torch.no_grad()
    def _objective(self, network: Autoencoder, x: Tensor, centroids: Tensor) -> float:
        """Return the mean of Equation (1) over points, without noise."""
        network.to(self._device).eval()
        total = 0.0
        for chunk in torch.split(x, _CHUNK):
            codes, again = network(chunk)
            apart = torch.cdist(codes, centroids).square().min(dim=1).values
            total += float(((again - chunk).square().sum(dim=1) + self.weight / 2 * apart).sum())
        return total / len(x)

    def _labeller(self, network: Autoencoder, centroids: Tensor, shape: tuple[int, ...]) -> Labeller:
        labeller = Labeller(shape, self.k, self.encoder)
        linear = [layer for layer in labeller.encoder if isinstance(layer, torch.nn.Linear)]
        with torch.no_grad():
            for layer, learned in zip(linear, folded(network.eval().cpu().encoder), strict=True):
                layer.weight.copy_(learned.weight)
                layer.bias.copy_(learned.bias)
            labeller.centroids.copy_(centroids.cpu())
        return labeller


def _keep_all(keep: Callable[[Arrays], None], so_far: Arrays, state: Arrays) -> None:
    keep({**so_far, **state})


def _state(
    network: Autoencoder, adam: torch.optim.Optimizer, epoch: int, centroids: Tensor | None, labels: Tensor | None
) -> Arrays:
    """Return the state required to resume training."""
    state: Arrays = {_EPOCH: np.array(epoch)}
    state |= {_NETWORK + name: value.cpu().numpy() for name, value in network.state_dict().items()}
    for index, moments in adam.state_dict()["state"].items():
        state |= {f"{_OPTIMISER}{index}/{name}": value.cpu().numpy() for name, value in moments.items()}
    if centroids is not None and labels is not None:
        state |= {_CENTROIDS: centroids.cpu().numpy(), _LABELS: labels.cpu().numpy()}
    return state


def _restore(
    network: Autoencoder, adam: torch.optim.Optimizer, state: Mapping[str, npt.NDArray[Any]]
) -> tuple[int, Tensor | None, Tensor | None]:
    """Load a state; return its number of epochs, centroids and labels."""
    device = next(network.parameters()).device
    network.load_state_dict(
        {key.removeprefix(_NETWORK): torch.tensor(value) for key, value in state.items() if key.startswith(_NETWORK)}
    )
    whole = adam.state_dict()
    for key, value in state.items():
        if key.startswith(_OPTIMISER):
            index, _, name = key.removeprefix(_OPTIMISER).partition("/")
            whole["state"].setdefault(int(index), {})[name] = torch.tensor(value)
    adam.load_state_dict(whole)
    tensors = [torch.as_tensor(state[key], device=device) if key in state else None for key in (_CENTROIDS, _LABELS)]
    return int(state[_EPOCH]), tensors[0], tensors[1]
