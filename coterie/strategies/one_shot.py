"""One-shot clustering of records, the base of PPFC-GAN, k-FED and FFCM.

     1  every client i sends points X_i, computed from its records
     2  the server clusters the union of all X_i: an encoder (or none) and k centroids
     3  clients download these, and label every record with the nearest centroid

Details
- Clients without a valid reply before the deadline are ignored; the notes list them.
- The run folder stores points on arrival. A resumed run sends the request to the remaining clients only.
- Labels stay at the clients. With exact diagnostics, clients report numbers of records by label and class.
- Device failures can be simulated: a random subset of clients receives no request. All clients label their records.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from logging import WARNING
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from flwr.common.logger import log

from coterie.fields import FEATURE_RANGE
from coterie.fields.settings import Settings, setting
from coterie.rounds.phases import PointsPhase
from coterie.rounds.run_state import StrategyError
from coterie.strategies.method import Models, Parameters, Round
from coterie.strategies.strategy import ClusteredStrategy
from coterie.wire import LabelRequest, Request
from coterie.wire.messages import Layout, PointsSpec

if TYPE_CHECKING:
    from coterie.models.autoencoder import Labeller

FloatArray = npt.NDArray[np.float32]

_GATHERED, _FAILED, _TRAFFIC = "gathered", "failures", "traffic"


#: Maximum size of the points of one client, in megabytes.
UPLOAD_LIMIT = 256


@dataclass(frozen=True)
class OneShotSettings(Settings):
    """Settings of every method that clusters records."""

    table: ClassVar[str] = "one-shot"

    device_failures: float = setting(
        0.0, "simulated share of clients that fail before they reply", at_least=0, at_most=0.99
    )
    feature_range: float | None = setting(
        None,
        "r: features are clamped to [-r, r] before they are clustered; auto: 1, for own vectors as the schema's ranges "
        "imply, otherwise 3",
        within=FEATURE_RANGE,
    )


class OneShot(ClusteredStrategy):
    """One round: points of every client, one clustering of all, labels at the clients.

    The plan is of one round and one model. Required options: ``clusters``, the number of clusters of records, k, and
    ``example_shape``.
    """

    clustered: ClassVar[bool] = False
    produces: ClassVar[Literal["models", "labels"]] = "labels"
    units: ClassVar[tuple[str, ...]] = ("none",)
    settings: OneShotSettings
    needs: ClassVar[tuple[str, ...]] = ("example_shape", "feature_range")
    defaults: ClassVar[Mapping[str, Any]] = {
        "clusters": 10,
        "rounds": 1,
        "clients": 10,
        "groups": "1",
        "shift": "none",
        "label-skew": "non-iid:0.5",
        "evaluate-every": 1,
    }

    @classmethod
    def check_settings(cls, setting: Callable[[str], Any]) -> None:
        """Refuse settings of models, and what needs several rounds."""
        super().check_settings(setting)
        if setting("class-weights"):
            raise StrategyError(f"class-weights: {cls.name} has no loss of classes; leave them out")
        if (personalize := setting("personalize")) != "none":
            raise StrategyError(
                f"personalize = {personalize!r}: {cls.name} clusters records and trains no model that a client could "
                "fit; set it to none"
            )
        if setting("privacy-unit") == "record" and setting("clip-norm") is None:
            raise StrategyError(
                f"clip-norm = adaptive requires several rounds: {cls.name} has one; set it to c, the bound of a "
                "record's gradient"
            )

    def check(self) -> None:
        """Require one round of all clients, and points that fit into a message."""
        super().check()
        plan = self.plan
        if self.options.clusters is None:
            raise StrategyError(f"{self.name} requires the option clusters")
        if plan.rounds != 1:
            raise StrategyError(f"{self.name} requires exactly one round, not {plan.rounds}: set rounds to 1")
        if plan.rate != 1:
            raise StrategyError(
                f"{self.name} requires the participation of all clients: set sampling-rate to 1, not {plan.rate:g}"
            )
        if not self.max_points:
            raise StrategyError(f"one record of shape {self.shape} is larger than {UPLOAD_LIMIT} MB")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a record."""
        return tuple(int(size) for size in self.options.example_shape)

    @property
    def feature_range(self) -> float:
        """r, the public bound on the absolute value of a feature."""
        return self.settings.feature_range or self.options.feature_range

    @property
    def max_points(self) -> int:
        """Maximum number of points of one client."""
        return UPLOAD_LIMIT * 2**20 // (4 * int(np.prod(self.shape)))

    @property
    def encoder(self) -> str:
        """Name of the encoder of :class:`~coterie.wire.LabelRequest`."""
        return "none"

    # ---- to be implemented by a method --------------------------------------------------------------------

    @abstractmethod
    def request(self) -> Request:
        """The request for points."""

    def reply_spec(self) -> PointsSpec:
        """Bounds of a reply."""
        return PointsSpec(self.shape, self.max_points, low=-self.feature_range, high=self.feature_range)

    @abstractmethod
    def cluster(self, points: Mapping[int, FloatArray]) -> Labeller:
        """Line 2, from the (n_i, *shape) points of all clients with a reply."""

    # ---- the round ----------------------------------------------------------------------------------------

    def initial_parameters(self, draw: Callable[..., Parameters]) -> Parameters:
        """None: the first request contains no model."""
        return {}

    def evaluation(self) -> LabelRequest:
        """Line 3: the request for labels, with counts if the run is evaluated."""
        counts = bool(self.options.evaluate_every)
        return LabelRequest(labels=self.clusters, encoder=self.encoder, release_counts=counts)

    def evaluation_due(self, number: int, last: bool) -> bool:
        """After the round: clients always label their records."""
        return last

    def round(self, number: int, models: Models) -> Round:
        """Lines 1 and 2."""
        stored = {client: self.recorder.load_artifact(_artifact(client)) for client in range(self.plan.clients)}
        points = {client: arrays["points"] for client, arrays in stored.items() if arrays}  # before an interruption
        self.statistics.accepted += len(points)
        traffic = self.recorder.load_artifact(_TRAFFIC) or {}
        self.statistics.traffic.update({name: int(count) for name, count in traffic.items()})
        complete = self.recorder.load_artifact(_GATHERED) is not None  # and charged
        clients = [] if complete else sorted(set(range(self.plan.clients)) - set(points) - self._failed())
        arrived = set(points)

        def on_points_received(client: int, received: FloatArray) -> None:
            """Store points on arrival, so that no client receives the request twice."""
            self.recorder.save_artifact(_artifact(client), {"points": received})
            counts = {name: np.array(count) for name, count in self.statistics.traffic.items()}
            self.recorder.save_artifact(_TRAFFIC, counts)
            arrived.add(client)
            self.recorder.report_progress(f"points of {len(arrived)} of {self.plan.clients} clients")

        phase = PointsPhase(
            self.request(),
            models,
            clients=clients,
            joined_late=complete,
            reply_spec=self.reply_spec(),
            on_points_received=on_points_received,
        )
        released = yield from phase.run()  # line 1
        points |= released.points
        many = sum(map(len, points.values()))
        if many < self.clusters:
            raise StrategyError(
                f"{len(points)} of {self.plan.clients} clients sent {many} points, too few for {self.clusters} clusters"
            )
        self.recorder.save_artifact(_GATHERED, {"clients": np.array(sorted(points))})
        points = dict(sorted(points.items()))
        missing = sorted(set(range(self.plan.clients)) - set(points))
        self.notes |= {
            "missing": missing,
            "points": {str(client): len(client_points) for client, client_points in points.items()},
        }
        if missing:
            log(
                WARNING,
                "clients %s sent no points; clustering the points of the other clients",
                ", ".join(map(str, missing)),
            )
        labeller = self.cluster(points)  # line 2
        learned = {name: value.detach().numpy() for name, value in labeller.named_parameters()}
        self.run.state = replace(self.run.state, layout=Layout.of(learned))
        return self.layout.flatten(learned)[None]

    # ---- stored points ------------------------------------------------------------------------------------

    def _failed(self) -> set[int]:
        """Clients with simulated device failures; a resumed run has the same ones."""
        many, failed = round(self.settings.device_failures * self.plan.clients), self.recorder.load_artifact(_FAILED)
        if not many:
            return set()
        if failed is None:
            drawn = self.streams.stream("failures", 1).choice(self.plan.clients, many, replace=False)
            failed = {"clients": np.sort(drawn)}
            self.recorder.save_artifact(_FAILED, failed)
        return set(failed["clients"].tolist())


def _artifact(client: int) -> str:
    return f"points-{client:04d}"


def union(points: Mapping[int, FloatArray]) -> FloatArray:
    """(n, *shape) points of all clients."""
    return np.concatenate(list(points.values()))
