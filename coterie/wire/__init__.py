"""What travels between server and clients, as types with bounds."""

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
    "EvaluateRequest",
    "GanRequest",
    "LabelRequest",
    "LossesRequest",
    "Request",
    "RequestError",
    "TrainRequest",
]
