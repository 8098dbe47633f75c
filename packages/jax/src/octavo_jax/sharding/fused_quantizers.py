"""Fused quantizers of sharded tokens: an activation, its gradient or a normalization, then codes, block by block.

Columns are whole on every shard here: a scale, a gate's partner and a row's statistics never span shards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from octavo.quantizer import Operand
from octavo_jax.arrays.grouped_tensor import GroupedTensor
from octavo_jax.functions.composed import Extras
from octavo_jax.scaling.delayed_state import amax_of
from octavo_jax.scaling.quantizer_arguments import QuantizerArguments
from octavo_jax.sharding import planes, specs
from octavo_jax.sharding.blocks import Blocks
from octavo_jax.sharding.manual_sums import summed
from octavo_jax.sharding.placement import Letter, Placement
from octavo_jax.sharding.quantizers import largest_amax
from octavo_jax.sharding.run_on_shards import run_on_shards
from octavo_registry import QuantizePlan

_ROWS = ("activated", "mean", "rstd", "dprobs")


class FusedInputs(NamedTuple):
    """The arrays that a fused function reads.

    tokens   [*B, M, C]; probs [*B, M]
    whole    the same for all rows: gamma and beta
    """

    tokens: tuple[Array, ...]
    whole: tuple[Array | None, ...] = ()
    probs: Array | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _OfShard:
    """Runs `function` on each block of one shard, and joins what it returns."""

    placement: Placement
    function: Callable[..., tuple[GroupedTensor, Extras]]
    stochastic: bool
    operand: Operand
    extra_names: tuple[str, ...]

    def __call__(
        self,
        tokens: tuple[Array, ...],
        whole: tuple[Array | None, ...],
        sizes: Array,
        probs: Array | None,
        seed: Array | None,
        offset: Any,
        scale: Array | None,
    ) -> tuple[GroupedTensor, dict[str, Array]]:
        placement, groups, blocks = self.placement, sizes.shape[-1], Blocks.of(self.placement, sizes)
        parts: list[GroupedTensor] = []
        by_name: dict[str, list[Array]] = {name: [] for name in self.extra_names}
        amaxes: list[list[Array]] = [[] for _ in range(blocks.experts)]
        for block in blocks:
            of_block, more = blocks.take(sizes, block), {} if probs is None else {"probs": blocks.take(probs, block)}
            q, extras = self.function(
                *(blocks.take(one, block) for one in tokens),
                *whole,
                of_block,
                seed=seed,
                operand=self.operand,
                group_offset=blocks.first_group(offset, block, groups) if self.stochastic else offset,
                scale=None if scale is None else scale.reshape(blocks.experts, groups)[block.e],
                **more,
            )
            parts.append(replace(q, group_sizes=None))
            for name, values in by_name.items():
                values.append(getattr(extras, name))
            if scale is not None:
                assert extras.activated is not None
                amaxes[block.e].append(amax_of(extras.activated, of_block) if extras.amax is None else extras.amax)
        joined = {name: blocks.join(by_name[name]) for name in self.extra_names if name in _ROWS}
        if "dbias" in by_name:
            joined["dbias"] = summed(placement, blocks.summed_over_data(by_name["dbias"]), placement.data_axes)
        if scale is not None:
            joined["amax"] = jnp.concatenate([largest_amax(each, placement.data_axes) for each in amaxes])
        return blocks.join(parts), joined


def fused_rows(
    placement: Placement,
    function: Callable[..., tuple[GroupedTensor, Extras]],
    plan: QuantizePlan,
    inputs: FusedInputs,
    group_sizes: Array,
    extra_names: tuple[str, ...],
    arguments: QuantizerArguments,
) -> tuple[GroupedTensor, Extras]:
    """`function(*tokens, *whole, group_sizes, ...)` of each block, as `quantize_rows` of one array.

    function     a quantizer with what is fused before it
    plan         of the quantizer in the fused function
    inputs       rows [*B, M, C], arrays that every block reads whole, and probabilities [*B, M] or None
    group_sizes  [*B, G] of each block
    extra_names  names of the Extras to return: rows' are [*B, M, C] or [*B, M], `dbias` is summed over data blocks
    arguments    `scale` is [E * G]; where there is one, the Extras hold the amax [E * G], too
    """
    (tokens, whole, probs), (seed, operand, group_offset, scale) = inputs, arguments
    columns, groups = plan.request.k, group_sizes.shape[-1]
    assert columns is not None
    local = _OfShard(placement, function, plan.request.quantizer.stochastic, operand, extra_names)
    column: Letter = "o" if operand == "dy" else "i"
    structure = planes.structure_of(planes.quantized_spec(plan, (tokens[0].shape[-2], columns), groups))
    rows, per_row = specs.rows(placement, column), specs.per_row(placement)
    per_group = specs.groups(placement)
    known = {"activated": rows, **dict.fromkeys(_ROWS[1:], per_row), "dbias": per_group, "amax": per_group}
    names = (*extra_names, *(() if scale is None else ("amax",)))
    q, extras = run_on_shards(
        placement,
        local,
        (tokens, whole, group_sizes, probs, seed, group_offset, scale),
        (rows, specs.WHOLE, specs.sizes(placement), per_row, specs.WHOLE, specs.WHOLE, per_group),
        (specs.quantized_rows(placement, structure, column), {name: known[name] for name in names}),
    )
    return replace(planes.with_shared_codes(q), group_sizes=group_sizes), Extras(**extras)
