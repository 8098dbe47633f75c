"""What messages and reports call a request."""

from __future__ import annotations

from octavo.recipe_base import GEMMS
from octavo_registry.contract.request.base import Request
from octavo_registry.contract.weights import WEIGHT_SHAPES


def sm(arch: tuple[int, int]) -> str:
    """CUDA's name of a compute capability: (9, 0) is sm_90."""
    return f"sm_{arch[0]}{arch[1]}"


def describe_request(request: Request) -> str:
    """`fprop in mxfp8 for torch on cuda (sm_90)`, followed by whatever else narrows the choice."""
    function = request.activation or request.norm
    op = f"{request.op} of {function}" if function else request.op
    words = f"{op} in {request.kind} for {request.framework} on {request.device}"
    if request.arch is not None:
        words += f" ({sm(request.arch)})"
    extras = []
    if request.op in GEMMS and request.weight != "nk":
        extras.append(f"w as {WEIGHT_SHAPES[request.weight]}")
    if request.quantizer is not None:
        extras.append(f"{request.quantizer.role} {request.quantizer.orientation}")
        if request.quantizer.mxfp4:
            extras.append("of MXFP4's values")
        if request.quantizer.square_columns:
            extras.append("columns in square blocks")
    if request.graph_safe:
        extras.append("graph-safe")
    return f"{words}, {', '.join(extras)}" if extras else words
