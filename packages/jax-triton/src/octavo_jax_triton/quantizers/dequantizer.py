"""The function of a "dequantize" request, and column codes from one layout to the other."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array

from octavo import GroupedTensorSpec
from octavo.formats import DType
from octavo.grouped_tensor import PLAIN
from octavo.quantizer import HADAMARD_SIZE, Direction
from octavo_jax.plugin_api import PAYLOAD_DTYPE, GroupedTensor, check_groups
from octavo_jax_triton.arrays.planes import Plane, checked_plane
from octavo_jax_triton.arrays.table import row_table, sizes_of
from octavo_jax_triton.launch.arguments import Output, Target, divisible_by_16
from octavo_jax_triton.launch.launch_kernel import launch_kernel
from octavo_registry.contract import Dequantize
from octavo_triton.kernels.dequantize import dequantize_plane, turn_codes
from octavo_triton.layouts import TURNED, kernels_scaling, panels_of, tiles, turned_layout, turned_shape


def bind_dequantize(out_dtype: DType, target: Target) -> Dequantize[GroupedTensor, Array]:
    """The function that gives the values of one plane in `out_dtype`."""

    def octavo_dequantize(
        plane: Plane, group_sizes: Array | None, spec: GroupedTensorSpec, direction: Direction
    ) -> Array:
        return _values(plane, group_sizes, spec, direction, out_dtype, target)

    compiled = jax.jit(octavo_dequantize, static_argnames=("spec", "direction"))

    def run(q: GroupedTensor, direction: Direction = "rowwise") -> Array:
        check_groups(q)
        if direction == "columnwise":
            q = converted(q, PLAIN, target)
        plane = checked_plane(q, direction)
        values: Array = compiled(plane, q.group_sizes, spec=q.spec, direction=direction)
        return values

    return run


def _values(
    plane: Plane,
    group_sizes: Array | None,
    spec: GroupedTensorSpec,
    direction: Direction,
    out_dtype: DType,
    target: Target,
) -> Array:
    codes, scale, factor = plane
    how, shape = spec.quantizer, codes.shape
    rows, columns = math.prod(shape[:-1]), shape[-1]
    table, panels, matrix_rows = None, spec.groups * tiles(shape[-2]), shape[-2]
    if group_sizes is not None:
        table = row_table(group_sizes, spec.shape[0], target)
        if direction == "columnwise" and how.hadamard:
            # they stay in their domain, each group padded to whole runs, as the payload has them
            runs = (sizes_of(table, spec.groups) + (HADAMARD_SIZE - 1)) // HADAMARD_SIZE
            table = row_table(runs * HADAMARD_SIZE, rows, target)
        panels, matrix_rows = panels_of(rows, spec.groups), 0
    out = Output("values", shape, jnp.dtype(out_dtype))
    arguments = (codes, scale, factor, table, out, rows, columns, spec.groups, panels, matrix_rows)
    return launch_kernel(
        dequantize_plane, (panels, tiles(columns)), arguments, target,
        FORMAT=how.format, SCALING=kernels_scaling(how), SCALES=how.scale_format, BLOCK=how.block_size or 128,
        SQUARE=how.square, COLUMNWISE=direction == "columnwise", STACKED=table is None, OUT_DTYPE=out_dtype,
        EVEN=divisible_by_16(columns),
    )["values"]  # fmt: skip


def converted(q: GroupedTensor, columnwise: str, target: Target) -> GroupedTensor:
    """`q` with its column codes in that layout, the same bits; what has not changed is shared with it."""
    spec = q.spec
    if spec.columnwise_layout == columnwise or "columnwise" not in spec.quantizer.directions:
        return q
    codes, _, _ = checked_plane(q, "columnwise")
    turned = _octavo_turn(codes, q.group_sizes, spec=spec, columnwise=columnwise, target=target)
    return replace(q, spec=turned_layout(spec, columnwise), columnwise=turned)


def _turn(codes: Array, group_sizes: Array | None, spec: GroupedTensorSpec, columnwise: str, target: Target) -> Array:
    rows, columns = spec.shape[-2:]
    table = None if group_sizes is None else row_table(group_sizes, rows, target)
    panels = spec.groups * tiles(rows) if table is None else panels_of(rows, spec.groups)
    shape = turned_shape(spec) if columnwise == TURNED else spec.payload_shape("columnwise")
    made = Output("codes", shape, PAYLOAD_DTYPE[spec.quantizer.format])
    arguments = (codes, table, made, columns, spec.groups, panels, 0 if table is not None else rows)
    how = {"BACK": columnwise != TURNED, "STACKED": table is None, "EVEN": divisible_by_16(columns)}
    return launch_kernel(turn_codes, (panels, tiles(columns)), arguments, target, **how)["codes"]


_turn.__name__ = _turn.__qualname__ = "octavo_turn"
_octavo_turn = jax.jit(_turn, static_argnames=("spec", "columnwise", "target"))
