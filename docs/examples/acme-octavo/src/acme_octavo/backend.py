"""What `octavo_load` returns: refuses what this machine cannot do, binds what it can."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from acme_octavo import gemm
from acme_octavo.quantize import Quantizer
from octavo_registry import Bound, Request

GEMMS: dict[str, Callable[..., Tensor]] = {"fprop": gemm.fprop, "dgrad": gemm.dgrad, "wgrad": gemm.wgrad}


class AcmeBackend:
    """Stateless: everything that a call needs is in its request or its arguments."""

    def refuses(self, request: Request) -> str | None:
        """The card has admitted the request already; this adds what only the process can tell."""
        # Plain Python: a plan may be made while torch.compile traces, where tensors have no values to look at.
        if float("5e-324") * 1.0 == 0.0:
            return "this process flushes subnormals (torch.set_flush_denormal) and acme's bits need them kept"
        return None

    def bind(self, request: Request) -> Bound:
        """The function for the hot path. What depends on the request alone is decided here, once."""
        if request.op == "quantize":
            assert request.quantizer is not None  # part of the contract of "quantize"
            return Bound(run=Quantizer(request.quantizer))
        out_dtype: torch.dtype = getattr(torch, request.out_dtype)
        return Bound(run=partial(GEMMS[request.op], out_dtype), note="dequantized tiles, fp32 products")
