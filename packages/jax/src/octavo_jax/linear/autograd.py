"""What every layer's custom_vjp is made of: quantized operands with their names, the three GEMMs, delayed scaling.

Forward:    x and w are quantized (`quantize_operand`) and multiplied (`forward_product`); `kept` leaves of each operand
            the one plane that the backward pass reads.
Backward:   dy is quantized once and read by `input_gradient` and `kernel_gradient`; `bias_gradient` sums its rows.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from octavo.quantizer import Direction, Operand
from octavo.recipe_base import Gemm
from octavo_jax.arithmetic.gemm import group_sums
from octavo_jax.arrays.grouped_tensor import GroupedTensor
from octavo_jax.dispatch.layer import Layer, in_plain_layouts
from octavo_jax.quantizers.derivatives import undifferentiated
from octavo_jax.remat.checkpoint_names import name_array, name_planes
from octavo_jax.remat.never_recomputed import never_recomputed
from octavo_jax.scaling.delayed import DelayedState, ScalingHistory, amax_of, record_amax
from octavo_jax.sharding.products import bias_sums, kernel_product, rows_product
from octavo_jax.sharding.quantizing import quantize_kernel, quantize_rows
from octavo_registry.contract.weights import readers
from octavo_registry.dispatch.layer_plan import QuantizePlan

GemmOperand = GroupedTensor | Array


class Context(NamedTuple):
    """Arguments that have no gradient: sizes [G], seed words [2] or None, number of the first group."""

    group_sizes: Array
    seed: Array | None
    group_offset: Array | np.uint32


def quantize_operand(
    plan: QuantizePlan | None,
    layer: Layer,
    x: Array,
    operand: Operand,
    context: Context,
    history: ScalingHistory | None = None,
) -> tuple[GroupedTensor | None, ScalingHistory | None]:
    """`x` quantized by `plan` and named, and the history with its amax recorded.

    plan      the layer's quantizer of this operand; None where no GEMM reads it quantized: then there is no tensor
              and the history is what it was
    x         [M, C] rows, [*B, M, C] where the layer has a placement; for "w" the stacked matrices as `stored_weight`
              gives them
    history   of delayed scaling, else None
    """
    if plan is None:
        return None, history
    spec = plan.request.quantizer
    assert spec is not None
    x, sizes = undifferentiated(x), None if operand == "w" else context.group_sizes
    how: dict[str, Any] = {
        "seed": context.seed if spec.stochastic else None,
        "operand": operand,
        "group_offset": context.group_offset,
        "scale": None if history is None else history.scale,
    }
    if layer.placement is not None:
        q, amax = _quantized_shards(plan, layer, x, sizes, how)
        return named(layer, q, operand), None if history is None else record_amax(history, never_recomputed(amax))
    if history is None:
        return named(layer, plan.run(x, sizes, **how), operand), None
    if plan.bound.with_amax is None:
        q, amax = plan.run(x, sizes, **how), amax_of(x, sizes)
    else:
        q, amax = plan.bound.with_amax(x, sizes, **how)
    return named(layer, q, operand), record_amax(history, never_recomputed(amax))


def _quantized_shards(
    plan: QuantizePlan, layer: Layer, x: Array, sizes: Array | None, how: dict[str, Any]
) -> tuple[GroupedTensor, Any]:
    """Of rows with sizes, or of a kernel; planes in the plain layout where shards are parts of an operand."""
    placement = layer.placement
    assert placement is not None
    cut = placement.cuts("g", "k", "n") if sizes is None else placement.cuts("i" if how["operand"] == "x" else "o")
    plan = in_plain_layouts(plan, layer.asked.backend) if cut else plan
    if sizes is None:
        return quantize_kernel(placement, plan, x, layer.plan.fprop.request.weight, **how)
    return quantize_rows(placement, plan, x, sizes, **how)


def named(layer: Layer, q: GroupedTensor, operand: Operand) -> GroupedTensor:
    """q with its planes named, to be called before their first use; dy has no name, for nothing recomputes it."""
    return q if operand == "dy" else name_planes(q, layer.checkpoint_name)


def gemm_operand(q: GroupedTensor | None, array: Array, wanted: bool) -> GemmOperand:
    """What a GEMM multiplies: the quantized operand where its slot wants it, else the array."""
    return q if wanted and q is not None else array


def _factor(layer: Layer, gemm: Gemm, q: GroupedTensor | None, array: Array) -> GemmOperand:
    factor = gemm_operand(q, array, layer.plan.recipe.quantizes(gemm))
    return factor if isinstance(factor, GroupedTensor) else factor.astype(layer.product_dtype)


def kept(operand: GemmOperand, direction: Direction) -> GemmOperand:
    """The operand with the one plane that the backward pass reads."""
    if not isinstance(operand, GroupedTensor):
        return operand
    payload, scale, second = operand.plane(direction)
    if direction == "rowwise":
        return GroupedTensor(operand.spec, operand.group_sizes, payload, scale, second)
    sizes = operand.group_sizes
    return GroupedTensor(operand.spec, sizes, columnwise=payload, columnwise_scale=scale, columnwise_global=second)


def stored_weight(layer: Layer, kernel: Array) -> Array:
    """The kernel as the plan's operations take it: as it lies, but where no backend of the plan reads it so."""
    return jnp.swapaxes(kernel, 1, 2) if layer.plan.transposes else kernel


