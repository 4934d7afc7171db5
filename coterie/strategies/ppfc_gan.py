"""PPFC-GAN: clients send samples of GANs of their own; the server clusters them with a deep clustering network.

Yan, Liu, Qi, Zhang, "Privacy-Preserving Federated Deep Clustering based on GAN" (papers/ppfc_gan), section 3.2.

    server                                                                        papers/ppfc_gan, 3.2.1 and 3.2.2
     1  G, D <- initialise a GAN; send it to every client
    client i
     2  G_i, D_i <- train G, D on X_i:  min_G max_D  E_z log(1 - D(G(z))) + E_x log D(x),        Equation (3)
     3      z = (z_n, e_u),  z_n ~ N(0, I),  u uniform on 1..k
     4  X'_i <- |X_i| samples of G_i; send them
    server
     5  f_e, C <- deep clustering network on the union of all X'_i                               Equation (1)
     6  send f_e and C to every client
    client i
     7  label of x <- argmin_j |f_e(x) - c_j|                                                    Equation (4)

Details
- The generator ascends log D(G(z)), which has the same fixed point as line 2 and gradients from the first step on.
- Samples are those of the generator's average (``gan_average``), several times nearer to the records than those of the
  last one (docs/results.md).
- ``joint_epochs`` = 0 trains the autoencoder alone and clusters its codes in sequence: the paper's PPFC-GAN†.
- The paper's Theorem 1 is no guarantee: it has delta = O(s/n) for s samples of n records, which is of order 1 at s = n,
  names no epsilon, and nothing is clipped or noised. At record level (privacy-unit = record) the discriminator is
  trained by DP-SGD instead, in a network without batch normalisation: generator and samples are then post-processing.
- Whose samples hardly differ from each other is named: its GAN collapsed and does not represent its records.
- The encoder travels with its batch normalisation folded in, so that a record's label is its own matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from logging import WARNING
from typing import TYPE_CHECKING, Any, ClassVar

from flwr.common.logger import log

from coterie.messages import Points
from coterie.models import GANS, ModelError, check_gan, gan_for
from coterie.privacy import Plan
from coterie.strategies.base import Parameters, StrategyError
from coterie.strategies.one_shot import FloatArray, OneShot, union
from coterie.wire import GanRequest

if TYPE_CHECKING:
    from coterie.models.autoencoder import Labeller

AUTO = "auto"
_STATE = "dcn-state"
# Of the deviation of all samples: a GAN whose own ones have less makes one and the same.
_ALIKE = 0.01


class PPFCGAN(OneShot):
    """Lines 1 to 7.

    Args:
        plan: see :class:`~coterie.strategies.OneShot`, as for the other arguments.
        gan: a name of :data:`~coterie.models.GANS`; "auto": the one that suits shape and privacy.
        gan_average: how much a client's generator keeps of its average at a step (Yazici et al. 2019); 0: the last is
            taken, as in the paper.
        synthetic_samples: samples of each client; 0: as many as it has records.
        autoencoder: "sae", with a linear code, or "sae-relu", as Table A.8 has it.
        pretrain_epochs: of the autoencoder alone.
        joint_epochs: of the deep clustering network, after that.
        dcn_weight: lambda, weight of the distance of codes from their centroids.
        dcn_noise: standard deviation of the noise that the autoencoder learns to take away.
        dcn_restarts: how many networks are trained, of which the one with the least objective is taken.
        precision: of matrix products, "float32" or "bfloat16"; DP-SGD has float32.
        device: where the server trains.
    """

    name: ClassVar[str] = "ppfc-gan"
    title: ClassVar[str] = "deep clustering of records by samples of clients' GANs"
    paper: ClassVar[str] = "Yan et al. 2022"
    units: ClassVar[tuple[str, ...]] = ("none", "record")
    afterwards: ClassVar[tuple[str, ...]] = (
        "autoencoder",
        "pretrain-epochs",
        "joint-epochs",
        "dcn-weight",
        "dcn-noise",
        "dcn-restarts",
    )
    options: ClassVar[tuple[str, ...]] = (
        *OneShot.options,
        "gan",
        "gan-average",
        "synthetic-samples",
        *afterwards,
        "precision",
        "device",
    )
    defaults: ClassVar[Mapping[str, Any]] = {**OneShot.defaults, "local-epochs": 200, "batch-size": 64}
    unfounded: ClassVar[tuple[str, ...]] = (
        "epsilon is infinite: PPFC-GAN's lemma gives no usable bound (a delta of the order of samples over records, "
        "here 1, and no epsilon); nothing is clipped or noised, and samples may show records; use privacy-unit record",
    )

    def __init__(
        self,
        plan: Plan,
        *,
        gan: str = AUTO,
        gan_average: float = 0.995,
        synthetic_samples: int = 0,
        autoencoder: str = "sae",
        pretrain_epochs: int = 10,
        joint_epochs: int = 15,
        dcn_weight: float = 4.0,
        dcn_noise: float = 0.4,
        dcn_restarts: int = 2,
        precision: str = "float32",
        device: str = "cpu",
        **others: Any,
    ) -> None:
        super().__init__(plan, **others)
        private = plan.unit == "record"
        self.gan = gan_for(self.shape, private=private) if gan == AUTO else gan
        try:
            check_gan(self.gan, self.shape)
        except ModelError as error:
            raise StrategyError(str(error)) from None
        if private and not GANS[self.gan].records_apart:
            raise StrategyError(f"gan {self.gan} normalises over records, which DP-SGD cannot: use {self.gan}-gn")
        if not pretrain_epochs + joint_epochs:
            raise StrategyError("pretrain-epochs and joint-epochs are 0: the autoencoder would not be trained")
        if synthetic_samples > self.most:
            raise StrategyError(
                f"synthetic-samples = {synthetic_samples}: upload-limit allows {self.most} of shape {self.shape}"
            )
        self.gan_average, self.precision = gan_average, precision
        self.samples, self.encoder = synthetic_samples, autoencoder
        self.pretrain_epochs, self.joint_epochs = pretrain_epochs, joint_epochs
        self.dcn_weight, self.dcn_noise, self.dcn_restarts = dcn_weight, dcn_noise, dcn_restarts
        self.device = device

    @classmethod
    def arrange(cls, draw: Callable[..., Parameters], **options: Any) -> Parameters:
        """Line 1."""
        return draw(gan=options["gan"], categories=options["clusters"])

    def question(self) -> GanRequest:
        """Which GAN, how it is trained, and how many samples."""
        return GanRequest(
            gan=self.gan,
            labels=self.clusters,
            samples=self.samples,
            average=float(self.gan_average),
            precision=self.precision,
        )

    def answer(self) -> Points:
        """Line 4."""
        return Points(self.shape, self.most, exactly=self.samples)

    def cluster(self, points: Mapping[int, FloatArray]) -> Labeller:
        """Line 5."""
        from coterie.clustering.dcn import DCN  # imports torch

        every = union(points)
        least = _ALIKE * _spread(every)
        collapsed = [client for client, own in points.items() if len(own) > 1 and _spread(own) < least]
        if collapsed:
            self.notes["collapsed"] = collapsed
            log(
                WARNING,
                "samples of clients %s hardly differ from each other: their GANs collapsed, and clusters may miss "
                "their records; try other features, gan or local-epochs",
                ", ".join(map(str, collapsed)),
            )
        network = DCN(
            self.clusters,
            self.pretrain_epochs,
            self.joint_epochs,
            self.dcn_weight,
            self.dcn_noise,
            self.encoder,
            self.dcn_restarts,
            precision=self.precision,
            seed=int(self.streams.stream("clustering", 1).integers(2**31)),
            device=self.device,
        )
        labeller = network.fit(
            every,
            state=self.recorder.kept(_STATE),
            keep=lambda state: self.recorder.keep(_STATE, state),
            progress=self.recorder.working_on,
        )
        self.recorder.keep(_STATE, {})
        return labeller


def _spread(points: FloatArray) -> float:
    """Mean over coordinates of the deviation of (n, *shape) points."""
    return float(points.std(axis=0).mean())
