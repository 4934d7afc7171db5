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
from coterie.client.memory import ClientError
from coterie.messages import Layout
from coterie.models import GANInfo
from coterie.progress import report_progress

Samples = npt.NDArray[np.float32]
Named = dict[str, Tensor]

_GENERATOR, _DISCRIMINATOR = "generator.", "discriminator."


@dataclass(frozen=True)
class GANTraining:
    """How GANs are trained, and how much they make.

    Attributes:
        info: which GAN.
        categories: k, length of the one-hot part of a latent vector.
        epochs: K.
        batch_size: b; an epoch leaves out what does not fill a batch, and a client with fewer records takes all.
        samples: of each client; 0: as many as it has records.
        device: torch device.
        average: a; at the k-th step at most (k - 1) / (k + 9), that the first steps are forgotten.
        precision: of matrix products, "float32" or "bfloat16" (torch.autocast); DP-SGD has float32.
    """

    info: GANInfo
    categories: int
    epochs: int
    batch_size: int
    samples: int = 0
    device: str = "cpu"
    average: float = 0.0
    precision: str = "float32"

    def batch(self, records: int) -> int:
        """Size of a client's batches."""
        return min(self.batch_size, records)

    def steps(self, records: int) -> int:
        """Of a client."""
        return self.epochs * (records // self.batch(records))

    def report(self, whose: str, step: int, records: int) -> None:
        """Report progress at the start of every epoch."""
        epoch, within = divmod(step, records // self.batch(records))
        if not within:
            report_progress(f"{whose}: epoch {epoch + 1} of {self.epochs}")

    def batches(self, rng: np.random.Generator, records: int) -> Iterator[npt.NDArray[np.int64]]:
        """Records of every step: a fresh permutation an epoch."""
        size = self.batch(records)
        for _ in range(self.epochs):
            order = rng.permutation(records)
            yield from (order[begin : begin + size] for begin in range(0, records - size + 1, size))

    def latent(self, rng: np.random.Generator, count: int) -> Tensor:
        """(count, normals + k) latent vectors."""
        normals = torch.as_tensor(rng.standard_normal((count, self.info.normals), np.float32))
        drawn = one_hot(torch.as_tensor(rng.integers(self.categories, size=count)), self.categories)
        return torch.cat([normals, drawn], dim=1).to(self.device)

    def products(self) -> torch.autocast:
        """A context in which matrix products have the precision."""
        return torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=self.precision == "bfloat16")

    @torch.no_grad()
    def follow(self, averages: Named, parameters: Iterable[Tensor], step: int) -> None:
        """Move the averages, after a step that is counted from 0."""
        for average, parameter in zip(averages.values(), parameters, strict=True):
            average.lerp_(parameter, 1 - min(self.average, step / (step + 10)))

    def refusal(self, x: npt.NDArray[np.float32]) -> ClientError | None:
        """Why no GAN can be trained on these records, if none can."""
        if len(x) < 2:
            return ClientError("a GAN needs at least 2 records; this client has fewer")
        if not self.info.records_apart and self.batch(len(x)) < 2:
            return ClientError(f"gan {self.info.name} normalises over a batch: set batch-size to 2 or more")
        if not (x.min() >= -1 and x.max() <= 1):
            return ClientError(
                f"records span {x.min():g} to {x.max():g}, and a GAN makes numbers in [-1, 1]: scale them by public "
                "constants"
            )
        return None

    def inward(self, x: npt.NDArray[np.float32]) -> Tensor:
        """Records, in [-1, 1], in the range of the generator."""
        low = self.info.low
        return torch.as_tensor((x + 1) / 2 * (1 - low) + low, device=self.device)

    def outward(self, made: Tensor) -> Samples:
        """What the generator made, in [-1, 1]."""
        low = self.info.low
        scaled = (made.cpu().numpy() - low) / (1 - low) * 2 - 1
        return np.asarray(np.clip(scaled, -1, 1), np.float32)


def train_gans(
    network: nn.ModuleDict,
    layout: Layout,
    start: npt.NDArray[np.float32],
    records: Sequence[npt.NDArray[np.float32]],
    rngs: Sequence[np.random.Generator],
    how: GANTraining,
    *,
    clients: Sequence[int],
    batched: bool,
) -> list[Samples]:
    """Samples of a GAN of every client.

    Args:
        network: the GAN; its own parameters are not used.
        layout: of its parameters.
        start: (d,) where all begin.
        records: the n clients' (n_i, *shape), as :meth:`GANTraining.refusal` wants them.
        rngs: n generators, for the order of records and for latent vectors.
        how: what to do.
        clients: whose they are, to say how far each one is.
        batched: all clients at once, or one after the other.

    Returns:
        (samples, *shape) float32 in [-1, 1] of every client.
    """
    inward = [how.inward(x) for x in records]
    begin = {name: torch.tensor(value, device=how.device) for name, value in layout.split(start).items()}
    train = _train_batched if batched else _train_sequential
    generators = train(network.to(how.device), begin, inward, rngs, how, clients)
    return [_sample(network, *each, how) for each in zip(generators, map(len, records), rngs, strict=True)]


def _train_sequential(
    network: nn.ModuleDict,
    start: Named,
    records: Sequence[Tensor],
    rngs: Sequence[np.random.Generator],
    how: GANTraining,
    clients: Sequence[int],
) -> list[Named]:
    trained = []
    generator, discriminator = network["generator"], network["discriminator"]
    for client, x, rng in zip(clients, records, rngs, strict=True):
        _load(network, start)
        averages = _copies(generator.named_parameters())
        of_g, of_d = _optimisers(list(generator.parameters()), list(discriminator.parameters()), how.info)
        for step, batch in enumerate(how.batches(rng, len(x))):
            how.report(f"GAN of client {client}", step, len(x))
            real = x[torch.as_tensor(batch, device=how.device)]
            with how.products():
                made = generator(how.latent(rng, len(batch)))
                logits = discriminator(real), discriminator(made.detach())
            _descend(of_d, _judged(*logits))
            with how.products():
                logit = discriminator(made)
            _descend(of_g, _fooled(logit))
            how.follow(averages, generator.parameters(), step)
        trained.append(averages)
    return trained


def _train_batched(
    network: nn.ModuleDict,
    start: Named,
    records: Sequence[Tensor],
    rngs: Sequence[np.random.Generator],
    how: GANTraining,
    clients: Sequence[int],
) -> list[Named]:
    """Clients with equal batches and steps together; of the others each group by itself."""
    groups: dict[tuple[int, int], list[int]] = {}
    for i, x in enumerate(records):
        groups.setdefault((how.batch(len(x)), how.steps(len(x))), []).append(i)
    trained: dict[int, Named] = {}
    for (size, _), members in groups.items():
        parts = [_stacked(start, prefix, len(members)) for prefix in (_GENERATOR, _DISCRIMINATOR)]
        of_g, of_d = parts
        averages = _copies(of_g.items())
        adam_g, adam_d = _optimisers(list(of_g.values()), list(of_d.values()), how.info)
        generate = vmap(lambda p, z: functional_call(network["generator"], p, (z,)))
        judge = vmap(lambda p, x: functional_call(network["discriminator"], p, (x,)))
        together = zip(*(how.batches(rngs[i], len(records[i])) for i in members), strict=True)
        for step, batches in enumerate(together):
            how.report(f"GANs of {len(members)} of {len(clients)} clients", step, len(records[members[0]]))
            latent = torch.stack([how.latent(rngs[i], size) for i in members])
            real = torch.stack(
                [records[i][torch.as_tensor(b, device=how.device)] for i, b in zip(members, batches, strict=True)]
            )
            # The mean over all clients' records, times their number: every client has the gradient of its own mean.
            with how.products():
                made = generate(of_g, latent)
                logits = judge(of_d, real), judge(of_d, made.detach())
            _descend(adam_d, _judged(*logits) * len(members))
            with how.products():
                logit = judge(of_d, made)
            _descend(adam_g, _fooled(logit) * len(members))
            how.follow(averages, of_g.values(), step)
        for place, i in enumerate(members):
            trained[i] = {name: value[place] for name, value in averages.items()}
    return [trained[i] for i in range(len(records))]


def train_gan_privately(
    network: nn.ModuleDict,
    layout: Layout,
    start: npt.NDArray[np.float32],
    records: npt.NDArray[np.float32],
    coins: np.random.Generator,
    noises: np.random.Generator,
    latents: np.random.Generator,
    how: GANTraining,
    private: DPSGD,
) -> Samples:
    """Samples of the GAN of one client whose discriminator is trained by DP-SGD.

    Args:
        network: a GAN in which no record sees another.
        layout, start: see :func:`train_gans`.
        records: (n, *shape) in [-1, 1].
        coins: for who is in a batch.
        noises: for the noise; a cryptographic one where the guarantee counts.
        latents: for latent vectors.
        how: what to do; its epochs and batches are those of ``private``.
        private: rates, bounds and noise.

    Raises:
        ModelError: Opacus cannot take the discriminator's gradients record by record.
    """
    # What lies outside is pulled in: to refuse would tell of it.
    x = how.inward(np.clip(np.nan_to_num(records), -1, 1))
    network = network.to(how.device)
    _load(network, {name: torch.tensor(value, device=how.device) for name, value in layout.split(start).items()})
    generator, discriminator = network["generator"], network["discriminator"]
    learned = list(discriminator.parameters())
    of_g, of_d = _optimisers(list(generator.parameters()), learned, how.info)
    size = sum(parameter.numel() for parameter in learned)
    averages = _copies(generator.named_parameters())
    for step in range(private.steps):
        made = generator(how.latent(latents, private.batch_size))
        batch = torch.as_tensor(private.sample(coins, len(x)), device=how.device)
        total = torch.as_tensor(private.noise(noises, size), device=how.device)
        total += clipped_gradients(discriminator, x[batch], _takes_for_real, private)
        public = torch.autograd.grad(softplus(discriminator(made.detach())).mean(), learned)
        noisy = torch.split(
            total * (private.clip_norm / private.batch_size), [parameter.numel() for parameter in learned]
        )
        for parameter, own, other in zip(learned, noisy, public, strict=True):
            parameter.grad = own.reshape(parameter.shape).to(parameter.dtype) + other
        of_d.step()
        _descend(of_g, _fooled(discriminator(made)))
        how.follow(averages, generator.parameters(), step)
    return _sample(network, averages, private.num_examples, latents, how)


def _judged(real: Tensor, made: Tensor) -> Tensor:
    """Mean loss of a discriminator with these logits."""
    return softplus(-_whole(real)).mean() + softplus(_whole(made)).mean()


def _fooled(made: Tensor) -> Tensor:
    """Mean loss of the generator."""
    return softplus(-_whole(made)).mean()


def _whole(logits: Tensor) -> Tensor:
    """At least float32, in which losses are added up."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _takes_for_real(logits: Tensor, targets: Any) -> Tensor:
    """(n,) loss of a discriminator at records."""
    return softplus(-logits.squeeze(1))


def _optimisers(
    generator: list[Tensor], discriminator: list[Tensor], info: GANInfo
) -> tuple[torch.optim.Adam, torch.optim.Adam]:
    return (
        torch.optim.Adam(generator, info.lr[0], betas=info.betas, fused=True),
        torch.optim.Adam(discriminator, info.lr[1], betas=info.betas, fused=True),
    )


def _descend(adam: torch.optim.Adam, loss: Tensor) -> None:
    """A step on the optimiser's own parameters."""
    (group,) = adam.param_groups
    gradients = torch.autograd.grad(loss, group["params"])
    for parameter, gradient in zip(group["params"], gradients, strict=True):
        parameter.grad = gradient.contiguous()  # fused kernels read it in the order of the parameter
    adam.step()


def _copies(parameters: Iterable[tuple[str, Tensor]]) -> Named:
    return {name: value.detach().clone() for name, value in parameters}


def _load(network: nn.ModuleDict, values: Named) -> None:
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.copy_(values[name])


def _stacked(start: Named, prefix: str, count: int) -> Named:
    """One part's parameters, once for every client."""
    return {
        name.removeprefix(prefix): value.expand(count, *value.shape).clone().requires_grad_()
        for name, value in start.items()
        if name.startswith(prefix)
    }


@torch.no_grad()
def _sample(
    network: nn.ModuleDict, generator: Named, records: int, rng: np.random.Generator, how: GANTraining
) -> Samples:
    """What a trained generator makes, in batches of the size that it was trained with."""
    wanted, size = how.samples or records, how.batch(records)
    made = []
    for begin in range(0, wanted, size):
        latent = how.latent(rng, size)
        made.append(how.outward(functional_call(network["generator"], generator, (latent,)))[: wanted - begin])
    return np.concatenate(made)
