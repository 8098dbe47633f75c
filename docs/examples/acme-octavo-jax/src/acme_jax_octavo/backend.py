"""What `octavo_load` returns: refuses what cannot be served, binds what can."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from octavo_registry.contract import (
    AnyBound,
    AnyRequest,
    Backend,
    BoundDgrad,
    BoundFprop,
    BoundWgrad,
    GemmRequest,
    Refused,
)

from acme_jax_octavo import gemm

NOTE = "dequantized operands, fp32 products"
SCALINGS = ("current", "row")


class AcmeJaxBackend(Backend):
    """Stateless: everything that a call needs is in its request or its arguments."""

    def refuses(self, request: AnyRequest) -> str | None:
        """What only this machine can tell: a library that is missing, a driver that is too old."""
        return self.refuses_everywhere(request)

    def refuses_everywhere(self, request: AnyRequest) -> str | None:
        """What no machine would serve, such as sides that a kernel cannot cut; here there is nothing of the kind."""
        return None

    def bind(self, request: AnyRequest) -> AnyBound:
        """The function for the hot path. What depends on the request alone is decided here, once."""
        if not isinstance(request, GemmRequest) or request.kind not in SCALINGS:
            raise Refused(f"bind has no function for {request.op} in {request.kind}; write one or change the card")
        out_dtype = jnp.dtype(request.out_dtype)
        if request.op == "fprop":
            return BoundFprop(gemm.Fprop(jax.jit(partial(gemm.fprop, out_dtype))), note=NOTE)
        if request.op == "dgrad":
            return BoundDgrad(gemm.Dgrad(jax.jit(partial(gemm.dgrad, out_dtype))), note=NOTE)
        return BoundWgrad(gemm.Wgrad(jax.jit(partial(gemm.wgrad, out_dtype))), note=NOTE)
