"""The sharded quantizers: tokens block by block, the kernel shard by shard, amaxes where a scale spans shards.

A backend's quantizer takes whole operands. Where a scale of the recipe covers elements of several shards (current,
row and NVFP4 along a sharded dimension), or random bits are counted from the whole operand's first column, shards are
quantized by this package's own arithmetic, which is the reference's, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from octavo import QuantizerSpec
from octavo_jax.arithmetic import bits as fp32
from octavo_jax.arithmetic.quantize import WHOLE, Span
from octavo_jax.arithmetic.quantizer import quantizer_of
from octavo_jax.arrays.grouped_tensor import GroupedTensor
from octavo_jax.scaling.delayed_state import amax_of
from octavo_jax.scaling.quantizer_arguments import QuantizerArguments
from octavo_jax.sharding import planes, specs
from octavo_jax.sharding.blocks import Block, Blocks, join_experts
from octavo_jax.sharding.placement import Letter, Placement
from octavo_jax.sharding.run_on_shards import run_on_shards
from octavo_registry import QuantizePlan, Weight


class CodesAndAmax(NamedTuple):
    """A quantized operand, and its amaxes where delayed scaling records them.

    q      codes and scales
    amax   float32 [G] of each group, or [E * G]; None where nothing records it
    """

    q: GroupedTensor
    amax: Array | None


_SPANNING = frozenset({"current", "row", "nvfp4"})


def spans(spec: QuantizerSpec, span: Span) -> bool:
    """True where a scale covers elements of several shards."""
    return span != WHOLE and spec.scaling in _SPANNING


def _local_quantizer(plan: QuantizePlan, span: Span, records_amax: bool) -> Callable[..., CodesAndAmax]:
    """The quantizer of one block or shard: of x and sizes, with a quantizer's keywords."""
    spec = plan.request.quantizer
    quantize = quantizer_of(spec, span) if spans(spec, span) else plan.run

    def quantize_local(x: Array, sizes: Array | None, **keywords: Any) -> CodesAndAmax:
        if not records_amax:
            return CodesAndAmax(quantize(x, sizes, **keywords), None)
        if plan.bound.with_amax is None:
            return CodesAndAmax(quantize(x, sizes, **keywords), _amax_over_shards(amax_of(x, sizes), span))
        q, amax = plan.bound.with_amax(x, sizes, **keywords)
        return CodesAndAmax(q, _amax_over_shards(amax, span))

    return quantize_local


def _amax_over_shards(amax: Array, span: Span) -> Array:
    """The amaxes [G] of whole groups, from those of the part that one shard has."""
    return fp32.as_float(span.of_group(fp32.as_bits(amax) & fp32.MAGNITUDE))


def largest_amax(amaxes: list[Array], axes: tuple[str, ...]) -> Array:
    """The amaxes [G] that a step records of several tensors: their maximum, over `axes`, too; NaN is ignored."""
    bits = [fp32.as_bits(amax) & fp32.MAGNITUDE for amax in amaxes]
    largest = jnp.max(jnp.stack([jnp.where(one > fp32.INFINITY, np.uint32(0), one) for one in bits]), axis=0)
    return fp32.as_float(lax.pmax(largest, axes) if axes else largest)  # type: ignore[no-untyped-call]


def quantize_rows(
    placement: Placement,
    plan: QuantizePlan,
    x: Array,
    group_sizes: Array,
    arguments: QuantizerArguments,
) -> CodesAndAmax:
    """x or dy, [*B, M, C], quantized block by block, and the amaxes [E * G] that delayed scaling records, else None.

    arguments   `scale` is [E * G]
    """
    seed, operand, group_offset, scale = arguments
    column: Letter = "i" if operand == "x" else "o"
    spec = plan.request.quantizer
    groups, records_amax = group_sizes.shape[-1], scale is not None

    def local(x: Array, sizes: Array, seed: Array | None, offset: Any, scale: Array | None) -> CodesAndAmax:
        quantize = _local_quantizer(plan, Span(columns=placement.cutting_axes(column)), records_amax)
        blocks = Blocks.of(placement, sizes)
        parts: list[GroupedTensor] = []
        amaxes: list[list[Array]] = [[] for _ in range(blocks.experts)]
        for block in blocks:
            q, amax = quantize(
                blocks.take(x, block),
                blocks.take(sizes, block),
                seed=seed,
                operand=operand,
                group_offset=blocks.first_group(offset, block, groups) if spec.stochastic else offset,
                scale=None if scale is None else scale.reshape(blocks.experts, groups)[block.e],
            )
            parts.append(replace(q, group_sizes=None))
            if amax is not None:
                amaxes[block.e].append(amax)
        if not records_amax:
            return CodesAndAmax(blocks.join(parts), None)
        by_expert = jnp.concatenate([largest_amax(each, placement.data_axes) for each in amaxes])
        return CodesAndAmax(blocks.join(parts), by_expert)

    shard = x.shape[-1] // placement.shard_count(placement.non_manual(placement.axes_of(column)))
    structure = planes.structure_of(planes.quantized_spec(plan, (x.shape[-2], shard), groups))
    per_group = specs.groups(placement)
    result: CodesAndAmax = run_on_shards(
        placement,
        local,
        (x, group_sizes, seed, group_offset, scale),
        (specs.rows(placement, column), specs.sizes(placement), specs.WHOLE, specs.WHOLE, per_group),
        CodesAndAmax(specs.quantized_rows(placement, structure, column), per_group),  # type: ignore[arg-type]
    )
    return CodesAndAmax(replace(planes.with_shared_codes(result.q), group_sizes=group_sizes), result.amax)


