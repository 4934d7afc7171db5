"""Requests of a server, one frozen dataclass per message type.

A message holds one, and the run's configuration, in one ConfigRecord. The server's plan prices the request that the
client executes. A client reads both before it charges, computes or opens anything.

The server is not trusted: every number has a finite range, so that no value of it turns noise into zero, infinity or
NaN, and no text or list grows without bound. A request that is rejected is rejected with the same message for any data.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from coterie.datasets.settings import DataSettings
from coterie.fields import (
    CLIP_NORM,
    CLUSTERS,
    EMA_DECAY,
    FEATURE_RANGE,
    FUZZIFIER,
    GAN_SAMPLES,
    LOSS_BOUND,
    MAX_CLUSTERS,
    MAX_COHORT,
    MAX_PLANS,
    MAX_REDRAWN,
    PENALTY_WEIGHT,
    PERSONAL_METHODS,
    REBALANCE_TRAIN,
    ROUNDS,
    SEED,
    SIZE,
    Bounds,
    FieldError,
    Fields,
    Length,
    OneOf,
)
from coterie.models.settings import TrainingSettings
from coterie.privacy import PrivacyError, RecordPlan, ReleaseSpec
from coterie.wire.messages import (
    CENTROIDS,
    CONFIG,
    EVALUATE,
    GAN,
    LABEL,
    LOSSES,
    MASKED,
    MASKED_SCORES,
    MODELS,
    PLACES_OF_CLIENTS,
    TRAIN,
    Layout,
    unpack_models,
)

#: Bytes of a key, a signature, a box or a share.
MAX_ENTRY = 256
# Rows of a redraw matrix may be off by rounding.
_ROUNDING = 1e-6

Clusters = Annotated[int, CLUSTERS]


class RequestError(FieldError):
    """A request with a field that is missing, of another type, or out of bounds."""


@dataclass(frozen=True, kw_only=True)
class ClientConfig(Fields):
    """The configuration of a run at its clients: the settings that they receive, and what follows from others.

    Attributes:
        data: which data the run is on, and how simulated clients share them.
        training: network, and how a client trains.
        partition_seed: seed of the split among simulated clients.
        seed: of a reproducible simulation; None is secret randomness.
        clients_dir: folder in which simulated clients keep their state.
        strategy: the method, as the server names it.
        loss_bound: L, to which the loss of a record is clipped; needed where losses are released.
        run_request: the signed request for the run; None: it has none.
        constants: SHA-256 of the network's frozen parameters and buffers, which the client builds too; None: there are
            none.
        sources: SHA-256 of the files of users' objects in training (:func:`coterie.fields.plugins.sources`); None:
            there are none.
        pretrained_sha256: SHA-256 of the file of initial parameters, of which a deployed client has its own copy; None:
            there is none.
    """

    error = RequestError

    data: DataSettings = field(default_factory=DataSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    partition_seed: Annotated[int, SEED] = 0
    seed: Annotated[int | None, SEED] = None
    clients_dir: str | None = None
    strategy: Annotated[str | None, Length(200)] = None
    loss_bound: Annotated[float | None, LOSS_BOUND] = None
    run_request: str | None = None
    constants: Annotated[str | None, Length(64)] = None
    pretrained_sha256: Annotated[str | None, Length(64)] = None
    sources: Annotated[str | None, Length(500)] = None


@dataclass(frozen=True, kw_only=True)
class Request(Fields):
    """What every request has in common. A plan prices the request that the client executes.

    Attributes:
        round: number of the communication round.
        record_plans: JSON list of the record-level plans of clients 0, 1, ..., in turn; None: the clients add no noise.
        additive: whether the network is the sum of a global and a cluster's network (FedCAM).
        assign: how a client chooses its cluster: by the least "loss" (None), or the "nearest" model (FeSEM).
        cluster: cluster of the one model that was sent; None: all models were sent, and the client chooses.
    """

    error = RequestError
    message_type: ClassVar[str]

    round: Annotated[int, Bounds(0, ROUNDS.high)] = 0
    record_plans: Annotated[str | None, Length(10_000_000)] = None
    additive: bool = False
    assign: Annotated[str | None, OneOf(("loss", "nearest"))] = None
    cluster: Annotated[int | None, Bounds(0, MAX_CLUSTERS)] = None

    @property
    def release_spec(self) -> ReleaseSpec | None:
        """What the reply reveals of a client's records, for a plan to price; None: nothing that a plan pays for."""
        return None


