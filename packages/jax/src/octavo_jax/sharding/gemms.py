"""The sharded GEMMs: block by block, with the kernel's shards gathered before and partial sums reduced after.

fprop   the quantized plane that it reads is gathered over fsdp; over a sharded K, y is summed
dgrad   the other plane is gathered; over a sharded N, dx is summed
wgrad   summed over the data blocks of a shard, then scattered over fsdp and summed over dp, once
Sums over blocks and shards are of float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from octavo.quantizer import Direction
from octavo.recipe_base import Gemm
from octavo_jax.arithmetic.gemm import add_bias, bias_products, group_sums
from octavo_jax.arrays.gemm_operands import GemmOperand, RowOperand
from octavo_jax.arrays.grouped_tensor import GroupedTensor
from octavo_jax.sharding import planes, specs
from octavo_jax.sharding.blocks import Blocks, expert_block
from octavo_jax.sharding.manual_sums import summed
from octavo_jax.sharding.placement import Letter, Placement
from octavo_jax.sharding.run_on_shards import run_on_shards
from octavo_registry import Weight
from octavo_registry.contract.moves import TokenRows
from octavo_registry.contract.weights import readers


def _rows_specs(placement: Placement, rows: RowOperand, column: Letter) -> Any:
    if isinstance(rows, TokenRows):
        return specs.WHOLE  # a device's own (`rows_are_local`), which are not cut
    if isinstance(rows, GroupedTensor):
        return specs.quantized_rows(placement, rows, column)
    return specs.rows(placement, column)


def _kernel_specs(placement: Placement, w: GemmOperand, weight: Weight) -> Any:
    if isinstance(w, GroupedTensor):
        return specs.quantized_kernel(placement, w, weight)
    return specs.kernel(placement, weight)


def _whole_kernel(placement: Placement, w: GemmOperand, direction: Direction, weight: Weight, experts: int) -> Any:
    """The kernel that a GEMM multiplies, [E, ...]: gathered over fsdp, one plane of it where it is quantized."""
    w = planes.with_shard_shape(placement, w, ("g", *specs.matrix_letters(weight)))
    if isinstance(w, GroupedTensor):
        return planes.gathered_plane(placement, w, direction, weight)
    if placement.gathered_axes:
        axis = ("g", *specs.matrix_letters(weight)).index(placement.gathered_letter)
        w = planes.gathered_array(w, placement.gathered_axes, axis)
    return w.reshape(experts, -1, *w.shape[1:])


class ShardedGemm(NamedTuple):
    """A GEMM of a layer on shards.

    gemm       "fprop", "dgrad" or "wgrad"
    product    the backend's function for one block; it returns float32 where its results are summed
    weight     the axes of the kernel: "kn" for [E * G, K, N], "nk" for [E * G, N, K]
    out_dtype  of the result, to which sums are rounded once
    """

    placement: Placement
    gemm: Gemm
    product: Callable[..., Array]
    weight: Weight
    out_dtype: Any


def rows_gemm(
    sharded: ShardedGemm,
    rows: RowOperand,
    w: GemmOperand,
    group_sizes: Array,
    bias: Array | None = None,
    bias_scales: Array | None = None,
) -> Array:
    """y of "fprop" or dx of "dgrad", [*B, M, C], from the rows [*B, M, K], the kernel, bias [E * G, N] and its scales
    [*B, M]."""
    placement, gemm, product, weight, out_dtype = sharded
    direction: Direction = "rowwise" if readers("w", weight)[0] == gemm else "columnwise"
    contracted: Letter = "i" if gemm == "fprop" else "o"
    remaining: Letter = "o" if gemm == "fprop" else "i"

    def local(rows: RowOperand, w: GemmOperand, sizes: Array, bias: Array | None, scales: Array | None) -> Array:
        partial_axes = placement.non_manual(placement.cutting_axes(contracted))
        blocks, rows = Blocks.of(placement, sizes), planes.with_shard_shape(placement, rows, ("m", contracted))
        whole = _whole_kernel(placement, w, direction, weight, blocks.experts)
        biases = None if bias is None else bias.reshape(blocks.experts, -1, bias.shape[-1])
        outs = []
        for block in blocks:
            block_sizes, block_bias = blocks.take(sizes, block), None if biases is None else biases[block.e]
            block_scales = None if scales is None else blocks.take(scales, block)
            # to partial sums the bias is added once, after they are summed
            fused_bias = {} if block_bias is None or partial_axes else bias_arguments(block_bias, block_scales)
            out = product(blocks.take(rows, block), expert_block(whole, block.e), block_sizes, **fused_bias)
            if partial_axes:
                out = lax.psum(out, partial_axes)  # type: ignore[no-untyped-call]
                out = out if block_bias is None else add_bias(out, block_bias, block_sizes, block_scales)
            outs.append(out.astype(out_dtype))
        return blocks.join(outs)

    operands = rows, w, group_sizes, bias, bias_scales
    in_specs = (
        _rows_specs(placement, rows, contracted),
        _kernel_specs(placement, w, weight),
        specs.sizes(placement),
        specs.groups(placement, columns=remaining),
        specs.per_row(placement),
    )
    result: Array = run_on_shards(placement, local, operands, in_specs, specs.rows(placement, remaining))
    return result


def bias_arguments(bias: Array, scales: Array | None) -> dict[str, Array]:
    """The keywords of a backend's fprop for a bias and its scales."""
    return {"bias": bias} if scales is None else {"bias": bias, "bias_scales": scales}


