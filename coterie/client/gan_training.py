"""Local training of GANs (PPFC-GAN, lines 2 to 4), written once as a function over clients.

    for K epochs, for every batch x of b records:
        D ← Adam on  -log D(x) - log(1 - D(G(z)))
        G ← Adam on  -log D(G(z))                        with the same z
        Ḡ ← a Ḡ + (1 - a) G                              parameters; a = 0, the paper's: Ḡ = G
    samples of Ḡ: as many as asked for, in batches of b, as batch normalisation saw them

G circles around what it looks for, and its average lies nearer (Yazici et al. 2019; figures in docs/results.md).

``sequential`` trains one client after the other, and is the oracle; worker processes share the clients on a CPU.
``batched`` trains all of them at once (``torch.func.vmap``), for a GPU: the same numbers up to rounding.

At record level D is trained by DP-SGD: Poisson batches, every record's gradient of -log D(x) clipped, noise on their
sum, which b divides. The other half of D's loss and all of G's hold no record, so they are post-processing, as Adam is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.functional import one_hot, softplus

from coterie.client.dpsgd import DPSGD, clipped_gradients
from coterie.client.state import ClientError
from coterie.logs import report_progress
from coterie.models import GANInfo
from coterie.wire.messages import Layout

Samples = npt.NDArray[np.float32]
Named = dict[str, Tensor]

_GENERATOR, _DISCRIMINATOR = "generator.", "discriminator."


@dataclass(frozen=True)
class GANTraining:
    """Hyper-parameters of local GAN training.

    Attributes:
        info: the GAN.
        categories: k, length of the one-hot part of a latent vector.
        epochs: K.
        batch_size: b; incomplete batches are dropped, and a client with fewer than b records uses one full batch.
        samples: number of samples per client; 0: as many as the client has records.
        device: torch device.
        average: a, decay of the moving average; at step k at most (k - 1) / (k + 9), so that early steps fade.
        precision: of matrix products, "float32" or "bfloat16" (torch.autocast); DP-SGD always uses float32.
        feature_range: r; records lie in [-r, r].
    """

    info: GANInfo
    categories: int
    epochs: int
    batch_size: int
    samples: int = 0
    device: str = "cpu"
    average: float = 0.0
    precision: str = "float32"
    feature_range: float = 1.0

    def batch(self, records: int) -> int:
        """Batch size of a client with this number of records."""
        return min(self.batch_size, records)

    def steps(self, records: int) -> int:
        """Training steps of a client with this number of records."""
        return self.epochs * (records // self.batch(records))

    def report(self, whose: str, step: int, records: int) -> None:
        """Report progress at the start of every epoch."""
        epoch, within = divmod(step, records // self.batch(records))
        if not within:
            report_progress(f"{whose}: epoch {epoch + 1} of {self.epochs}")

    def batches(self, rng: np.random.Generator, records: int) -> Iterator[npt.NDArray[np.int64]]:
        """Indices of every step: a new permutation per epoch."""
        size = self.batch(records)
        for _ in range(self.epochs):
            order = rng.permutation(records)
            yield from (order[begin : begin + size] for begin in range(0, records - size + 1, size))

    def latent(self, rng: np.random.Generator, count: int) -> Tensor:
        """(count, normals + k) latent vectors."""
        normals = torch.as_tensor(rng.standard_normal((count, self.info.normals), np.float32))
        drawn = one_hot(torch.as_tensor(rng.integers(self.categories, size=count)), self.categories)
        return torch.cat([normals, drawn], dim=1).to(self.device)

    def autocast(self) -> torch.autocast:
        """Return the autocast context of this precision."""
        return torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=self.precision == "bfloat16")

    @torch.no_grad()
    def update_average(self, averages: Named, parameters: Iterable[Tensor], step: int) -> None:
        """Update the moving averages after a step, counted from 0."""
        for average, parameter in zip(averages.values(), parameters, strict=True):
            average.lerp_(parameter, 1 - min(self.average, step / (step + 10)))

    def check(self, x: npt.NDArray[np.float32]) -> ClientError | None:
        """Return why no GAN can be trained on these records; None if one can."""
        if len(x) < 2:
            return ClientError("a GAN requires at least 2 records; this client has fewer")
        if not self.info.records_apart and self.batch(len(x)) < 2:
            return ClientError(f"gan {self.info.name} normalises over a batch: set batch-size to at least 2")
        return None

    def to_generator_range(self, x: npt.NDArray[np.float32]) -> Tensor:
        """Scale records from [-r, r] to the range of the generator."""
        low = self.info.low
        return torch.as_tensor((x / self.feature_range + 1) / 2 * (1 - low) + low, device=self.device)

    def from_generator_range(self, made: Tensor) -> Samples:
        """Scale generated records to [-r, r]."""
        low = self.info.low
        scaled = (made.cpu().numpy() - low) / (1 - low) * 2 - 1
        return np.asarray(self.feature_range * np.clip(scaled, -1, 1), np.float32)


def train_gans(
    network: nn.ModuleDict,
    layout: Layout,
    start: npt.NDArray[np.float32],
    records: Sequence[npt.NDArray[np.float32]],
    rngs: Sequence[np.random.Generator],
    config: GANTraining,
    *,
    clients: Sequence[int],
    batched: bool,
) -> list[Samples]:
    """Train a GAN for every client, and return its samples.

    Args:
        network: the GAN; its own parameters are not used.
        layout: of its parameters.
        start: (d,) initial parameters.
        records: (n_i, *shape) records of the n clients, accepted by :meth:`GANTraining.check`.
        rngs: n generators, for the order of records and for latent vectors.
        config: hyper-parameters.
        clients: client ids, for progress reports.
        batched: whether all clients train at once instead of one after the other.

    Returns:
        (samples, *shape) float32 in [-1, 1] of every client.
    """
    inward = [config.to_generator_range(x) for x in records]
    begin = {name: torch.tensor(value, device=config.device) for name, value in layout.split(start).items()}
    train = _train_batched if batched else _train_sequential
    generators = train(network.to(config.device), begin, inward, rngs, config, clients)
    return [_sample(network, *arguments, config) for arguments in zip(generators, map(len, records), rngs, strict=True)]


def _train_sequential(
    network: nn.ModuleDict,
    start: Named,
    records: Sequence[Tensor],
    rngs: Sequence[np.random.Generator],
    config: GANTraining,
    clients: Sequence[int],
) -> list[Named]:
    trained = []
    generator, discriminator = network["generator"], network["discriminator"]
    for client, x, rng in zip(clients, records, rngs, strict=True):
        _load(network, start)
        averages = _copies(generator.named_parameters())
        of_g, of_d = _optimisers(list(generator.parameters()), list(discriminator.parameters()), config.info)
        for step, batch in enumerate(config.batches(rng, len(x))):
            config.report(f"GAN of client {client}", step, len(x))
            real = x[torch.as_tensor(batch, device=config.device)]
            with config.autocast():
                made = generator(config.latent(rng, len(batch)))
                logits = discriminator(real), discriminator(made.detach())
            _step(of_d, _discriminator_loss(*logits))
            with config.autocast():
                logit = discriminator(made)
            _step(of_g, _generator_loss(logit))
            config.update_average(averages, generator.parameters(), step)
        trained.append(averages)
    return trained


def _train_batched(
    network: nn.ModuleDict,
    start: Named,
    records: Sequence[Tensor],
    rngs: Sequence[np.random.Generator],
    config: GANTraining,
    clients: Sequence[int],
) -> list[Named]:
    """Train clients with equal batch sizes and steps together, one group after the other."""
    groups: dict[tuple[int, int], list[int]] = {}
    for i, x in enumerate(records):
        groups.setdefault((config.batch(len(x)), config.steps(len(x))), []).append(i)
    trained: dict[int, Named] = {}
    for (size, _), members in groups.items():
        parts = [_stacked(start, prefix, len(members)) for prefix in (_GENERATOR, _DISCRIMINATOR)]
        of_g, of_d = parts
        averages = _copies(of_g.items())
        adam_g, adam_d = _optimisers(list(of_g.values()), list(of_d.values()), config.info)
        generate = vmap(lambda p, z: functional_call(network["generator"], p, (z,)))
        discriminate = vmap(lambda p, x: functional_call(network["discriminator"], p, (x,)))
        together = zip(*(config.batches(rngs[i], len(records[i])) for i in members), strict=True)
        for step, batches in enumerate(together):
            config.report(f"GANs of {len(members)} of {len(clients)} clients", step, len(records[members[0]]))
            latent = torch.stack([config.latent(rngs[i], size) for i in members])
            real = torch.stack(
                [records[i][torch.as_tensor(b, device=config.device)] for i, b in zip(members, batches, strict=True)]
            )
            # The mean over all records, times the number of clients, gives each client the gradient of its own mean.
            with config.autocast():
                made = generate(of_g, latent)
                logits = discriminate(of_d, real), discriminate(of_d, made.detach())
            _step(adam_d, _discriminator_loss(*logits) * len(members))
            with config.autocast():
                logit = discriminate(of_d, made)
            _step(adam_g, _generator_loss(logit) * len(members))
            config.update_average(averages, of_g.values(), step)
        for row, i in enumerate(members):
            trained[i] = {name: value[row] for name, value in averages.items()}
    return [trained[i] for i in range(len(records))]


def train_gan_privately(
    network: nn.ModuleDict,
    layout: Layout,
    start: npt.NDArray[np.float32],
    records: npt.NDArray[np.float32],
    coins: np.random.Generator,
    noises: np.random.Generator,
    latents: np.random.Generator,
    config: GANTraining,
    private: DPSGD,
) -> Samples:
    """Train the GAN of one client, its discriminator by DP-SGD, and return its samples.

    Args:
        network: a GAN without layers that mix records.
        layout, start: see :func:`train_gans`.
        records: (n, *shape) in [-1, 1].
        coins: for Poisson batches.
        noises: for noise; a cryptographic generator unless the run is seeded.
        latents: for latent vectors.
        config: hyper-parameters; epochs and batch size are those of ``private``.
        private: sampling rate, clipping norm and noise.

    Raises:
        ModelError: Opacus cannot take the discriminator's gradients record by record.
    """
    # Clamped, since a rejection would depend on the records.
    x = config.to_generator_range(np.clip(np.nan_to_num(records), -1, 1))
    network = network.to(config.device)
    _load(network, {name: torch.tensor(value, device=config.device) for name, value in layout.split(start).items()})
    generator, discriminator = network["generator"], network["discriminator"]
    learned = list(discriminator.parameters())
    of_g, of_d = _optimisers(list(generator.parameters()), learned, config.info)
    size = sum(parameter.numel() for parameter in learned)
    averages = _copies(generator.named_parameters())
    for step in range(private.steps):
        made = generator(config.latent(latents, private.batch_size))
        batch = torch.as_tensor(private.sample(coins, len(x)), device=config.device)
        total = torch.as_tensor(private.noise(noises, size), device=config.device)
        total += clipped_gradients(discriminator, x[batch], _real_loss, private)
        public = torch.autograd.grad(softplus(discriminator(made.detach())).mean(), learned)
        noisy = torch.split(
            total * (private.clip_norm / private.batch_size), [parameter.numel() for parameter in learned]
        )
        for parameter, gradient, other in zip(learned, noisy, public, strict=True):
            parameter.grad = gradient.reshape(parameter.shape).to(parameter.dtype) + other
        of_d.step()
        _step(of_g, _generator_loss(discriminator(made)))
        config.update_average(averages, generator.parameters(), step)
    return _sample(network, averages, private.num_examples, latents, config)


def _discriminator_loss(real: Tensor, made: Tensor) -> Tensor:
    """Return the mean loss of a discriminator with these logits."""
    return softplus(-_whole(real)).mean() + softplus(_whole(made)).mean()


def _generator_loss(made: Tensor) -> Tensor:
    return softplus(-_whole(made)).mean()


def _whole(logits: Tensor) -> Tensor:
    """Convert to float32 or wider, in which losses are summed."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _real_loss(logits: Tensor, targets: Any) -> Tensor:
    return softplus(-logits.squeeze(1))


