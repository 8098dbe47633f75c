"""What `octavo_load` returns: refuses what this machine cannot do, binds what it can."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from acme_octavo import gemm
from acme_octavo.quantize import Quantizer
from torch import Tensor

from octavo_registry.request import Bound, Request
from octavo_torch import GroupedTensor

GEMMS: dict[str, Callable[..., Tensor]] = {"fprop": gemm.fprop, "dgrad": gemm.dgrad, "wgrad": gemm.wgrad}


class _PlainAndBack:
    """Level 4's optional methods of a quantizer's function, of a backend whose layouts are plain."""

    def __init__(self, quantizer: Quantizer) -> None:
        self._quantizer = quantizer

    def __call__(self, *args: Any, **kwargs: Any) -> GroupedTensor:
        return self._quantizer(*args, **kwargs)

    def from_plain(self, q: GroupedTensor) -> GroupedTensor:
        return q

    def to_plain(self, q: GroupedTensor) -> GroupedTensor:
        return q


def _with_amax(quantizer: Quantizer) -> Callable[..., tuple[GroupedTensor, Tensor]]:
    return lambda x, group_sizes=None, **options: (quantizer(x, group_sizes, **options), x.abs().amax().reshape(1))


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
            quantizer = Quantizer(request.quantizer)
            return Bound(run=_PlainAndBack(quantizer), run_with_amax=_with_amax(quantizer))
        out_dtype: torch.dtype = getattr(torch, request.out_dtype)
        if request.sharding or request.activation:
            raise ValueError("level 4 has every field for every operation, and these are empty")
        return Bound(
            run=partial(GEMMS[request.op], out_dtype), workspace_bytes=0, note="dequantized tiles, fp32 products"
        )