def wgrad_gemm(sharded: ShardedGemm, x: RowOperand, dy: RowOperand, group_sizes: Array) -> Array:
    """dw with the axes of the kernel, from "wgrad" of each block."""
    placement, product, weight = sharded.placement, sharded.product, sharded.weight
    axis = ("g", *specs.matrix_letters(weight)).index(placement.gathered_letter)

    def local(x: RowOperand, dy: RowOperand, sizes: Array) -> Array:
        blocks, totals = Blocks.of(placement, sizes), list[Array]()
        x, dy = planes.with_shard_shape(placement, x, ("m", "i")), planes.with_shard_shape(placement, dy, ("m", "o"))
        for block in blocks:
            operands = blocks.take(x, block), blocks.take(dy, block), blocks.take(sizes, block)
            if block.f == 0:
                totals.append(product(*operands))
            else:
                totals[-1] = product(*operands, out=totals[-1], accumulate=True)
        return _reduced(placement, jnp.concatenate(totals), axis).astype(sharded.out_dtype)

    result: Array = run_on_shards(
        placement,
        local,
        (x, dy, group_sizes),
        (_rows_specs(placement, x, "i"), _rows_specs(placement, dy, "o"), specs.sizes(placement)),
        specs.kernel(placement, weight),
    )
    return result


def _reduced(placement: Placement, dw: Array, axis: int) -> Array:
    """A whole gradient of this shard's tokens as the sum over all of them, cut as the kernel is."""
    scattered, data = placement.gathered_axes, placement.data_axes
    if scattered and set(scattered) <= set(data):
        dw = lax.psum_scatter(dw, scattered, scatter_dimension=axis, tiled=True)  # type: ignore[no-untyped-call]
    elif scattered:
        # Tokens that fsdp does not shard: every member has the same sum already, and keeps its part.
        size = dw.shape[axis] // placement.shard_count(scattered)
        dw = lax.dynamic_slice_in_dim(dw, lax.axis_index(scattered) * size, size, axis)
    return summed(placement, dw, tuple(name for name in data if name not in scattered))


def bias_sums(placement: Placement, dy: Array, group_sizes: Array, dtype: Any, scales: Array | None = None) -> Array:
    """dbias [E * G, N]: column sums of each group's rows, times their scales [*B, M], over all data blocks, summed in
    float32."""

    def local(dy: Array, sizes: Array, scales: Array | None) -> Array:
        blocks = Blocks.of(placement, sizes)
        each = []
        for block in blocks:
            block_scales = None if scales is None else blocks.take(scales, block)
            each.append(group_sums(blocks.take(dy, block), blocks.take(sizes, block), block_scales))
        return summed(placement, blocks.summed_over_data(each), placement.data_axes).astype(dtype)

    result: Array = run_on_shards(
        placement,
        local,
        (dy, group_sizes, scales),
        (specs.rows(placement, "o"), specs.sizes(placement), specs.per_row(placement)),
        specs.groups(placement, columns="o"),
    )
    return result


def bias_scale_products(placement: Placement, dy: Array, bias: Array, group_sizes: Array) -> Array:
    """The gradient of a bias's scales, float32 [*B, M], from dy [*B, M, N] and the bias [E * G, N]."""

    def local(dy: Array, bias: Array, sizes: Array) -> Array:
        blocks = Blocks.of(placement, sizes)
        biases = bias.reshape(blocks.experts, -1, bias.shape[-1])
        each = [bias_products(blocks.take(dy, b), biases[b.e], blocks.take(sizes, b)) for b in blocks]
        return summed(placement, blocks.join(each), placement.cutting_axes("o"))

    result: Array = run_on_shards(
        placement,
        local,
        (dy, bias, group_sizes),
        (specs.rows(placement, "o"), specs.groups(placement, columns="o"), specs.sizes(placement)),
        specs.per_row(placement),
    )
    return result
