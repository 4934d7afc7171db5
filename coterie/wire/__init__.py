"""What travels between server and clients, as types with bounds."""

from coterie.wire.messages import trainable_arrays
from coterie.wire.replies import Diagnostics, EvaluationReply, LabelCounts, Summary, summary_of
from coterie.wire.requests import (
    REQUESTS,
    CentroidsRequest,
    ClientConfig,
    EvaluateRequest,
    GanRequest,
    LabelRequest,
    LossesRequest,
    Request,
    RequestError,
    TrainRequest,
    digest,
    read_request,
)

__all__ = [
    "REQUESTS",
    "CentroidsRequest",
    "ClientConfig",
    "Diagnostics",
    "EvaluateRequest",
    "EvaluationReply",
    "GanRequest",
    "LabelCounts",
    "LabelRequest",
    "LossesRequest",
    "Request",
    "RequestError",
    "Summary",
    "TrainRequest",
    "digest",
    "read_request",
    "summary_of",
    "trainable_arrays",
]
