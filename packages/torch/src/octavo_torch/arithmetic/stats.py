"""What a quantizer does to an operand, counted on its device: octavo_numerics.tensor_stats, without a sync."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo import QuantizerSpec
from octavo.formats import PAST_LARGEST
from octavo.health import COLUMN_WINDOWS, WINDOW
from octavo.quantizer import HADAMARD_SIZE, Direction
from octavo_torch.arithmetic.casts import ABS_BITS, bits_of
from octavo_torch.arithmetic.dequantize import plane_values
from octavo_torch.arithmetic.groups import RowGroups, segment_amax
from octavo_torch.arithmetic.hadamard import hadamard_rows
from octavo_torch.arithmetic.mxfp4 import rounded_rows
from octavo_torch.arithmetic.quantize import Noise, padded_rows, quantize_plane


class Sample(NamedTuple):
    """Some rows of each group, as groups of equally many, and some of their columns.

    rows     fp32 [G * R, C], zero where a group has no further row
    groups   G groups of R rows
    real     bool [G * R]: false for those zeros
    """

    rows: Tensor
    groups: RowGroups
    real: Tensor


def operand_stats(
    x: Tensor,
    sizes: Tensor | None,
    spec: QuantizerSpec | None,
    direction: Direction,
    noise: Noise | None,
    scale: Tensor | None,
    rows: int,
) -> Tensor:
    """float64 [8, G]: FIELDS of each group of `x`, [M, K] with bounded int64 `sizes` [G], or [G, N, K] with None.

    spec    None: an operand that stays in high precision, of which amax, elements and non_finite alone are counted
    rows    of each group: a multiple of WINDOW, of evenly spaced windows; 0: all. Of a sample's rows COLUMN_WINDOWS
            windows of columns count. The amax is of all rows and columns in any case. Scales of whole columns, and
            Hadamard data, need all rows, and scales of whole rows need all columns
    """
    rows_of = x.shape[0]
    groups = RowGroups.stacked(rows_of, x.shape[1], x.device) if sizes is None else RowGroups(sizes, rows_of)
    transformed = spec is not None and spec.hadamard and direction == "columnwise"
    spans_columns = spec is not None and spec.scaling == "row" and direction == "columnwise"
    known = None if transformed else amax_bits(x, groups)
    flat = x.reshape(groups.rows, x.shape[-1])
    if rows and not (transformed or spans_columns):
        sample = sampled(flat, groups, rows, every_column=spec is not None and spec.scaling == "row")
    else:
        values = torch.where(groups.valid[:, None], flat.to(torch.float32), 0.0)
        sample = Sample(values, groups, groups.valid)
    if transformed:
        padded = groups.padded(HADAMARD_SIZE)
        sample = Sample(hadamard_rows(padded_rows(sample.rows, groups)), padded, padded.valid)
        known = None
    source, groups, real = sample
    if known is None:
        known = amax_bits(source, groups)
    finite = source.isfinite() & real[:, None]
    elements = _summed(real.to(torch.float64) * source.shape[1], groups)
    amax = known.view(torch.float32).to(torch.float64)
    if spec is None:
        zero = torch.zeros_like(elements)
        return torch.stack((elements, amax, _counted(~finite & real[:, None], groups), zero, zero, zero, zero, zero))
    wanted = None if spec.mxfp4 is None else rounded_rows(source, groups, spec.mxfp4)
    plane = quantize_plane(source if wanted is None else wanted, groups, spec, direction, noise, scale, known)
    decoded = plane_values(plane.codes, plane.scale, plane.factor, groups, spec, direction)
    readable = decoded.isfinite()
    comparable = finite & readable
    saturated = finite & (plane.scaled.abs() > PAST_LARGEST[spec.format])
    if spec.scaling != "delayed":
        saturated &= readable  # scales of a unit that is not finite are NaN, and nothing is cut
    underflow = comparable & (source != 0) & (decoded == 0)
    wide = torch.where(comparable, source, 0.0).to(torch.float64)
    error = torch.where(comparable, decoded, 0.0).to(torch.float64) - wide
    counts = (_counted(mask, groups) for mask in (~readable & real[:, None], saturated, underflow))
    squares = (_summed(values.square().sum(1), groups) for values in (wide, error))
    inexact = torch.zeros_like(elements) if wanted is None else _counted(comparable & (decoded != wanted), groups)
    return torch.stack((elements, amax, *counts, *squares, inexact))


def amax_bits(x: Tensor, groups: RowGroups) -> Tensor:
    """int32 [G] bit patterns of max |x| of each group's rows, from one pass over `x` as it is; rows past the sum have
    no part in it."""
    count = groups.count
    if not x.numel():
        return torch.zeros(count, dtype=torch.int32, device=x.device)
    if x.dim() == 3:
        amax = torch.linalg.vector_norm(x, torch.inf, (1, 2))
        return bits_of(amax.to(torch.float32)) & ABS_BITS
    amax = torch.linalg.vector_norm(x, torch.inf, 1)
    return segment_amax(bits_of(amax.to(torch.float32))[:, None] & ABS_BITS, groups, None)[:, 0]


def sampled(x: Tensor, groups: RowGroups, rows: int, *, every_column: bool) -> Sample:
    """`rows` rows of each group and COLUMN_WINDOWS windows of columns, both spread evenly over it."""
    windows = max(min(rows, x.shape[0] + WINDOW - 1) // WINDOW, 1)
    number = (groups.sizes + (WINDOW - 1)) // WINDOW
    turn = torch.arange(windows, device=x.device)
    # a group of fewer windows gives each of them once
    window = torch.where(number[:, None] > windows, turn * number[:, None] // windows, turn)
    place = window[:, :, None] * WINDOW + torch.arange(WINDOW, device=x.device)
    real = (place < groups.sizes[:, None, None]).reshape(-1)
    index = (groups.starts[:, None, None] + place).reshape(-1).clamp_(max=max(groups.rows - 1, 0))
    stacked = RowGroups.stacked(groups.count, windows * WINDOW, x.device)
    if not groups.rows:
        return Sample(torch.zeros(stacked.rows, x.shape[1], device=x.device), stacked, real)
    across = -(-x.shape[1] // WINDOW)
    if every_column or across <= COLUMN_WINDOWS:
        values = x.index_select(0, index).to(torch.float32)
    else:  # the last window, which may be narrower, is never one of these
        first = torch.arange(COLUMN_WINDOWS, device=x.device) * across // COLUMN_WINDOWS
        columns = first[:, None] * WINDOW + torch.arange(WINDOW, device=x.device)
        values = x[index[:, None], columns.reshape(1, -1)].to(torch.float32)
    return Sample(torch.where(real[:, None], values, 0.0), stacked, real)


def _counted(mask: Tensor, groups: RowGroups) -> Tensor:
    return _summed(mask.sum(1).to(torch.float64), groups)


def _summed(of_rows: Tensor, groups: RowGroups) -> Tensor:
    """[rows] float64 to the sums of each group, [G]."""
    if groups.uniform is not None:
        return of_rows.view(groups.count, groups.uniform).sum(1)
    # in a fixed order, where an indexed addition would race; unsafe: lengths are not read on the host
    sums: Tensor = torch.segment_reduce(of_rows, "sum", lengths=groups.sizes, axis=0, unsafe=True)
    return sums
