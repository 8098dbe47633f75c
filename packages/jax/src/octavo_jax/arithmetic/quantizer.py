"""The quantizer of whole operands, or of shards of one, in plain jnp: a compiled function for each spec.

The backend "jax-reference" is this; shards whose scales span several devices are quantized by it whatever the backend.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
from jax import Array

from octavo import GroupedTensorSpec, QuantizerSpec
from octavo.quantizer import Direction, Operand
from octavo_jax.arithmetic.quantize import OPERAND_NUMBER, WHOLE, Plane, Random, Span, quantize_plane
from octavo_jax.arithmetic.rows import RaggedRows, Rows, StackedRows
from octavo_jax.arrays.grouped_tensor import GroupedTensor
from octavo_jax.arrays.operands import check_seed, first_group
from octavo_jax.arrays.sizes import one_group


# One function for each spec: fused quantizers end in the compiled code of the quantizer alone.
@lru_cache(maxsize=512)
def quantizer_of(spec: QuantizerSpec, span: Span = WHOLE) -> Callable[..., GroupedTensor]:
    """The function that quantizes by `spec`, compiled once for each shape.

    span   the mesh axes along which operands are shards of larger ones

    quantize(x, group_sizes, *, seed, operand, group_offset, scale) of x [M, K] with group sizes [G], or of stacked
    matrices [G, N, K] without; a matrix [M, K] without sizes is one group. `seed` is uint32 [2] words. ValueError where
    rounding is stochastic and there is none.
    """

    @lru_cache(maxsize=512)
    def tensor_spec(shape: tuple[int, ...], groups: int, ragged: bool) -> GroupedTensorSpec:
        return GroupedTensorSpec(shape=shape, groups=groups, quantizer=spec, ragged_axis=0 if ragged else None)

    def octavo_quantize(
        x: Array, group_sizes: Array | None, seed: Array | None, group_offset: Array, scale: Array | None, operand: int
    ) -> dict[str, Plane]:
        rows: Rows = StackedRows(*x.shape[:2]) if group_sizes is None else RaggedRows(group_sizes, x.shape[0])
        first = span.first_column(x.shape[-1])
        random = None if seed is None else Random(seed, operand, group_offset, first)
        directions: tuple[Direction, ...] = ("rowwise",) if spec.shares_codes else spec.directions
        options: dict[str, Any] = {"scale": scale, "random": random, "span": span}
        return {direction: quantize_plane(x, rows, spec, direction, **options) for direction in directions}

    octavo_quantize.__name__ = octavo_quantize.__qualname__ = f"octavo_quantize_{spec.scaling}"
    compiled = jax.jit(octavo_quantize, static_argnames="operand")

    def quantize(
        x: Array,
        group_sizes: Array | None = None,
        *,
        seed: Array | None = None,
        operand: Operand | None = None,
        group_offset: int | Array = 0,
        scale: Array | None = None,
    ) -> GroupedTensor:
        check_seed(spec, seed)
        if group_sizes is None and x.ndim == 2:
            group_sizes = one_group(x.shape[0])
        groups = x.shape[0] if group_sizes is None else group_sizes.shape[0]
        tensor = tensor_spec(x.shape, groups, group_sizes is not None)
        words = seed if spec.stochastic else None
        number = OPERAND_NUMBER[operand or spec.role]
        planes = compiled(x, group_sizes, words, first_group(group_offset), scale, operand=number)
        first = planes.get("rowwise")
        row = first if spec.orientation != "columnwise" else None
        column = first if spec.shares_codes else planes.get("columnwise")
        if spec.orientation == "rowwise":
            column = None
        return GroupedTensor(tensor, group_sizes, *_arrays(row), *_arrays(column))

    return quantize


def _arrays(plane: Plane | None) -> tuple[Array | None, Array | None, Array | None]:
    return (None, None, None) if plane is None else (plane.payload, plane.scale, plane.second_level)
