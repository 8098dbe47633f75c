"""The custom operators `quantize` and `dequantize`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo_torch.plugin_api import DTYPE_NAMES, plain_layout
from octavo_torch_triton.arrays.launch import start, stored
from octavo_torch_triton.arrays.row_index import define
from octavo_torch_triton.quantizers import launches
from octavo_torch_triton.quantizers.planes import layout_for, outputs_of
from octavo_triton.kernels.dequantize import dequantize_plane, turn_codes
from octavo_triton.layouts import TURNED, kernels_scaling, output_names, panels_of, tiles, turned_shape

_OPERANDS = {"x": 0, "w": 1, "dy": 2}
"""Their numbers in the counters of random bits."""


def _quantize(x: Tensor, table: Tensor | None, groups: int, quantizer: str, *rest: Any) -> list[Tensor]:
    seed, operand, group_offset, scale, columnwise = rest
    layout = layout_for(quantizer, x, groups, columnwise)
    spec = layout.quantizer
    outputs = [torch.empty(shape, dtype=dtype, device=x.device) for shape, dtype in outputs_of(layout)]
    planes = dict(zip(output_names(layout), map(stored, outputs), strict=True))
    rows = launches.Rows.of(x, table, groups)
    if spec.block_size is None:
        launches.units(spec, rows, planes, scale, layout.columnwise_layout == TURNED)
    elif spec.scaling == "nvfp4":
        key = seed if spec.stochastic else None
        launches.nvfp4(spec, rows, planes, key, _OPERANDS[operand], group_offset)
    else:
        launches.blocks(spec, rows, planes, layout.columnwise_layout == TURNED)
    return outputs


def _quantize_fake(x: Tensor, table: Tensor | None, groups: int, quantizer: str, *rest: Any) -> list[Tensor]:
    return [x.new_empty(shape, dtype=dtype) for shape, dtype in outputs_of(layout_for(quantizer, x, groups, rest[-1]))]


quantize = define(
    "quantize(Tensor x, Tensor? table, int groups, str quantizer, Tensor? seed, str operand, SymInt group_offset,"
    " Tensor? scale, str columnwise) -> Tensor[]",
    _quantize,
    _quantize_fake,
)
"""The planes of `x`, in the order of planes.output_names.

`quantizer` is a QuantizerSpec as JSON, `columnwise` the layout of column codes.
"""


def _dequantize(
    codes: Tensor,
    scale: Tensor,
    factor: Tensor | None,
    table: Tensor | None,
    quantizer: str,
    shape: list[int],
    groups: int,
    how: list[str],
) -> Tensor:
    direction, dtype = how
    layout = plain_layout(quantizer, tuple(shape), groups)
    spec = layout.quantizer
    out = torch.empty(shape, dtype=getattr(torch, dtype), device=codes.device)
    rows, columns = out.numel() // max(shape[-1], 1), shape[-1]
    matrix_rows = shape[1] if table is None else 0
    panels = groups * tiles(matrix_rows) if table is None else panels_of(rows, groups)
    factor = None if factor is None else factor.contiguous()
    planes = stored(codes.contiguous()), stored(scale.contiguous()), factor
    start(
        dequantize_plane, (panels, tiles(columns)), codes,
        (*planes, table, stored(out), rows, columns, groups, panels, matrix_rows),
        FORMAT=spec.format, SCALING=kernels_scaling(spec), SCALES=spec.scale_format,
        BLOCK=spec.block_size or 128, SQUARE=spec.square, COLUMNWISE=direction == "columnwise",
        STACKED=table is None, OUT_DTYPE=DTYPE_NAMES[out.dtype],
    )  # fmt: skip
    return out


def _dequantize_fake(codes: Tensor, scale: Tensor, factor: Any, table: Any, *rest: Any) -> Tensor:
    _, shape, _, how = rest
    return codes.new_empty(shape, dtype=getattr(torch, how[1]))


dequantize = define(
    "dequantize(Tensor codes, Tensor scale, Tensor? factor, Tensor? table, str quantizer, SymInt[] shape, int groups,"
    " str[] how) -> Tensor",
    _dequantize,
    _dequantize_fake,
)
"""Values of one plane, `shape`; `how` is its direction and the name of their dtype."""


def _turn(codes: Tensor, table: Tensor | None, quantizer: str, shape: list[int], groups: int, into: str) -> Tensor:
    out = _turn_fake(codes, table, quantizer, shape, groups, into)
    rows, columns = shape[-2:]
    panels = groups * tiles(rows) if table is None else panels_of(rows, groups)
    arguments = (
        stored(codes.contiguous()), table, stored(out),
        columns, groups, panels, 0 if table is not None else rows,
    )  # fmt: skip
    start(turn_codes, (panels, tiles(columns)), codes, arguments, BACK=into != TURNED, STACKED=table is None)
    return out


def _turn_fake(
    codes: Tensor, _table: Tensor | None, quantizer: str, shape: list[int], groups: int, into: str
) -> Tensor:
    layout = plain_layout(quantizer, tuple(int(size) for size in shape), groups)
    return codes.new_empty(turned_shape(layout) if into == TURNED else layout.payload_shape("columnwise"))


turn = define(
    "turn(Tensor codes, Tensor? table, str quantizer, SymInt[] shape, int groups, str into) -> Tensor",
    _turn,
    _turn_fake,
)
"""Column codes in the layout `into`; `shape` is the operand's."""
