"""What travels between server and clients, as types with bounds."""

from coterie.wire.replies import Diagnostics, EvaluationReply, LabelCounts, Summary, summary_of
from coterie.wire.requests import (
    REQUESTS,
    CentroidsRequest,
    DataSpec,
    EvaluateRequest,
    GanRequest,
    LabelRequest,
    LossesRequest,
    Request,
    RequestError,
    TrainRequest,
)

__all__ = [
    "REQUESTS",
    "CentroidsRequest",
    "DataSpec",
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
    "summary_of",
]
