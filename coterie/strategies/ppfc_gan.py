"""PPFC-GAN: clients send samples of local GANs; the server clusters them with a deep clustering network.

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
- The generator maximises log D(G(z)), which has the same fixed point as line 2 and no vanishing initial gradients.
- Samples are drawn from a moving average of the generator (``ema_decay``); they are several times closer to the records
  than those of the last generator (docs/results.md).
- ``joint_epochs`` = 0 trains the autoencoder first and then clusters its codes: the paper's PPFC-GAN†.
- The paper's Theorem 1 gives no guarantee: its delta = O(s/n) for s samples of n records is of order 1 at s = n, it
  states no epsilon, and nothing is clipped or noised. At record level (privacy-unit = record) the discriminator is
  trained by DP-SGD instead, in a network without batch normalisation: generator and samples are then post-processing.
- The notes list clients whose samples hardly differ from each other: their GANs collapsed.
- The server folds batch normalisation into the encoder, so that the label of a record does not depend on others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from logging import WARNING
from typing import TYPE_CHECKING, Any, ClassVar

from flwr.common.logger import log

from coterie.fields import EMA_DECAY, GAN_SAMPLES
from coterie.fields.settings import Settings, setting
from coterie.models import GANS, ModelError, check_gan, gan_for
from coterie.rounds.run_state import StrategyError
from coterie.strategies.method import Parameters
from coterie.strategies.one_shot import FloatArray, OneShot, OneShotSettings, union
from coterie.wire import GanRequest
from coterie.wire.messages import PointsSpec

if TYPE_CHECKING:
    from coterie.models.autoencoder import Labeller

_STATE = "dcn-state"
# Share of the standard deviation of all samples below which a GAN counts as collapsed.
_COLLAPSED_SHARE = 0.01


@dataclass(frozen=True)
class PPFCGANSettings(OneShotSettings):
    """Settings of PPFC-GAN."""

    table: ClassVar[str] = "ppfc-gan"

    gan: str | None = setting(
        None,
        "GAN of the clients; auto: by the shape of the data, with GroupNorm at record level",
        choices=sorted(GANS),
        tuned=True,
    )
    ema_decay: float = setting(
        0.995,
        "decay of the moving average of a client's generator (Yazici et al. 2019); 0: the last generator, as in the "
        "paper",
        within=EMA_DECAY,
        tuned=True,
    )
    synthetic_samples: int = setting(
        0, "number of samples from each client's GAN; 0: its number of records", within=GAN_SAMPLES, tuned=True
    )
    pretrain_epochs: int = setting(10, "epochs of pretraining the autoencoder alone", at_least=0, tuned=True)
    joint_epochs: int = setting(
        15, "epochs of joint training after pretraining; 0: k-means of the codes, the ablation", at_least=0, tuned=True
    )
    dcn_noise: float = setting(
        0.4,
        "standard deviation of the noise that the autoencoder learns to remove; relative to feature-range",
        at_least=0,
        at_most=1e3,
        tuned=True,
    )
    dcn_restarts: int = setting(
        2, "number of deep clustering networks; the one with the smallest objective is used", at_least=1, tuned=True
    )


class PPFCGAN(OneShot):
    """Lines 1 to 7; the server trains on the option ``device``."""

    name: ClassVar[str] = "ppfc-gan"
    title: ClassVar[str] = "deep clustering of records by samples of clients' GANs"
    paper: ClassVar[str] = "Yan et al. 2022"
    point_name: ClassVar[str] = "synthetic samples"
    row_wise: ClassVar[bool] = False
    units: ClassVar[tuple[str, ...]] = ("none", "record")
    releases: ClassVar[tuple[str, ...]] = ("samples",)
    settings_class: ClassVar[type[Settings]] = PPFCGANSettings
    settings: PPFCGANSettings
    needs: ClassVar[tuple[str, ...]] = (*OneShot.needs, "device", "precision")
    defaults: ClassVar[Mapping[str, Any]] = {**OneShot.defaults, "local-epochs": 200, "batch-size": 64}
    unfounded: ClassVar[tuple[str, ...]] = (
        "epsilon is infinite: PPFC-GAN's lemma gives no usable bound (a delta of the order of samples over records, "
        "here 1, and no epsilon); nothing is clipped or noised, and samples may show records; use privacy-unit record",
    )

    def check(self) -> None:
        """Require a GAN for the shape of the data and the unit of privacy, and training of the autoencoder."""
        super().check()
        settings = self.settings
        try:
            check_gan(self.gan, self.shape)
        except ModelError as error:
            raise StrategyError(str(error)) from None
        if self.plan.clips_records and not GANS[self.gan].records_apart:
            raise StrategyError(
                f"gan {self.gan} normalises over records, which DP-SGD does not support: use {self.gan}-gn"
            )
        if not settings.pretrain_epochs + settings.joint_epochs:
            raise StrategyError("pretrain-epochs and joint-epochs must not both be 0: the autoencoder must be trained")
        if settings.synthetic_samples > self.max_points:
            raise StrategyError(
                f"synthetic-samples = {settings.synthetic_samples}: at most {self.max_points} "
                f"samples of shape {self.shape}"
            )

    @property
    def gan(self) -> str:
        """The configured GAN, or one for the shape of the data."""
        return self.settings.gan or gan_for(self.shape, private=self.plan.clips_records)

    @property
    def encoder(self) -> str:
        """The autoencoder of Table A.8, with a linear code."""
        return "sae"

    def initial_parameters(self, draw: Callable[..., Parameters]) -> Parameters:
        """Line 1."""
        return draw(gan=self.gan, categories=self.clusters)

    def request(self) -> GanRequest:
        """The GAN, its training, and the number of samples."""
        return GanRequest(
            gan=self.gan,
            labels=self.clusters,
            samples=self.settings.synthetic_samples,
            average=self.settings.ema_decay,
            feature_range=self.feature_range,
        )

    def reply_spec(self) -> PointsSpec:
        """Line 4."""
        return replace(super().reply_spec(), num_points=self.settings.synthetic_samples)

    def cluster(self, points: Mapping[int, FloatArray]) -> Labeller:
        """Line 5."""
        from coterie.clustering.dcn import DCN  # imports torch
        from coterie.models.autoencoder import scaled_input

        every = union(points)
        least = _COLLAPSED_SHARE * _mean_deviation(every)
        collapsed = [
            client
            for client, client_points in points.items()
            if len(client_points) > 1 and _mean_deviation(client_points) < least
        ]
        if collapsed:
            self.notes["collapsed"] = collapsed
            log(
                WARNING,
                "the GANs of clients %s collapsed: their samples hardly differ from each other, and clusters may not "
                "represent their records; try other features, gan or local-epochs",
                ", ".join(map(str, collapsed)),
            )
        network = DCN(
            self.clusters,
            self.settings.pretrain_epochs,
            self.settings.joint_epochs,
            noise=self.settings.dcn_noise,
            restarts=self.settings.dcn_restarts,
            precision=self.options.precision,
            seed=int(self.streams.stream("clustering", 1).integers(2**31)),
            device=self.options.device,
        )
        labeller = network.fit(
            every / self.feature_range,
            state=self.recorder.load_artifact(_STATE),
            keep=lambda state: self.recorder.save_artifact(_STATE, state),
            progress=self.recorder.report_progress,
        )
        self.recorder.save_artifact(_STATE, {})
        return scaled_input(labeller, 1 / self.feature_range)


def _mean_deviation(points: FloatArray) -> float:
    """Mean over coordinates of the deviation of (n, *shape) points."""
    return float(points.std(axis=0).mean())
