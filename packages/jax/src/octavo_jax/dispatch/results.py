"""Results of a backend's functions, checked while a call is traced: a compiled program runs none of these checks."""

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


def _wrong_result(plan: Plan[Any, Any], result: object, needed: str) -> OctavoError:
    what = f"{result.dtype} {list(result.shape)}" if isinstance(result, Array) else f"a {type(result).__name__}"
    op, name = plan.request.op, plan.backend
    return OctavoError(
        f"the backend {name} returned {what} from {op}, which returns {needed}; mend the backend "
        f"(`octavo conform {name}` tests it), or name another one"
    )


def run_gemm(plan: GemmPlan, left: Any, right: Any, group_sizes: Array, **options: Any) -> Array:
    """The result of a layer's GEMM, checked.

    left, right   the operands in the order in which the GEMM takes them
    options       its arguments by name

    Raises OctavoError, which names the backend, for a result that is no array or has another shape or dtype: JAX would
    take None for a gradient of zeros, and a gradient of another dtype as it is.
    """
    request, result = plan.request, plan.run(left, right, group_sizes, **options)
    shape = _result_shape(request, left, right, group_sizes)
    if not isinstance(result, Array) or result.shape != shape or result.dtype != jnp.dtype(request.out_dtype):
        raise _wrong_result(plan, result, f"{request.out_dtype} {list(shape)}")
    return result


def _result_shape(request: GemmRequest, left: Any, right: Any, group_sizes: Array) -> tuple[int, ...]:
    """The shape that the operands give: where no mesh is known yet, the request has N and K of the whole layer."""
    is_kn = request.weight == "kn"
    if request.op == "wgrad":
        x, dy = _values_shape(left)[-1], _values_shape(right)[-1]
        return group_sizes.shape[0], *((x, dy) if is_kn else (dy, x))
    _, first, last = _values_shape(right)  # N and K, or K and N
    rows = left.order.shape[0] if isinstance(left, TokenRows) else _values_shape(left)[0]
    return rows, last if (request.op == "fprop") is is_kn else first


def _values_shape(operand: Any) -> tuple[int, ...]:
    """The shape of an operand's values, or of the tokens' from which its rows are gathered."""
    operand = operand.tokens if isinstance(operand, TokenRows) else operand
    shape: tuple[int, ...] = (operand.spec if isinstance(operand, GroupedTensor) else operand).shape
    return shape


def checked_codes(plan: Plan[Any, Any], codes: Codes) -> Codes:
    """`codes`, which a quantizer of the plan's backend has returned; OctavoError unless they are a GroupedTensor."""
    if not isinstance(codes, GroupedTensor | TwoForms):
        raise _wrong_result(plan, codes, "a GroupedTensor")
    return codes
