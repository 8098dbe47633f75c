"""The sharded quantizers: tokens block by block, the kernel shard by shard, amaxes where a scale spans shards.

A backend's quantizer takes whole operands. Where a scale of the recipe covers elements of several shards (current,
row and NVFP4 along a sharded dimension), or random bits are counted from the whole operand's first column, shards are
quantized by this package's own arithmetic, which is the reference's, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

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
from octavo_jax.sharding.route import run
from octavo_registry import QuantizePlan, Weight

Quantized = tuple[GroupedTensor, Array | None]
"""Codes and scales, and amaxes where delayed scaling records them."""

_SPANNING = frozenset({"current", "row", "nvfp4"})


def spans(spec: QuantizerSpec, span: Span) -> bool:
    """True where a scale covers elements of several shards."""
    return span != WHOLE and spec.scaling in _SPANNING


def _function(plan: QuantizePlan, span: Span, records: bool) -> Callable[..., Quantized]:
    """(x, sizes, how) to codes and scales of one block or shard, and its amaxes where delayed scaling records them."""
    spec = plan.request.quantizer
    quantize = quantizer_of(spec, span) if spans(spec, span) else plan.run

    def quantized(x: Array, sizes: Array | None, **how: Any) -> Quantized:
        if not records:
            return quantize(x, sizes, **how), None
        if plan.bound.with_amax is None:
            return quantize(x, sizes, **how), _amaxes(amax_of(x, sizes), span)
        q, amax = plan.bound.with_amax(x, sizes, **how)
        return q, _amaxes(amax, span)

    return quantized


def _amaxes(amax: Array, span: Span) -> Array:
    return fp32.as_float(span.of_group(fp32.as_bits(amax) & fp32.MAGNITUDE))


def recorded(amaxes: list[Array], axes: tuple[str, ...]) -> Array:
    """The amaxes that a step records of several tensors: the largest, over `axes` of the mesh, too; NaN is ignored."""
    bits = [fp32.as_bits(amax) & fp32.MAGNITUDE for amax in amaxes]
    largest = jnp.max(jnp.stack([jnp.where(one > fp32.INFINITY, np.uint32(0), one) for one in bits]), axis=0)
    return fp32.as_float(lax.pmax(largest, axes) if axes else largest)  # type: ignore[no-untyped-call]


def quantize_rows(
    placement: Placement,
    plan: QuantizePlan,
    x: Array,
    group_sizes: Array,
    arguments: QuantizerArguments,
) -> Quantized:
    """x or dy, [*B, M, C], quantized block by block, and the amaxes [E * G] that delayed scaling records, else None.

    arguments   `scale` is [E * G]
    """
    seed, operand, group_offset, scale = arguments
    column: Letter = "i" if operand == "x" else "o"
    spec = plan.request.quantizer
    groups, records = group_sizes.shape[-1], scale is not None

    def local(x: Array, sizes: Array, seed: Array | None, offset: Any, scale: Array | None) -> Quantized:
        function = _function(plan, Span(columns=placement.several(column)), records)
        blocks = Blocks.of(placement, sizes)
        parts: list[GroupedTensor] = []
        amaxes: list[list[Array]] = [[] for _ in range(blocks.experts)]
        for block in blocks:
            q, amax = function(
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
        of_experts = jnp.concatenate([recorded(each, placement.data) for each in amaxes]) if records else None
        return blocks.join(parts), of_experts

    shard = x.shape[-1] // placement.size(placement.free_among(placement.axes_of(column)))
    form = planes.form_of(planes.spec_of_plan(plan, (x.shape[-2], shard), groups))
    per_group = specs.groups(placement)
    result: Quantized = run(
        placement,
        local,
        (x, group_sizes, seed, group_offset, scale),
        (specs.rows(placement, column), specs.sizes(placement), specs.WHOLE, specs.WHOLE, per_group),
        (specs.quantized_rows(placement, form, column), per_group),
    )
    return replace(planes.shared(result[0]), group_sizes=group_sizes), result[1]


def owns_rows(placement: Placement, column: Letter) -> bool:
    """Whether each device makes rows of its own, which are whole and not in blocks."""
    return placement.route == "manual" and not (placement.free or placement.blocks or placement.cuts(column))


def quantize_own_rows(
    placement: Placement,
    plan: QuantizePlan,
    tokens: tuple[Array, ...],
    group_sizes: Array,
    arguments: QuantizerArguments,
) -> Quantized:
    """As `quantize_rows` of the rows [M, C] that a device's choices make of its tokens, where `owns_rows` is True.

    tokens   [T, C], and what `BoundQuantize.of_tokens` takes of the choices
    """
    seed, operand, group_offset, scale = arguments
    of_tokens = plan.bound.of_tokens
    assert of_tokens is not None  # the caller has asked
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
    return q, None if amax is None else recorded([_amaxes(amax, WHOLE)], placement.data)


def quantize_kernel(
    placement: Placement,
    plan: QuantizePlan,
    w: Array,
    weight: Weight,
    arguments: QuantizerArguments,
) -> Quantized:
    """The kernel with its own axes, [E * G, R, C], quantized shard by shard, one expert block at a time: planes
    [E, ...].

    arguments   `scale` is [E * G]; where there is one, the second result is the amaxes [E * G], else None
    """
    seed, operand, group_offset, scale = arguments
    rows, columns = specs.sides(weight)
    records = scale is not None

    def local(w: Array, seed: Array | None, offset: Any, scale: Array | None) -> Quantized:
        function = _function(plan, Span(placement.several(columns), placement.several(rows)), records)
        here = placement.count("e") // placement.size(placement.free_among(placement.indexed("e")))
        groups = w.shape[0] // here
        parts, amaxes = [], []
        for e in range(here):
            part = slice(e * groups, (e + 1) * groups)
            factor = None if scale is None else scale[part]
            q, amax = function(w[part], None, seed=seed, operand=operand, group_offset=offset, scale=factor)
            parts.append(q)
            if amax is not None:
                amaxes.append(recorded([amax], ()))
        return join_experts(parts), jnp.concatenate(amaxes) if records else None

    cut = {letter: placement.size(placement.free_among(placement.axes_of(letter))) for letter in ("g", rows, columns)}
    groups = w.shape[0] // placement.count("e") // cut["g"]
    shape = (groups, w.shape[1] // cut[rows], w.shape[2] // cut[columns])
    form = planes.form_of(planes.spec_of_plan(plan, shape, groups))
    per_group = specs.groups(placement, of_kernel=True)
    result: Quantized = run(
        placement,
        local,
        (w, seed, group_offset, scale),
        (specs.kernel(placement, weight), specs.WHOLE, specs.WHOLE, per_group),
        (specs.quantized_kernel(placement, form, weight), per_group),
    )
    return planes.shared(result[0]), result[1]