def rows_are_local(placement: Placement, column: Letter) -> bool:
    """Whether each device has whole rows of its own, without leading axes of blocks, as in the caller's shard_map."""
    return placement.route == "manual" and not (
        placement.non_manual_axes or placement.blocks or placement.is_cut(column)
    )


def quantize_local_tokens(
    placement: Placement,
    plan: QuantizePlan,
    tokens: tuple[Array, ...],
    group_sizes: Array,
    arguments: QuantizerArguments,
) -> CodesAndAmax:
    """As `quantize_rows` of the rows [M, C] that a device's choices make of its tokens, if `rows_are_local`.

    tokens   [T, C], and what `BoundQuantize.of_tokens` takes of the choices
    """
    seed, operand, group_offset, scale = arguments
    of_tokens = plan.bound.of_tokens
    assert of_tokens is not None  # as the caller has checked
    if plan.request.quantizer.stochastic:
        blocks = Blocks.of(placement, group_sizes)
        group_offset = blocks.first_group(group_offset, Block(0, 0), group_sizes.shape[-1])
    x, *choices = tokens
    q, amax = of_tokens(
        x,
        group_sizes,
        *choices,
        amax=scale is not None,
        seed=seed,
        operand=operand,
        group_offset=group_offset,
        scale=scale,
    )
    amax = None if amax is None else largest_amax([_amax_over_shards(amax, WHOLE)], placement.data_axes)
    return CodesAndAmax(q, amax)


def quantize_kernel(
    placement: Placement,
    plan: QuantizePlan,
    w: Array,
    weight: Weight,
    arguments: QuantizerArguments,
) -> CodesAndAmax:
    """The kernel with its own axes, [E * G, R, C], quantized shard by shard, one expert block at a time: planes
    [E, ...].

    arguments   `scale` is [E * G]; where there is one, the second result is the amaxes [E * G], else None
    """
    seed, operand, group_offset, scale = arguments
    rows, columns = specs.matrix_letters(weight)
    records_amax = scale is not None

    def local(w: Array, seed: Array | None, offset: Any, scale: Array | None) -> CodesAndAmax:
        span = Span(placement.cutting_axes(columns), placement.cutting_axes(rows))
        quantize = _local_quantizer(plan, span, records_amax)
        experts = placement.block_count("e") // placement.shard_count(placement.non_manual(placement.block_axes("e")))
        groups = w.shape[0] // experts
        parts, amaxes = [], []
        for e in range(experts):
            part = slice(e * groups, (e + 1) * groups)
            factor = None if scale is None else scale[part]
            q, amax = quantize(w[part], None, seed=seed, operand=operand, group_offset=offset, scale=factor)
            parts.append(q)
            if amax is not None:
                amaxes.append(largest_amax([amax], ()))
        return CodesAndAmax(join_experts(parts), jnp.concatenate(amaxes) if records_amax else None)

    cut = {
        letter: placement.shard_count(placement.non_manual(placement.axes_of(letter)))
        for letter in ("g", rows, columns)
    }
    groups = w.shape[0] // placement.block_count("e") // cut["g"]
    shape = (groups, w.shape[1] // cut[rows], w.shape[2] // cut[columns])
    structure = planes.structure_of(planes.quantized_spec(plan, shape, groups))
    per_group = specs.groups(placement, of_kernel=True)
    result: CodesAndAmax = run_on_shards(
        placement,
        local,
        (w, seed, group_offset, scale),
        (specs.kernel(placement, weight), specs.WHOLE, specs.WHOLE, per_group),
        CodesAndAmax(specs.quantized_kernel(placement, structure, weight), per_group),  # type: ignore[arg-type]
    )
    return result._replace(q=planes.with_shared_codes(result.q))