@dataclass(frozen=True, kw_only=True)
class TrainRequest(Request):
    """Choose a model if none is assigned, train it, return one update.

    Attributes:
        first_batch: whether round 1 has batches of its own.
        choice: whether a client at record level chooses a cluster by loss.
        clip: FeSEM's bound on the distance between a client's model and its cluster's.
        penalty: name of a penalty on the distance to the start (client/penalties.py); None: there is none.
        penalty_weight: its weight, such as FedProx's mu.
        redraw: (k * k,) row-stochastic matrix by which clients redraw their labels.
        rebalance_train: which model a client trains whose label was redrawn.
        counts_records: whether the reply has the number of training records; never with privacy.
    """

    message_type: ClassVar[str] = TRAIN

    first_batch: bool = False
    choice: bool = False
    clip: Annotated[float | None, CLIP_NORM] = None
    penalty: Annotated[str | None, Length(64)] = None
    penalty_weight: Annotated[float | None, PENALTY_WEIGHT] = None
    redraw: Annotated[tuple[float, ...] | None, Length(MAX_REDRAWN**2), Bounds(0, 1)] = None
    rebalance_train: Annotated[str | None, OneOf(REBALANCE_TRAIN)] = None
    counts_records: bool = False

    def __post_init__(self) -> None:
        if (self.penalty is None) != (self.penalty_weight is None):
            raise RequestError(f"penalty{'-weight' if self.penalty_weight is None else ''} is missing")
        if self.redraw is not None:
            k = int(len(self.redraw) ** 0.5)
            if k * k != len(self.redraw) or not np.allclose(np.reshape(self.redraw, (k, k)).sum(1), 1, atol=_ROUNDING):
                raise RequestError("redraw is not a square matrix whose rows sum to 1")

    def redraw_label(self, label: int, rng: np.random.Generator) -> int:
        """Draw the cluster for which the update of a client with this label counts; the label itself, if none."""
        if self.redraw is None or self.cluster is not None:
            return label
        k = math.isqrt(len(self.redraw))
        return int(rng.choice(k, p=self.redraw[k * label : k * (label + 1)]))

    @property
    def release_spec(self) -> ReleaseSpec:
        """One round of DP-SGD, and the choice of a cluster where the client chooses."""
        return ReleaseSpec(first_batch=self.first_batch, choice=self.choice)


@dataclass(frozen=True, kw_only=True)
class MaskedRequest(Request):
    """Step 2 of a masked round (wire/masked.py): what it adds to a request. The reply is a masked vector.

    The lists are of the clients U1 that have opened the round, in their order.

    Attributes:
        run: name of the run, as in step 1.
        attempt: of the round, as in step 1.
        opened: ids of these clients, increasing.
        publics: their public keys of the round.
        commitments: to their seeds.
        signatures: of both.
        boxes: the shares that they have sealed for the receiver; an empty one of the receiver itself.
    """

    run: Annotated[str, Length(64)]
    attempt: Annotated[int, Bounds(0, ROUNDS.high)]
    opened: Annotated[tuple[int, ...], Length(MAX_COHORT), SIZE]
    publics: Annotated[tuple[bytes, ...], Length(MAX_COHORT)]
    commitments: Annotated[tuple[bytes, ...], Length(MAX_COHORT)]
    signatures: Annotated[tuple[bytes, ...], Length(MAX_COHORT)]
    boxes: Annotated[tuple[bytes, ...], Length(MAX_COHORT)]

    def check_openings(self) -> None:
        """Check the lists.

        Raises:
            RequestError: a list is malformed, or there are record-level plans.
        """
        check_lists(self.opened, self.publics, self.commitments, self.signatures, self.boxes)
        if self.record_plans is not None:
            raise RequestError("a masked round has no record-level plans")


