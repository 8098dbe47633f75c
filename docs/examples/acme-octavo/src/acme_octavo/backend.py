"""What `octavo_load` returns: refuses what this machine cannot do, binds what it can."""

from __future__ import annotations

from functools import partial

import torch
from octavo_registry.contract import (
    AnyBound,
    AnyRequest,
    Backend,
    BoundDgrad,
    BoundFprop,
    BoundQuantize,
    BoundWgrad,
    GemmRequest,
    QuantizeRequest,
    Refused,
)

from acme_octavo import gemm
from acme_octavo.quantize import Quantizer

NOTE = "dequantized tiles, fp32 products"


class AcmeBackend(Backend):
    """Stateless: everything that a call needs is in its request or its arguments."""

    def refuses(self, request: AnyRequest) -> str | None:
        """The card has admitted the request already; this adds what only the process can tell."""
        # Plain Python: a plan may be made while torch.compile traces, where tensors have no values to look at.
        if float("5e-324") * 1.0 == 0.0:
            return "this process flushes subnormals (torch.set_flush_denormal) and acme's bits need them kept"
        return None

    def bind(self, request: AnyRequest) -> AnyBound:
        """The function for the hot path. What depends on the request alone is decided here, once.

        Each answer has the class of its operation, and mypy holds the function against the operation's protocol.
        """
        if isinstance(request, QuantizeRequest):
            return BoundQuantize(Quantizer(request.quantizer))
        if not isinstance(request, GemmRequest):
            raise Refused(f"bind has no function for {request.op}; write one or change the card")
        out_dtype: torch.dtype = getattr(torch, request.out_dtype)
        if request.op == "fprop":
            return BoundFprop(partial(gemm.fprop, out_dtype), note=NOTE)
        if request.op == "dgrad":
            return BoundDgrad(partial(gemm.dgrad, out_dtype), note=NOTE)
        return BoundWgrad(partial(gemm.wgrad, out_dtype), note=NOTE)
