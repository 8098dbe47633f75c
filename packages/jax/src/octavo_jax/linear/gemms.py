"""The GEMMs of a layer, forward and backward, on one device or on the shards of a mesh.

Forward:    `fprop` multiplies x and w, and adds the bias.
Backward:   dy is quantized once and read by `dgrad` and `wgrad`; `bias_gradient` sums its rows.
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
    rows_gemm,
    wgrad_gemm,
)
from octavo_registry.contract.moves import TokenRows


def _operand(layer: Layer, gemm: Gemm, q: Quantized | None, array: Array) -> GemmOperand:
    """An operand as a GEMM of this pass reads it: quantized, or in the dtype in which the layer multiplies."""
    operand = gemm_operand(q, array, layer.plan.recipe.quantizes(gemm))
    return operand if isinstance(operand, GroupedTensor) else in_dtype(operand, layer.product_dtype)


def _rows(layer: Layer, gemm: Gemm, q: Quantized | None, values: RowsOrTokens) -> RowOperand:
    """Rows as a GEMM reads them; the tokens from which it gathers them are cast, unless they are codes."""
    if not isinstance(values, TokenRows):
        return _operand(layer, gemm, q, values)
    if isinstance(values.tokens, GroupedTensor):
        return values
    return values._replace(tokens=in_dtype(values.tokens, layer.product_dtype))


def fprop(
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
    operands = _rows(layer, "fprop", xq, x), _operand(layer, "fprop", wq, w)
    y = _rows_gemm(layer, "fprop", *operands, context, bias, bias_scales)
    name = layer.options.output_checkpoint_name
    return y if name is None else name_array(y, name)


def _rows_gemm(
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
    return rows_gemm(sharded, rows, w, context.group_sizes, bias, bias_scales)


def dgrad(layer: Layer, dy: RowsOrTokens, dyq: Quantized | None, w: GemmOperand, context: Context) -> Array:
    """dx [M, K] in x's dtype; `w` is what `dgrad_weight` returned."""
    if not isinstance(w, GroupedTensor):
        w = in_dtype(stored_weight(layer, w), layer.product_dtype)
    return _rows_gemm(layer, "dgrad", _rows(layer, "dgrad", dyq, dy), w, context)


def wgrad(layer: Layer, x: RowOperand, dy: RowsOrTokens, dyq: Quantized | None, context: Context) -> Array:
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
        dw = wgrad_gemm(sharded, *operands, sizes)
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