def _optimisers(
    generator: Sequence[Tensor], discriminator: Sequence[Tensor], info: GANInfo
) -> tuple[torch.optim.Adam, torch.optim.Adam]:
    return (
        torch.optim.Adam(generator, info.lr[0], betas=info.betas, fused=True),
        torch.optim.Adam(discriminator, info.lr[1], betas=info.betas, fused=True),
    )


def _step(adam: torch.optim.Adam, loss: Tensor) -> None:
    (group,) = adam.param_groups
    gradients = torch.autograd.grad(loss, group["params"])
    for parameter, gradient in zip(group["params"], gradients, strict=True):
        parameter.grad = gradient.contiguous()  # fused kernels need the parameter's memory layout
    adam.step()


def _copies(parameters: Iterable[tuple[str, Tensor]]) -> Named:
    return {name: value.detach().clone() for name, value in parameters}


def _load(network: nn.ModuleDict, values: Named) -> None:
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.copy_(values[name])


def _stacked(start: Named, prefix: str, count: int) -> Named:
    """Repeat the parameters of one network for every client."""
    return {
        name.removeprefix(prefix): value.expand(count, *value.shape).clone().requires_grad_()
        for name, value in start.items()
        if name.startswith(prefix)
    }


@torch.no_grad()
def _sample(
    network: nn.ModuleDict, generator: Named, records: int, rng: np.random.Generator, config: GANTraining
) -> Samples:
    """Sample a trained generator, in batches of its training size."""
    wanted, size = config.samples or records, config.batch(records)
    made = []
    for begin in range(0, wanted, size):
        latent = config.latent(rng, size)
        made.append(
            config.from_generator_range(functional_call(network["generator"], generator, (latent,)))[: wanted - begin]
        )
    return np.concatenate(made)
