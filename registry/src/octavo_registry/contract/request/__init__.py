"""What a front end asks for: a request for each kind of operation, over a base that matching reads."""

from octavo_registry.contract.request.base import Layouts, Request
from octavo_registry.contract.request.description import describe_request, sm
from octavo_registry.contract.request.kinds import (
    REQUESTS,
    ActivationRequest,
    AnyRequest,
    ChooseRequest,
    DequantizeRequest,
    FusedRequest,
    GemmRequest,
    MoveRequest,
    NormRequest,
    OptimizerRequest,
    PlanesRequest,
    QuantizeRequest,
)

__all__ = [
    "REQUESTS",
    "ActivationRequest",
    "AnyRequest",
    "ChooseRequest",
    "DequantizeRequest",
    "FusedRequest",
    "GemmRequest",
    "Layouts",
    "MoveRequest",
    "NormRequest",
    "OptimizerRequest",
    "PlanesRequest",
    "QuantizeRequest",
    "Request",
    "describe_request",
    "sm",
]
