"""The functions of "fprop", "dgrad" and "wgrad" requests, as octavo_registry.contract.gemm has them."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import Array

from octavo import GroupedTensorSpec
from octavo.recipe_base import Gemm
from octavo_jax.plugin_api import GroupedTensor, check_out, check_sizes, refusing_derivatives
from octavo_jax_native.arrays.words import as_int64
from octavo_jax_native.ffi.custom_call import group_plan
from octavo_jax_native.ffi.gemm import GemmCall
from octavo_jax_native.gemm.operands import (
    Arrays,
    GemmOperand,
    GemmSettings,
    Rows,
    call_of,
    checked_bias,
    checked_out,
    gathered_of,
    order_of,
    planes_of,
    tokens_of,
)
from octavo_jax_native.quantizers.native_layout import native_plane
from octavo_registry.contract import Dgrad, Fprop, GemmRequest, Wgrad

Specs = tuple[GroupedTensorSpec | None, GroupedTensorSpec | None]

_FUNCTIONS: dict[Gemm, str] = {"fprop": "octavo_gemm_fprop", "dgrad": "octavo_gemm_dgrad", "wgrad": "octavo_wgrad"}


def bind_fprop(request: GemmRequest, ctas: int = 0) -> Fprop[Array, GemmOperand]:
    """The function of an "fprop" request. `ctas`: how many multiprocessors it may use; 0: all of the device."""
    product = _product(GemmSettings.of(request, ctas))

    def fprop(
        x: Rows,
        w: GemmOperand,
        group_sizes: Array,
        *,
        bias: Array | None = None,
        bias_scales: Array | None = None,
        out: Array | None = None,
    ) -> Array:
        check_out(out)
        return product(x, w, group_sizes, _bias_operands(bias, bias_scales))

    return fprop


def bind_dgrad(request: GemmRequest, ctas: int = 0) -> Dgrad[Array, GemmOperand]:
    """The function of a "dgrad" request; `ctas` as in `bind_fprop`."""
    product = _product(GemmSettings.of(request, ctas))

    def dgrad(dy: Rows, w: GemmOperand, group_sizes: Array, *, out: Array | None = None) -> Array:
        check_out(out)
        return product(dy, w, group_sizes, {})

    return dgrad


def bind_wgrad(request: GemmRequest, ctas: int = 0) -> Wgrad[Array, GemmOperand]:
    """The function of a "wgrad" request; `ctas` as in `bind_fprop`."""
    how = GemmSettings.of(request, ctas)
    product = _product(how)

    def wgrad(x: Rows, dy: Rows, group_sizes: Array, *, out: Array | None = None, accumulate: bool = False) -> Array:
        if accumulate != (out is not None):
            raise ValueError(
                f"accumulate={accumulate} and out is {'not ' if out is None else ''}given; "
                "give both (the sum is returned) or neither"
            )
        left, right = (dy, x) if how.weight == "nk" else (x, dy)
        return product(left, right, group_sizes, {} if out is None else {"out": out})

    return wgrad


def _product(how: GemmSettings) -> Callable[[Rows, Rows, Array, Arrays], Array]:
    """The function of the left and the right operand, checked, with the traced part jitted."""
    form, compiled = how.form, _compiled(how)

    def run(left: Rows, right: Rows, group_sizes: Array, more: Arrays) -> Array:
        check_sizes(group_sizes)
        gathered = gathered_of(how, left, right)
        standing = tokens_of(left), tokens_of(right)
        operands = zip(form.operands, form.directions, standing, strict=True)
        planes = [planes_of(how, *operand) for operand in operands]
        call = call_of(how, left, right, group_sizes.shape[0], gathered)
        if "bias" in more:
            more = checked_bias(more, call)
        elif "out" in more:
            call = checked_out(more["out"], call)
        specs = (_spec(standing[0]), _spec(standing[1]))
        return compiled(*planes, group_sizes, order_of(left, right), more, call=call, specs=specs)

    return run


def _compiled(how: GemmSettings) -> Callable[..., Array]:
    """The traced part of `_product`, under a name that tells the GEMM."""
    directions = how.form.directions

    def traced(
        left: Arrays,
        right: Arrays,
        group_sizes: Array,
        order: Array | None,
        more: Arrays,
        call: GemmCall,
        specs: Specs,
    ) -> Array:
        plan = group_plan(group_sizes, call.rows)
        operands: Arrays = {}
        for name, planes, spec, direction in zip(("left", "right"), (left, right), specs, directions, strict=True):
            if spec is None:
                operands[name] = _underived(planes["codes"].astype(call.dtype))
                continue
            tokens = call.gathered is not None and name == call.gathered.side
            read = planes if tokens else native_plane(planes, spec, direction, plan)
            for part, value in read.items():
                operands[name if part == "codes" else f"{name}_{part}"] = value
        if order is not None:
            operands["order"] = as_int64(order)
        made = call.run({**operands, "plan": plan, **{part: _underived(array) for part, array in more.items()}})
        # A loop that stacks y (a residual of a scanned layer) would otherwise have XLA run the GEMM twice on a GPU:
        # once into the stack and once for whoever reads y next. dw is only stacked, and goes straight there.
        return _once(made) if how.gemm == "fprop" else made

    traced.__name__ = traced.__qualname__ = _FUNCTIONS[how.gemm]
    compiled: Callable[..., Array] = jax.jit(traced, static_argnames=("call", "specs"))
    return compiled


_underived = refusing_derivatives(
    "a GEMM of jax-native was differentiated, and a call of a kernel has no derivative: differentiate layers once, in "
    "reverse, or give a linear layer of high precision backend='jax-reference'"
)


def _once(made: Array) -> Array:
    held: Array = jax.lax.optimization_barrier(made)  # type: ignore[no-untyped-call]
    return held


def _spec(operand: GemmOperand) -> GroupedTensorSpec | None:
    return operand.spec if isinstance(operand, GroupedTensor) else None


def _bias_operands(bias: Array | None, bias_scales: Array | None) -> Arrays:
    if bias is None:
        if bias_scales is not None:
            raise ValueError("bias_scales was given and bias is None; give the bias that it scales, or neither")
        return {}
    return {"bias": bias} if bias_scales is None else {"bias": bias, "bias_scales": bias_scales}
