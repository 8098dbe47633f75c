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
    GemmOperand,
    GemmSettings,
    NamedArrays,
    RowOperand,
    checked_bias,
    checked_out,
    checked_planes,
    gathered_operand,
    gathered_order,
    gemm_call,
    without_gathering,
)
from octavo_jax_native.quantizers.native_layout import native_plane
from octavo_registry.contract import Dgrad, Fprop, GemmRequest, Wgrad

Specs = tuple[GroupedTensorSpec | None, GroupedTensorSpec | None]

_FUNCTIONS: dict[Gemm, str] = {"fprop": "octavo_gemm_fprop", "dgrad": "octavo_gemm_dgrad", "wgrad": "octavo_wgrad"}


def bind_fprop(request: GemmRequest, ctas: int = 0) -> Fprop[Array, GemmOperand]:
    """The function of an "fprop" request. `ctas`: how many multiprocessors it may use; 0: all of the device."""
    product = _product(GemmSettings.of(request, ctas))

    def fprop(
        x: RowOperand,
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

    def dgrad(dy: RowOperand, w: GemmOperand, group_sizes: Array, *, out: Array | None = None) -> Array:
        check_out(out)
        return product(dy, w, group_sizes, {})

    return dgrad


def bind_wgrad(request: GemmRequest, ctas: int = 0) -> Wgrad[Array, GemmOperand]:
    """The function of a "wgrad" request; `ctas` as in `bind_fprop`."""
    settings = GemmSettings.of(request, ctas)
    product = _product(settings)

    def wgrad(
        x: RowOperand, dy: RowOperand, group_sizes: Array, *, out: Array | None = None, accumulate: bool = False
    ) -> Array:
        if accumulate != (out is not None):
            raise ValueError(
                f"accumulate={accumulate} and out is {'not ' if out is None else ''}given; "
                "give both (the sum is returned) or neither"
            )
        left, right = (dy, x) if settings.weight == "nk" else (x, dy)
        return product(left, right, group_sizes, {} if out is None else {"out": out})

    return wgrad


def _product(settings: GemmSettings) -> Callable[[RowOperand, RowOperand, Array, NamedArrays], Array]:
    """The GEMM of a left and a right operand, which checks them; its traced part is jitted.

    `optional` holds bias and bias_scales of fprop, or `out` of wgrad, to which the product is added.
    """
    form, compiled = settings.form, _compiled(settings)

    def run(left: RowOperand, right: RowOperand, group_sizes: Array, optional: NamedArrays) -> Array:
        check_sizes(group_sizes)
        gathered = gathered_operand(settings, left, right)
        sources = without_gathering(left), without_gathering(right)
        operands = zip(form.operands, form.directions, sources, strict=True)
        planes = [checked_planes(settings, *operand) for operand in operands]
        call = gemm_call(settings, left, right, group_sizes.shape[0], gathered)
        if "bias" in optional:
            optional = checked_bias(optional, call)
        elif "out" in optional:
            call = checked_out(optional["out"], call)
        specs = (_spec(sources[0]), _spec(sources[1]))
        return compiled(*planes, group_sizes, gathered_order(left, right), optional, call=call, specs=specs)

    return run


def _compiled(settings: GemmSettings) -> Callable[..., Array]:
    """The traced part of `_product`, under a name that tells the GEMM."""
    directions = settings.form.directions

    def traced(
        left: NamedArrays,
        right: NamedArrays,
        group_sizes: Array,
        order: Array | None,
        optional: NamedArrays,
        call: GemmCall,
        specs: Specs,
    ) -> Array:
        plan = group_plan(group_sizes, call.rows)
        operands: NamedArrays = {}
        sides = zip(("left", "right"), (left, right), specs, directions, strict=True)
        for name, planes, spec, direction in sides:
            if spec is None:
                operands[name] = _refusing(planes["codes"].astype(call.dtype))
                continue
            tokens = call.gathered is not None and name == call.gathered.side
            read = planes if tokens else native_plane(planes, spec, direction, plan)
            for part, value in read.items():
                operands[name if part == "codes" else f"{name}_{part}"] = value
        if order is not None:
            operands["order"] = as_int64(order)
        operands |= {"plan": plan} | {name: _refusing(array) for name, array in optional.items()}
        result = call.run(operands)
        # A loop that stacks y (a residual of a scanned layer) would otherwise have XLA run the GEMM twice on a GPU:
        # once into the stack and once for whoever reads y next. dw is only stacked, and goes straight there.
        return _computed_once(result) if settings.gemm == "fprop" else result

    traced.__name__ = traced.__qualname__ = _FUNCTIONS[settings.gemm]
    compiled: Callable[..., Array] = jax.jit(traced, static_argnames=("call", "specs"))
    return compiled


_refusing = refusing_derivatives(
    "a GEMM of jax-native was differentiated, and a call of a kernel has no derivative: differentiate layers once, in "
    "reverse, or give a linear layer of high precision backend='jax-reference'"
)


def _computed_once(y: Array) -> Array:
    result: Array = jax.lax.optimization_barrier(y)  # type: ignore[no-untyped-call]
    return result


def _spec(operand: GemmOperand) -> GroupedTensorSpec | None:
    return operand.spec if isinstance(operand, GroupedTensor) else None


def _bias_operands(bias: Array | None, bias_scales: Array | None) -> NamedArrays:
    if bias is None:
        if bias_scales is not None:
            raise ValueError("bias_scales was given and bias is None; give the bias that it scales, or neither")
        return {}
    return {"bias": bias} if bias_scales is None else {"bias": bias, "bias_scales": bias_scales}