@dataclass(frozen=True, kw_only=True)
class MaskedTrainRequest(MaskedRequest, TrainRequest):
    """Train as for :class:`TrainRequest`; see :class:`MaskedRequest`."""

    message_type: ClassVar[str] = MASKED

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_openings()


def check_lists(clients: Sequence[int], *lists: Sequence[bytes]) -> None:
    """Check lists of bytes, one entry a client.

    Raises:
        RequestError: the clients are not increasing, a list has another length, or an entry is too long.
    """
    if any(one >= other for one, other in pairwise(clients)):
        raise RequestError("a list of clients must be increasing, without repetition")
    if any(len(one) != len(clients) for one in lists) or any(len(entry) > MAX_ENTRY for one in lists for entry in one):
        raise RequestError(f"a list has one entry of at most {MAX_ENTRY} bytes for every client")


@dataclass(frozen=True, kw_only=True)
class LossesRequest(Request):
    """Return the loss of every model that was sent (LCFL).

    Attributes:
        compared: number of these models.
    """

    message_type: ClassVar[str] = LOSSES

    compared: Clusters

    @property
    def release_spec(self) -> ReleaseSpec:
        """The losses."""
        return ReleaseSpec(losses=self.compared)


@dataclass(frozen=True, kw_only=True)
class EvaluateRequest(Request):
    """Return exact diagnostics, outside every guarantee, or an accuracy for a noisy mean.

    Attributes:
        personalize: how a client fits the model to its own records before it evaluates it; None: not at all. Simulated
            clients report both accuracies. A deployed client never reports that of its own model in diagnostics.
        private: whether the server releases a noisy mean of the accuracies, and nothing else of the replies; it is then
            that of the clients' own models.
        histogram: whether the server also releases a noisy histogram of the scores of held-out records by label.
        sampled: whether the client reads a sample of a large test set, and reports a training loss only if it chose its
            model by it.
    """

    message_type: ClassVar[str] = EVALUATE

    personalize: Annotated[str | None, OneOf(PERSONAL_METHODS)] = None
    private: bool = False
    histogram: bool = False
    sampled: bool = False

    @property
    def release_spec(self) -> ReleaseSpec | None:
        """At record level a histogram, to which the client adds the noise; nothing else of an evaluation is priced."""
        return ReleaseSpec(histogram=True) if self.private and self.histogram else None


@dataclass(frozen=True, kw_only=True)
class MaskedEvaluateRequest(MaskedRequest, EvaluateRequest):
    """Evaluate as for a private :class:`EvaluateRequest`; see :class:`MaskedRequest`.

    The vector is the accuracy, or the counts of scores if ``histogram`` is set.
    """

    message_type: ClassVar[str] = MASKED_SCORES

    def __post_init__(self) -> None:
        self.check_openings()
        if not self.private:
            raise RequestError("a masked evaluation is a private one")


@dataclass(frozen=True, kw_only=True)
class GanRequest(Request):
    """Train a GAN and return samples of it (PPFC-GAN)."""

    message_type: ClassVar[str] = GAN

    gan: str
    labels: Clusters
    samples: Annotated[int, GAN_SAMPLES]
    average: Annotated[float, EMA_DECAY]
    feature_range: Annotated[float, FEATURE_RANGE]

    @property
    def release_spec(self) -> ReleaseSpec:
        """One round of DP-SGD."""
        return ReleaseSpec()


