"""One idea serves every scaling here: a matrix is cut into tiles, and a tile has one scale.

| kind | rowwise tile | columnwise tile |
|---|---|---|
| current | the whole matrix | the same codes |
| row | one row | one column |
| block | 1 x 128 | 128 x 1 |
| square (weights of block scaling) | 128 x 128 | the same codes |
"""

from __future__ import annotations

import torch
from octavo import QuantizerSpec
from octavo.formats import FORMAT_MAX, Format
from torch import Tensor
from torch.nn.functional import pad

PAYLOAD: dict[Format, torch.dtype] = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
BLOCK = 128
NAN_CODE = 0x7F
FLT_MAX = torch.finfo(torch.float32).max


def kind_of(spec: QuantizerSpec) -> str:
    """The row of the table above."""
    return "square" if spec.square else spec.scaling


def tile_shape(kind: str, direction: str, rows: int, columns: int) -> tuple[int, int]:
    """(rows, columns) of a tile in a matrix of this size."""
    row = (1, max(columns, 1))
    column = (max(rows, 1), 1)
    if kind == "current":
        return column[0], row[1]
    if kind == "row":
        return row if direction == "rowwise" else column
    if kind == "square":
        return BLOCK, BLOCK
    return (1, BLOCK) if direction == "rowwise" else (BLOCK, 1)


def one_scale_row_a_group(kind: str, direction: str) -> bool:
    """Whether scales stand at their group's index; else they stand packed, block after block."""
    return kind == "current" or (kind == "row" and direction == "columnwise")


def rows_of_tiles(scale: Tensor, kind: str, direction: str) -> Tensor:
    """A view [rows of tiles, tiles across] of decode scales in the plain layout."""
    one_across = kind == "current" or (kind == "row" and direction == "rowwise")
    return scale.view(-1, 1 if one_across else scale.shape[-1])


def quantize_matrix(
    x: Tensor, tile: tuple[int, int], fmt: Format, power_of_two: bool, amax_epsilon: float
) -> tuple[Tensor, Tensor]:
    """Codes (bytes, x's shape) and decode scales [tiles down, tiles across] of a float32 matrix."""
    rows, columns = x.shape
    high, wide = tile
    down, across = -(-rows // high), -(-columns // wide)
    padded = pad(x, (0, across * wide - columns, 0, down * high - rows)).view(down, high, across, wide)
    encode, decode = scales(padded.abs().amax(dim=(1, 3)), FORMAT_MAX[fmt], power_of_two, amax_epsilon)
    codes = cast(padded * encode[:, None, :, None], fmt).view(down * high, across * wide)
    return codes[:rows, :columns], decode


def dequantize_matrix(codes: Tensor, decode: Tensor, tile: tuple[int, int]) -> Tensor:
    """float32 values: each code times its tile's decode scale."""
    rows, columns = codes.shape
    high, wide = tile
    spread = decode.repeat_interleave(high, dim=0)[:rows].repeat_interleave(wide, dim=1)[:, :columns]
    return codes.float() * spread


def scales(amax: Tensor, largest: float, power_of_two: bool, amax_epsilon: float) -> tuple[Tensor, Tensor]:
    """(encode, decode) float32 scales, by the fp32 rule of Octavo's definition.

    A tile without a finite amax gets NaN for both: overflow is never hidden.
    """
    floored = torch.clamp(amax, min=amax_epsilon)
    # A Python number over a tensor would be `reciprocal * number` in torch: two roundings where the rule has one.
    encode = (torch.full_like(floored, largest) / floored).clamp(max=FLT_MAX)
    if power_of_two:
        encode = (encode.view(torch.int32) & 0x7F800000).view(torch.float32)
    encode = torch.where(floored == 0, 1.0, encode)
    encode = torch.where(amax.isfinite(), encode, torch.nan)
    decode = torch.where(amax.isfinite(), torch.ones_like(encode) / encode, torch.nan)
    return encode, decode


def cast(scaled: Tensor, fmt: Format) -> Tensor:
    """float8 codes as bytes: nearest even, saturating, and any NaN is the one NaN code."""
    # torch saturates a cast to E4M3 and lets E5M2 overflow, so neither is relied upon.
    largest = FORMAT_MAX[fmt]
    codes = scaled.clamp(-largest, largest).to(PAYLOAD[fmt]).view(torch.uint8)
    return torch.where(scaled.isnan(), NAN_CODE, codes)
