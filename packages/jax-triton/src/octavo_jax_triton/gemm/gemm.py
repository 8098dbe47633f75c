"""The functions of "fprop", "dgrad" and "wgrad" requests, as octavo_registry.contract.gemm has them."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from octavo.formats import DType
from octavo_jax.plugin_api import check_float, check_out, check_sizes
from octavo_jax_triton.arrays.table import row_table, sizes_of
from octavo_jax_triton.gemm.launches import Bias, columns_by_columns, rows_by_matrices
from octavo_jax_triton.gemm.operands import GemmOperand, GemmSettings, Planes, checked_bias, shape_of
from octavo_jax_triton.launch.arguments import Output, Target
from octavo_registry.contract import Dgrad, Fprop, GemmRequest, Wgrad
from octavo_triton.products.shapes import Shape, product_shape
from octavo_triton.products.spec import GemmSpec

Product = Callable[[GemmOperand, GemmOperand, Array, Array | None, Array | None], Array]

_NAMES = {"fprop": "octavo_gemm_fprop", "dgrad": "octavo_gemm_dgrad", "wgrad": "octavo_wgrad"}


def bind_fprop(request: GemmRequest, target: Target) -> Fprop[Array, GemmOperand]:
    """The function of an "fprop" request."""
    product = _rows_product(GemmSettings.of(request, target))

    def fprop(
        x: GemmOperand,
        w: GemmOperand,
        group_sizes: Array,
        *,
        bias: Array | None = None,
        bias_scales: Array | None = None,
        out: Array | None = None,
    ) -> Array:
        check_out(out)
        return product(x, w, group_sizes, bias, bias_scales)

    return fprop


def bind_dgrad(request: GemmRequest, target: Target) -> Dgrad[Array, GemmOperand]:
    """The function of a "dgrad" request."""
    product = _rows_product(GemmSettings.of(request, target))

    def dgrad(dy: GemmOperand, w: GemmOperand, group_sizes: Array, *, out: Array | None = None) -> Array:
        check_out(out)
        return product(dy, w, group_sizes, None, None)

    return dgrad


def _rows_product(settings: GemmSettings) -> Product:
    """fprop or dgrad of the left and the right operand, checked, with the traced part jitted."""
    form, gemm = settings.form, settings.request.op

    def traced(left: Planes, right: Planes, group_sizes: Array, bias: Bias, spec: GemmSpec, shape: Shape) -> Array:
        if not shape[0]:
            return jnp.zeros(shape, spec.out_dtype)
        table = row_table(group_sizes, shape[0], settings.target)
        out = Output("out", shape, jnp.dtype(spec.out_dtype))
        product = rows_by_matrices(
            spec, _in_common_dtype(spec, left), _in_common_dtype(spec, right), table, bias, out, settings.target
        )
        # A loop that stacks y (a residual of a scanned layer) would otherwise have XLA run the GEMM twice on a GPU:
        # once into the stack and once for whoever reads y next.
        return _computed_once(product) if gemm == "fprop" else product

    traced.__name__ = traced.__qualname__ = _NAMES[gemm]
    compiled = jax.jit(traced, static_argnames=("spec", "shape"))

    def run(
        left: GemmOperand, right: GemmOperand, group_sizes: Array, bias: Array | None, bias_scales: Array | None
    ) -> Array:
        check_sizes(group_sizes)
        operands = zip(form.operands, form.directions, (left, right), strict=True)
        planes = [settings.plane(*operand) for operand in operands]
        shape = product_shape(form.kernel, form.operands, shape_of(left), shape_of(right), group_sizes.shape[0])
        spec = settings.spec(left, right, settings.request.out_dtype)
        scales = checked_bias(bias, bias_scales, group_sizes.shape[0], shape)
        result: Array = compiled(*planes, group_sizes, Bias(bias, scales), spec=spec, shape=shape)
        return result

    return run


def bind_wgrad(request: GemmRequest, target: Target) -> Wgrad[Array, GemmOperand]:
    """The function of a "wgrad" request."""
    settings = GemmSettings.of(request, target)
    form = settings.form

    def octavo_wgrad(
        left: Planes,
        right: Planes,
        group_sizes: Array,
        accumulator: Array | None,
        spec: GemmSpec,
        shape: Shape,
        rows: int,
    ) -> Array:
        if not rows:
            return jnp.zeros(shape, spec.out_dtype) if accumulator is None else accumulator
        table = row_table(group_sizes, rows, target)
        out = Output("out", shape, jnp.dtype(spec.out_dtype))
        dw = columns_by_columns(spec, _in_common_dtype(spec, left), _in_common_dtype(spec, right), table, out, target)
        if accumulator is None:
            return dw
        # Added here and not in the kernel, which would have to take over the memory of `accumulator`, see Rows.amaxes.
        # A group without rows leaves it as it is, where adding 0 would turn a -0 into +0.
        untouched = (sizes_of(table, shape[0]) == 0)[:, None, None]
        return jnp.where(untouched, accumulator, (accumulator.astype(jnp.float32) + dw).astype(accumulator.dtype))

    compiled = jax.jit(octavo_wgrad, static_argnames=("spec", "shape", "rows"))

    def wgrad(
        x: GemmOperand, dy: GemmOperand, group_sizes: Array, *, out: Array | None = None, accumulate: bool = False
    ) -> Array:
        if accumulate != (out is not None):
            raise ValueError(
                f"accumulate={accumulate} and out is {'not ' if out is None else ''}given; "
                "give both (the sum is returned) or neither"
            )
        check_sizes(group_sizes)
        left, right = (dy, x) if form.operands[0] == "dy" else (x, dy)
        operands = zip(form.operands, form.directions, (left, right), strict=True)
        planes = [settings.plane(*operand) for operand in operands]
        shape = product_shape(form.kernel, form.operands, shape_of(left), shape_of(right), group_sizes.shape[0])
        out_dtype: DType = request.out_dtype
        if out is not None:
            check_float(out, "out", shape)
            out_dtype = "float32"
        spec, rows = settings.spec(left, right, out_dtype), shape_of(left)[0]
        result: Array = compiled(*planes, group_sizes, out, spec=spec, shape=shape, rows=rows)
        return result

    return wgrad


def _in_common_dtype(spec: GemmSpec, planes: Planes) -> Planes:
    """Unquantized operands in the dtype in which both are multiplied."""
    return planes if spec.scaling != "none" else (planes[0].astype(spec.dtype), None, None)


def _computed_once(y: Array) -> Array:
    result: Array = jax.lax.optimization_barrier(y)  # type: ignore[no-untyped-call]
    return result