@dataclass(frozen=True, kw_only=True)
class CentroidsRequest(Request):
    """Return centroids of the records (k-FED, FFCM)."""

    message_type: ClassVar[str] = CENTROIDS

    local: Annotated[str, OneOf(("k-means", "fuzzy-c-means"))]
    local_centroids: Clusters
    feature_range: Annotated[float, FEATURE_RANGE]
    fuzzifier: Annotated[float | None, FUZZIFIER] = None


@dataclass(frozen=True, kw_only=True)
class LabelRequest(Request):
    """Label every record by the nearest centroid; return counts if both ``release_counts`` and the client allow it."""

    message_type: ClassVar[str] = LABEL

    labels: Clusters
    encoder: str
    release_counts: bool


#: Requests by message type.
REQUESTS: dict[str, type[Request]] = {
    request.message_type: request
    for request in (TrainRequest, LossesRequest, EvaluateRequest, GanRequest, CentroidsRequest, LabelRequest)
}
# Those, and step 2 of a masked round.
_WITH_MODELS: dict[str, type[Request]] = {**REQUESTS, MASKED: MaskedTrainRequest, MASKED_SCORES: MaskedEvaluateRequest}


def read_request(
    message_type: str, content: RecordDict, *, finite: bool = True
) -> tuple[Request, npt.NDArray[np.float32], Layout]:
    """Read a message to a client: the request, (k, d) models, and their layout.

    Args:
        message_type: a key of :data:`REQUESTS`, or that of a :class:`MaskedRequest`.
        content: the message.
        finite: whether models with NaN or Inf are rejected.

    Raises:
        RequestError: a part or a field is missing, has another type, or is out of bounds; the models are not 0 to
            k - 1; or the request does not match their number.
    """
    if not isinstance(content.get(CONFIG), ConfigRecord) or not isinstance(content.get(MODELS), ArrayRecord):
        raise RequestError(f"a request needs a ConfigRecord {CONFIG!r} and an ArrayRecord {MODELS!r}")
    request, record = _WITH_MODELS[message_type].from_record(content[CONFIG]), content.array_records[MODELS]
    if len({key.partition("/")[0] for key in record}) > MAX_CLUSTERS:
        raise RequestError(f"the message has more than {MAX_CLUSTERS} models")
    try:
        models, layout = unpack_models(record)
    except (ValueError, TypeError, MemoryError) as error:
        raise RequestError(f"the models cannot be read: {error}") from None
    if finite and not np.isfinite(models).all():
        raise RequestError("a model holds NaN or Inf")
    if isinstance(request, LossesRequest) and request.compared != len(models):
        raise RequestError(f"compared is {request.compared}; the message has {len(models)} models")
    return request, models, layout


def parse_plans(text: str | None) -> tuple[RecordPlan, ...]:
    """The record-level plans of a request.

    Raises:
        RequestError: the text is no list of plans, or a number in it is out of bounds.
    """
    if text is None:
        return ()
    try:
        listed = json.loads(text)
    except (ValueError, RecursionError):
        raise RequestError("record-plans is not JSON") from None
    if not isinstance(listed, list) or not 1 <= len(listed) <= MAX_PLANS:
        raise RequestError(f"record-plans must be a list of 1 to {MAX_PLANS} plans")
    try:
        return tuple(RecordPlan.from_terms(terms) for terms in listed)
    except PrivacyError as error:
        raise RequestError(f"record-plans: {error}") from None


def digest(message_type: str, content: RecordDict) -> str:
    """Equal for equal messages: a client gives the same reply to them, and the server charges them once.

    Paths and devices, which may change when a run is resumed, do not count.
    """
    config: dict[str, Any] = {k: v for k, v in content[CONFIG].items() if k not in PLACES_OF_CLIENTS}
    same = RecordDict({**content, CONFIG: ConfigRecord(config)})
    return hashlib.sha256(f"{message_type} {same.object_id}".encode()).hexdigest()