def forward_product(
    layer: Layer,
    x: Array,
    xq: GroupedTensor | None,
    w: Array,
    wq: GroupedTensor | None,
    bias: Array | None,
    context: Context,
) -> Array:
    """y [M, N], named where the layer names its output; w is `stored_weight`'s."""
    operands = _factor(layer, "fprop", xq, x), _factor(layer, "fprop", wq, w)
    y = _rows_product(layer, "fprop", *operands, context, bias)
    return y if layer.output_checkpoint_name is None else name_array(y, layer.output_checkpoint_name)


def _rows_product(
    layer: Layer,
    gemm: Literal["fprop", "dgrad"],
    rows: GemmOperand,
    w: GemmOperand,
    context: Context,
    bias: Array | None = None,
) -> Array:
    plan, placement = layer.plan.fprop if gemm == "fprop" else layer.plan.dgrad, layer.placement
    assert plan is not None
    sizes, more = context.group_sizes, {"bias": bias} if gemm == "fprop" else {}
    if placement is None:
        product: Array = plan.run(rows, w, sizes, **more)
        return product
    dtype = layer.y_dtype if gemm == "fprop" else layer.x_dtype
    return rows_product(placement, plan.run, gemm, rows, w, plan.request.weight, sizes, dtype, **more)


def kept_x(layer: Layer, x: Array, xq: GroupedTensor | None) -> GemmOperand:
    """What the weight gradient reads of x."""
    return kept(gemm_operand(xq, x, layer.plan.recipe.quantizes("wgrad")), "columnwise")


def kept_w(layer: Layer, kernel: Array, wq: GroupedTensor | None) -> GemmOperand:
    """What the input gradient reads of the kernel: one plane, or the kernel itself as the caller holds it."""
    reads_rows = readers("w", layer.plan.fprop.request.weight)[0] == "dgrad"
    operand = gemm_operand(wq, kernel, layer.plan.recipe.quantizes("dgrad"))
    return kept(operand, "rowwise" if reads_rows else "columnwise")


def input_gradient(layer: Layer, dy: Array, dyq: GroupedTensor | None, w: GemmOperand, context: Context) -> Array:
    """dx [M, K] in x's dtype; w is `kept_w`'s."""
    assert layer.plan.dgrad is not None
    if not isinstance(w, GroupedTensor):
        w = stored_weight(layer, w).astype(layer.product_dtype)
    return _rows_product(layer, "dgrad", _factor(layer, "dgrad", dyq, dy), w, context)


def kernel_gradient(layer: Layer, x: GemmOperand, dy: Array, dyq: GroupedTensor | None, context: Context) -> Array:
    """The kernel's gradient in its own shape and dtype; x is `kept_x`'s."""
    assert layer.plan.wgrad is not None
    if not isinstance(x, GroupedTensor):
        x = x.astype(layer.product_dtype)
    operands = x, _factor(layer, "wgrad", dyq, dy)
    run, placement, sizes = layer.plan.wgrad.run, layer.placement, context.group_sizes
    if placement is None:
        dw: Array = run(*operands, sizes)
    else:
        stored = layer.plan.fprop.request.weight
        dw = kernel_product(placement, run, *operands, stored, sizes, layer.kernel_dtype)
    return stored_weight(layer, dw).astype(layer.kernel_dtype)


def bias_gradient(layer: Layer, dy: Array, bias: Array | None, context: Context) -> Array | None:
    """Column sums of each group's rows, [G, N] in the bias's dtype; None without a bias."""
    if bias is None:
        return None
    if layer.placement is not None:
        return bias_sums(layer.placement, dy, context.group_sizes, bias.dtype)
    return group_sums(dy, context.group_sizes).astype(bias.dtype)


def merged(state: DelayedState, later: DelayedState) -> DelayedState:
    """Both states' running amaxes: `later` is what calls that took this call's second result recorded."""
    return DelayedState(
        record_amax(state.x, later.x.history[0]),
        record_amax(state.kernel, later.kernel.history[0]),
        record_amax(state.grad, later.grad.history[0]),
    )
