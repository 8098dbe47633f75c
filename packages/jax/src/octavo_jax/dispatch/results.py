"""What a backend's functions return, checked while a call is traced: a compiled program runs none of this."""

from __future__ import annotations

from typing import Any, TypeVar

import jax.numpy as jnp
from jax import Array

from octavo import OctavoError
from octavo_jax.arrays.grouped_tensor import GroupedTensor
from octavo_registry.contract.moves import TokenRows
from octavo_registry.contract.plan import Plan
from octavo_registry.contract.quantize import TwoForms
from octavo_registry.contract.request import GemmRequest
from octavo_registry.dispatch.layer_plan import GemmPlan

Codes = TypeVar("Codes")


def _wrong(plan: Plan[Any, Any], result: object, needed: str) -> OctavoError:
    what = f"{result.dtype} {list(result.shape)}" if isinstance(result, Array) else f"a {type(result).__name__}"
    op, name = plan.request.op, plan.backend
    return OctavoError(
        f"the backend {name} returned {what} from {op}, which returns {needed}; mend the backend "
        f"(`octavo conform {name}` tests it), or name another one"
    )


def product_of(plan: GemmPlan, left: Any, right: Any, group_sizes: Array, **options: Any) -> Array:
    """The result of a layer's GEMM.

    left, right   the operands in the order in which the GEMM takes them
    options       its arguments by name

    Raises OctavoError, which names the backend, for a result that is no array or has another shape or dtype: JAX would
    take None for a gradient of zeros, and a gradient of another dtype as it is.
    """
    request, result = plan.request, plan.run(left, right, group_sizes, **options)
    shape = _shape(request, left, right, group_sizes)
    if not isinstance(result, Array) or result.shape != shape or result.dtype != jnp.dtype(request.out_dtype):
        raise _wrong(plan, result, f"{request.out_dtype} {list(shape)}")
    return result


def _shape(request: GemmRequest, left: Any, right: Any, group_sizes: Array) -> tuple[int, ...]:
    """That of the operands at hand: where a mesh is known late, the request has the sides of the whole layer."""
    turned = request.weight == "kn"
    if request.op == "wgrad":
        x, dy = _of_values(left)[-1], _of_values(right)[-1]
        return group_sizes.shape[0], *((x, dy) if turned else (dy, x))
    _, first, last = _of_values(right)  # N and K, or K and N
    rows = left.order.shape[0] if isinstance(left, TokenRows) else _of_values(left)[0]
    return rows, last if (request.op == "fprop") is turned else first


def _of_values(operand: Any) -> tuple[int, ...]:
    """The shape of an operand's values, or of the tokens' from which its rows are gathered."""
    operand = operand.tokens if isinstance(operand, TokenRows) else operand
    shape: tuple[int, ...] = (operand.spec if isinstance(operand, GroupedTensor) else operand).shape
    return shape


def codes_of(plan: Plan[Any, Any], codes: Codes) -> Codes:
    """`codes`, which a quantizer of the plan's backend has returned; OctavoError unless they are a GroupedTensor."""
    if not isinstance(codes, GroupedTensor | TwoForms):
        raise _wrong(plan, codes, "a GroupedTensor")
    return codes
