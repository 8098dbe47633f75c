"""What a quantizer starts: one pass for blocks; amax, scales and codes where units reach over many tiles."""

from __future__ import annotations

import math

from jax import Array

from octavo import GroupedTensorSpec, QuantizerSpec
from octavo_jax_triton.arrays.planes import plane_outputs
from octavo_jax_triton.launch.launch_kernel import launch_kernel
from octavo_jax_triton.quantizers.rows import Rows
from octavo_triton.kernels.quantizers.blocks import quantize_blocks
from octavo_triton.kernels.quantizers.nvfp4 import nvfp4_factors, quantize_nvfp4
from octavo_triton.kernels.quantizers.units import quantize_units
from octavo_triton.layouts import TURNED, pattern, share_of
from octavo_triton.quantizer_tiles import blocks_tile, codes_tile, nvfp4_tile

OPERANDS = {"x": 0, "w": 1, "dy": 2}
"""Their numbers in the counters of random bits."""


def planes_of(
    spec: GroupedTensorSpec, rows: Rows, scale: Array | None, words: Array | None, operand: int
) -> dict[str, Array]:
    """The planes of `rows` by name; `words` of a seed and the first group's number, uint32 [3]."""
    if spec.quantizer.block_size is None:
        return _units(spec, rows, scale)
    if spec.quantizer.scaling == "nvfp4":
        return _nvfp4(spec, rows, words, operand)
    return _blocks(spec, rows)


def _blocks(spec: GroupedTensorSpec, rows: Rows) -> dict[str, Array]:
    """Block scaling and MXFP8, square or not."""
    quantizer, outputs = spec.quantizer, plane_outputs(spec)
    row_scale, column_scale = outputs.get("rowwise_scale"), outputs.get("columnwise_scale")
    arguments = (
        rows.x,
        rows.table,
        outputs.get("rowwise"),
        column_scale if row_scale is None and quantizer.square else row_scale,
        outputs.get("columnwise"),
        None if quantizer.square else column_scale,
        *rows.sizes,
        pattern(quantizer.amax_epsilon),
    )
    casts = rows.target.has_fp8_casts
    tile = blocks_tile(quantizer, casts, rows.table is None)
    return launch_kernel(
        quantize_blocks, rows.grid(tile.width), arguments, rows.target, **rows.constants,
        FORMAT=quantizer.format, SCALES=quantizer.scale_format, POWER_OF_TWO=quantizer.power_of_two,
        BLOCK=quantizer.block_size, SQUARE=quantizer.square, TURNED=spec.columnwise_layout == TURNED, CAST=casts,
        RUN=tile.run, WIDTH=tile.width, BESIDE=tile.beside, **tile.options,
    )  # fmt: skip


def _nvfp4(spec: GroupedTensorSpec, rows: Rows, words: Array | None, operand: int) -> dict[str, Array]:
    """NVFP4: amax by group, of column data after their transform; then both planes in one pass."""
    quantizer, outputs = spec.quantizer, plane_outputs(spec)
    directions = [direction for direction in ("rowwise", "columnwise") if direction in outputs]
    transformed = "columnwise" if quantizer.hadamard and "columnwise" in outputs else None
    names = {direction: "transformed" if direction == transformed else "groups" for direction in directions}
    found = rows.amaxes("groups") if transformed is None else rows.transformed_amaxes(*names.values())
    amaxes = {direction: found[name] for direction, name in names.items()}
    size = max(16, 1 << (rows.groups - 1).bit_length())
    factors: dict[str, Array] = {}
    for direction, amax in amaxes.items():
        factor = outputs[f"{direction}_global"]
        factors |= launch_kernel(nvfp4_factors, (1,), (amax, factor, rows.groups), rows.target, SIZE=size)
    measured = (amaxes.get(direction) for direction in ("rowwise", "columnwise"))
    planes = (outputs.get(direction + part) for direction in ("rowwise", "columnwise") for part in ("", "_scale"))
    tile = nvfp4_tile(quantizer)
    codes = launch_kernel(
        quantize_nvfp4, rows.grid(tile.width),
        (rows.x, *measured, rows.table, words, *planes, *rows.sizes, 0, operand), rows.target, **rows.constants,
        SQUARE=quantizer.square, HADAMARD=quantizer.hadamard, STOCHASTIC=words is not None,
        CAST=rows.target.has_fp8_casts, WIDTH=tile.width, BESIDE=tile.beside, **tile.options,
    )  # fmt: skip
    return codes | factors


def _units(spec: GroupedTensorSpec, rows: Rows, scale: Array | None) -> dict[str, Array]:
    """Delayed scaling from `scale`, fp32 [G]; current and row scaling from amaxes."""
    quantizer, outputs = spec.quantizer, plane_outputs(spec)
    rule = {"FORMAT": quantizer.format, "POWER_OF_TWO": quantizer.power_of_two}
    amaxes = _amaxes_of_units(quantizer, rows) if scale is None else {}
    planes = [outputs.get(direction + part) for part in ("", "_scale") for direction in ("rowwise", "columnwise")]
    units = [0 if decode is None else math.prod(decode.shape) for decode in planes[2:]]
    arguments = (
        rows.x, scale, *(amaxes.get(name) for name in ("groups", "rows", "columns")),
        rows.table, *planes, *rows.sizes, pattern(quantizer.amax_epsilon), *units,
    )  # fmt: skip
    casts = rows.target.has_fp8_casts
    tile = codes_tile(casts)
    programs = max(1, *rows.grid())  # of no rows or columns there are scales all the same
    return launch_kernel(
        quantize_units, (programs,), arguments, rows.target, **rows.constants, **rule,
        TURNED=spec.columnwise_layout == TURNED, CAST=casts, RUN=tile.run, BESIDE=tile.beside,
        SHARE=share_of(max(units), programs), **tile.options,
    )  # fmt: skip


def _amaxes_of_units(quantizer: QuantizerSpec, rows: Rows) -> dict[str, Array]:
    if quantizer.scaling == "current":
        return rows.amaxes("groups")
    units = {"rowwise": "rows", "columnwise": "columns"}
    return rows.amaxes(*(units[direction] for direction in quantizer.directions))
