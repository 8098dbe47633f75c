"""The GEMMs of a layer, forward and backward, on one device or on the shards of a mesh.

Forward:    `forward_product` multiplies x and w.
Backward:   dy is quantized once and read by `input_gradient` and `kernel_gradient`; `bias_gradient` sums its rows.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

from jax import Array

from octavo.recipe_base import Gemm
from octavo_jax.arithmetic.gemm import bias_products, group_sums
from octavo_jax.arithmetic.widening import in_dtype
from octavo_jax.arrays.gemm_operands import GemmOperand, RowOperand, RowsOrTokens
from octavo_jax.arrays.grouped_tensor import GroupedTensor
from octavo_jax.dispatch.layer import Layer
from octavo_jax.dispatch.results import run_gemm
from octavo_jax.linear.operands import Context, gemm_operand, stored_weight
from octavo_jax.linear.two_forms import Quantized
from octavo_jax.remat.checkpoint_names import name_array
from octavo_jax.sharding.gemms import (
    ShardedGemm,
    bias_arguments,
    bias_scale_products,
    bias_sums,
    kernel_product,
    rows_product,
)
from octavo_registry.contract.moves import TokenRows


def _factor(layer: Layer, gemm: Gemm, q: Quantized | None, array: Array) -> GemmOperand:
    factor = gemm_operand(q, array, layer.plan.recipe.quantizes(gemm))
    return factor if isinstance(factor, GroupedTensor) else in_dtype(factor, layer.product_dtype)


def _rows(layer: Layer, gemm: Gemm, q: Quantized | None, values: RowsOrTokens) -> RowOperand:
    """Rows as a GEMM reads them: quantized or cast; TokenRows, from which it gathers them, are only cast, if at all."""
    if not isinstance(values, TokenRows):
        return _factor(layer, gemm, q, values)
    if isinstance(values.tokens, GroupedTensor):
        return values
    return values._replace(tokens=in_dtype(values.tokens, layer.product_dtype))


def forward_product(
    layer: Layer,
    x: RowsOrTokens,
    xq: Quantized | None,
    w: Array,
    wq: Quantized | None,
    bias: Array | None,
    context: Context,
    bias_scales: Array | None = None,
) -> Array:
    """y [M, N], with the layer's output_checkpoint_name.

    xq, wq        x and w quantized; None if no GEMM reads them so
    w             as `stored_weight` returns it
    bias_scales   [M], or None
    """
    operands = _rows(layer, "fprop", xq, x), _factor(layer, "fprop", wq, w)
    y = _rows_product(layer, "fprop", *operands, context, bias, bias_scales)
    name = layer.options.output_checkpoint_name
    return y if name is None else name_array(y, name)


def _rows_product(
    layer: Layer,
    gemm: Literal["fprop", "dgrad"],
    rows: RowOperand,
    w: GemmOperand,
    context: Context,
    bias: Array | None = None,
    bias_scales: Array | None = None,
) -> Array:
    plan, placement = layer.plan.fprop if gemm == "fprop" else layer.plan.dgrad, layer.placement
    assert plan is not None
    if placement is None:
        options = {} if bias is None else bias_arguments(bias, bias_scales)
        return run_gemm(plan, rows, w, context.group_sizes, **options)
    dtype = layer.y_dtype if gemm == "fprop" else layer.x_dtype
    sharded = ShardedGemm(placement, gemm, partial(run_gemm, plan), plan.request.weight, dtype)
    return rows_product(sharded, rows, w, context.group_sizes, bias, bias_scales)


def input_gradient(layer: Layer, dy: RowsOrTokens, dyq: Quantized | None, w: GemmOperand, context: Context) -> Array:
    """dx [M, K] in x's dtype; `w` is what `dgrad_weight` returned."""
    if not isinstance(w, GroupedTensor):
        w = in_dtype(stored_weight(layer, w), layer.product_dtype)
    return _rows_product(layer, "dgrad", _rows(layer, "dgrad", dyq, dy), w, context)


def kernel_gradient(layer: Layer, x: RowOperand, dy: RowsOrTokens, dyq: Quantized | None, context: Context) -> Array:
    """The kernel's gradient in the kernel's shape and dtype; `x` is what `wgrad_x` returned."""
    plan, placement, sizes = layer.plan.wgrad, layer.placement, context.group_sizes
    assert plan is not None
    x = x if isinstance(x, GroupedTensor) else _rows(layer, "wgrad", None, x)
    operands = x, _rows(layer, "wgrad", dyq, dy)
    if placement is None:
        dw = run_gemm(plan, *operands, sizes)
    else:
        weight = layer.plan.fprop.request.weight
        sharded = ShardedGemm(placement, "wgrad", partial(run_gemm, plan), weight, layer.kernel_dtype)
        dw = kernel_product(sharded, *operands, sizes)
    return stored_weight(layer, dw).astype(layer.kernel_dtype)


def bias_gradient(
    layer: Layer, dy: Array, bias: Array | None, context: Context, scales: Array | None = None
) -> Array | None:
    """Column sums of each group's rows, times their scales [M], [G, N] in the bias's dtype; None without a bias."""
    if bias is None:
        return None
    if layer.placement is not None:
        return bias_sums(layer.placement, dy, context.group_sizes, bias.dtype, scales)
    return group_sums(dy, context.group_sizes, scales).astype(bias.dtype)


def bias_scales_gradient(layer: Layer, dy: Array, bias: Array, context: Context) -> Array:
    """float32 [M], each row of dy times the bias of its group."""
    if layer.placement is not None:
        return bias_scale_products(layer.placement, dy, bias, context.group_sizes)
    return bias_products(dy, bias, context.group_sizes)
