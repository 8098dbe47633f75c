"""Quantizers that round to MXFP4 first: backends are asked for a quantizer in blocks, and rounding is added to it.

Values that are rounded to MXFP4 fit the codes of "block", so every card that serves "block" serves these weights, and a
backend that knows nothing of MXFP4 is not asked about it. The rounding is done by the backend's kernels if its answer
offers that (`BoundQuantize.round_first`), else by the front end's operations.
"""

from __future__ import annotations

from dataclasses import replace

from octavo_registry.contract.bound import Bound
from octavo_registry.contract.quantize import AnyBoundQuantize, BoundQuantize
from octavo_registry.contract.request import DequantizeRequest, QuantizeRequest, Request
from octavo_registry.discovery.bridges import framework
from octavo_registry.discovery.guard import guard
from octavo_registry.dispatch.answers import ask_round_first


def asked_of_backends(request: Request) -> Request:
    """`request` as backends see it. Where values are rounded to MXFP4 first, it asks for `held_by`, of bf16 values."""
    if not isinstance(request, QuantizeRequest | DequantizeRequest) or request.quantizer.mxfp4 is None:
        return request
    held = replace(request, quantizer=request.quantizer.held_by)
    return replace(held, in_dtype="bfloat16", out_dtype="bfloat16") if isinstance(held, QuantizeRequest) else held


def with_rounding(bound: Bound, request: Request) -> Bound:
    """The answer to `request`, given the backend's answer to `asked_of_backends(request)`; `Fault` if that fails."""
    if not isinstance(request, QuantizeRequest) or not isinstance(bound, BoundQuantize) or not request.quantizer.mxfp4:
        return bound
    own = ask_round_first(bound, request)
    if own is not None:
        return own
    rounded = guard(_rounded, bound, request)
    note = f"of MXFP4's values, rounded by operations of {request.framework}"
    return replace(rounded, note="; ".join(part for part in (note, bound.note) if part))


def _rounded(bound: AnyBoundQuantize, request: QuantizeRequest) -> AnyBoundQuantize:
    return framework(request.framework).rounding_first(bound, request.quantizer)
