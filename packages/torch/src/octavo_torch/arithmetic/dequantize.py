"""Dequantize one plane: every scaling, both directions, ragged or stacked."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo import QuantizerSpec
from octavo.quantizer import HADAMARD_SIZE, Direction
from octavo_torch.arithmetic.casts import canonical_nan, e8m0_to_float, from_codes
from octavo_torch.arithmetic.groups import RowGroups
from octavo_torch.arithmetic.units import Spread, group_of_units, units_of
from octavo_torch.arrays.grouped_tensor import GroupedTensor


def dequantize_reference(q: GroupedTensor, direction: Direction) -> Tensor:
    """fp32 values of one plane: logical shape, or the padded Hadamard-domain rows of Hadamard column data.

    Rows past the sum are +0 and their codes and scales are not used; NaN is 0x7FC00000.
    """
    codes, scale, factor = q.plane(direction)
    layout, spec = q.spec, q.spec.quantizer
    columns = layout.shape[-1]
    if q.group_sizes is None:
        groups = RowGroups.stacked(layout.groups, layout.shape[1], codes.device)
    else:
        groups = RowGroups(q.group_sizes, layout.shape[0])
    if direction == "columnwise" and spec.hadamard:
        groups = groups.padded(HADAMARD_SIZE)
    result = plane_values(codes.reshape(groups.rows, columns), scale, factor, groups, spec, direction)
    if q.group_sizes is not None:
        result = result.masked_fill_(~groups.valid[:, None], 0.0)
    return result.view(layout.payload_shape(direction))


def plane_values(
    codes: Tensor,
    scale: Tensor,
    factor: Tensor | None,
    groups: RowGroups,
    spec: QuantizerSpec,
    direction: Direction,
) -> Tensor:
    """fp32 values of codes [rows, K] and of decode scales in any shape; what rows past the sum have means nothing."""
    columns = codes.shape[1]
    if not columns:
        return torch.zeros_like(codes, dtype=torch.float32)
    units = units_of(spec, direction)
    widths = columns if units.columns == "each" else 1 if units.columns == "all" else -(-columns // units.columns)
    decode = _decoded(scale)
    decode = decode.reshape(decode.numel() // max(widths, 1), widths)
    if factor is not None:
        decode = decode * factor.index_select(0, group_of_units(units, groups, decode.shape[0]))[:, None]
    return canonical_nan(from_codes(codes) * Spread(units, groups, columns)(decode))


def _decoded(scale: Tensor) -> Tensor:
    """Stored decode scales as fp32."""
    if scale.dtype is torch.uint8:
        return e8m0_to_float(scale)
    return scale if scale.dtype is torch.float32 else from_codes(scale)
