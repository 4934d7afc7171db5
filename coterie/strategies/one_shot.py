"""One-shot clustering of records, the frame of PPFC-GAN, k-FED and FFCM.

     1  the server asks; every client i sends points X_i, made from its records
     2  the server clusters the union of all X_i: an encoder (or none) and k centroids
     3  clients download these, and give every record the label of the nearest centroid

Details
- Who is silent by the deadline, or sends what cannot be points of the data, is ignored; the notes say who is missing.
- Points are kept in the run folder as they come. A run that was cut short asks only those that had not answered.
- Labels stay at the clients. Only where exact diagnostics are on do they tell numbers of records, by label and class.
- Device failures can be simulated: so many clients, drawn at random, are never asked. All label in the end.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from logging import WARNING
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
from flwr.app import Message, MetricRecord
from flwr.common.logger import log

from coterie.messages import Layout, Points
from coterie.privacy import Plan
from coterie.settings import Settings, setting
from coterie.strategies.base import ClusteredStrategy, Models, Parameters, Round, StrategyError
from coterie.wire import LabelRequest, Request

if TYPE_CHECKING:
    from coterie.models.autoencoder import Labeller

FloatArray = npt.NDArray[np.float32]

# Points of which the run folder keeps codes and labels, for pictures.
_SHOWN = 2000
_GATHERED, _CODES, _FAILED, _TRAFFIC = "gathered", "codes", "failures", "traffic"


@dataclass(frozen=True)
class OneShotSettings(Settings):
    """Settings of every method that clusters records."""

    device_failures: float = setting(
        0.0, "share of the clients that fail before they send anything, in a simulation", at_least=0, at_most=0.99
    )
    upload_limit: int = setting(256, "megabytes that the points of one client may take", at_least=1)


class OneShot(ClusteredStrategy):
    """One round: points of every client, one clustering of all, labels at the clients.

    Args:
        plan: see :class:`~coterie.strategies.ClusteredStrategy`, as for the other arguments; of one round and model.
        settings: of the method.
        example_shape: shape of a record.
        clusters: k, of records.
    """

    clustered: ClassVar[bool] = False
    labels_records: ClassVar[bool] = True
    units: ClassVar[tuple[str, ...]] = ("none",)
    settings: OneShotSettings
    needs: ClassVar[tuple[str, ...]] = ("example_shape",)
    defaults: ClassVar[Mapping[str, Any]] = {
        "clusters": 10,
        "rounds": 1,
        "clients": 10,
        "groups": "1",
        "shift": "none",
        "non-iid-level": 0.5,
        "evaluate-every": 1,
    }
    #: Options that come into play once their points are there.
    afterwards: ClassVar[tuple[str, ...]] = ()
    #: Evidence that they leave.
    gathers: ClassVar[tuple[str, ...]] = ("points-*", _TRAFFIC)
    #: Name of the encoder that clients label with.
    encoder: str = "none"

    def __init__(
        self,
        plan: Plan,
        settings: Settings | None = None,
        *,
        example_shape: Sequence[int],
        clusters: int,
        **others: Any,
    ) -> None:
        super().__init__(plan, settings, clusters=clusters, **others)
        if plan.rounds != 1:
            raise StrategyError(f"{self.name} takes one round, not {plan.rounds}: set rounds to 1")
        if plan.rate != 1:
            raise StrategyError(f"{self.name} asks all clients: set sampling-rate to 1, not {plan.rate:g}")
        self.shape = tuple(int(size) for size in example_shape)
        self.most = self.settings.upload_limit * 2**20 // (4 * int(np.prod(self.shape)))
        if not self.most:
            raise StrategyError(
                f"upload-limit = {self.settings.upload_limit} MB is less than one record of shape {self.shape} takes"
            )
        self._arrived: set[int] = set()

    # ---- what a method fills in ---------------------------------------------------------------------------

    @abstractmethod
    def question(self) -> Request:
        """What clients are asked for."""

    def answer(self) -> Points:
        """What their answers must be."""
        return Points(self.shape, self.most)

    @abstractmethod
    def cluster(self, points: Mapping[int, FloatArray]) -> Labeller:
        """Line 2, from the (n_i, *shape) points of every client that sent some."""

    # ---- the round ----------------------------------------------------------------------------------------

    def arrange(self, draw: Callable[..., Parameters]) -> Parameters:
        """Nothing but a question travels at first."""
        return {}

    def evaluation(self) -> LabelRequest:
        """What a client labels with, and whether it returns counts."""
        return LabelRequest(labels=self.clusters, encoder=self.encoder, tell=bool(self.evaluate_every))

    def round(self, number: int, models: Models) -> Round:
        """Lines 1 and 2."""
        points = self._kept()
        self._arrived = set(points)
        self.accepted += len(points)
        self.traffic.update({name: int(count) for name, count in (self.recorder.kept(_TRAFFIC) or {}).items()})
        whole = self.recorder.kept(_GATHERED) is not None  # and paid for
        ask = [] if whole else sorted(set(range(self.plan.clients)) - set(points) - self._failed())
        told = yield from self.points(self.question(), models, self.answer(), clients=ask, late=whole)  # line 1
        points |= told.points
        many = sum(map(len, points.values()))
        if many < self.clusters:
            raise StrategyError(
                f"{len(points)} of {self.plan.clients} clients sent {many} points, too few for {self.clusters} clusters"
            )
        self.recorder.keep(_GATHERED, {"clients": np.array(sorted(points))})
        points = dict(sorted(points.items()))
        missing = sorted(set(range(self.plan.clients)) - set(points))
        self.notes |= {"missing": missing, "points": {str(client): len(own) for client, own in points.items()}}
        if missing:
            log(WARNING, "clients %s sent no points; the others' are clustered", ", ".join(map(str, missing)))
        labeller = self.cluster(points)  # line 2
        self._show(points, labeller)
        learned = {name: value.detach().numpy() for name, value in labeller.named_parameters()}
        self.layout = Layout.of(learned)
        return self.layout.flatten(learned)[None]

    def took(self, client: int, points: FloatArray) -> None:
        """Keep them, so that no client is asked twice."""
        self.recorder.keep(_named(client), {"points": points})
        self.recorder.keep(_TRAFFIC, {name: np.array(count) for name, count in self.traffic.items()})
        self._arrived.add(client)
        self.recorder.working_on(f"points of {len(self._arrived)} of {self.plan.clients} clients")

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Line 3: who labelled, and how well, where clients tell."""
        labelled = dict(self._evaluations(replies, self.clusters, optional=True))
        scores = self._aggregated([content for content in labelled.values() if content is not None]) or MetricRecord()
        scores["clients_labelled"] = len(labelled)
        return scores

    # ---- pieces -------------------------------------------------------------------------------------------

    def _failed(self) -> set[int]:
        """Clients whose devices fail, in a simulation; the same ones when a run goes on."""
        many, failed = round(self.settings.device_failures * self.plan.clients), self.recorder.kept(_FAILED)
        if not many:
            return set()
        if failed is None:
            drawn = self.streams.stream("failures", 1).choice(self.plan.clients, many, replace=False)
            failed = {"clients": np.sort(drawn)}
            self.recorder.keep(_FAILED, failed)
        return set(failed["clients"].tolist())

    def _kept(self) -> dict[int, FloatArray]:
        """Points that came before the run was cut short."""
        kept = {client: self.recorder.kept(_named(client)) for client in range(self.plan.clients)}
        return {client: arrays["points"] for client, arrays in kept.items() if arrays}

    def _show(self, points: Mapping[int, FloatArray], labeller: Labeller) -> None:
        """Keep codes and labels of some points."""
        import torch

        owners = np.repeat(list(points), [len(own) for own in points.values()])
        every = np.concatenate(list(points.values()))
        some = self.streams.stream("shown", 1).permutation(len(every))[:_SHOWN]
        with torch.no_grad():
            codes = labeller.encoder(torch.as_tensor(every[some]))
        self.recorder.keep(
            _CODES,
            {
                "points": every[some],
                "codes": codes.numpy(),
                "labels": labeller.label(every[some]),
                "clients": owners[some],
                "centroids": labeller.centroids.detach().numpy(),
            },
        )


def _named(client: int) -> str:
    return f"points-{client:04d}"


def union(points: Mapping[int, FloatArray]) -> FloatArray:
    """(n, *shape) points of all clients."""
    return np.concatenate(list(points.values()))
