"""fp32 to FP8 and E2M1 codes and back: round to nearest even, saturating, every NaN the same code.

Formats after octavo.formats. The FP8 casts go through torch's own conversion of clamped values: torch saturates
E4M3 and not E5M2 by itself, and gives NaN a sign.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.formats import FORMAT_MAX, Format
from octavo_torch.arrays.dtypes import PAYLOAD_DTYPE

FP8_NAN = 0x7F
E2M1_NAN = 0x7  # E2M1 has no NaN; a poisoned unit's NaN comes from its scale

FLT_MAX = 3.4028234663852886e38
ABS_BITS = 0x7FFFFFFF
INF_BITS = 0x7F800000
NAN_BITS = 0x7FC00000


def bits_of(value: Tensor) -> Tensor:
    """The int32 bit patterns of an fp32 tensor."""
    return value.view(torch.int32)


def float_from(bits: Tensor) -> Tensor:
    """The fp32 tensor with these int32 bit patterns."""
    return bits.view(torch.float32)


def canonical_nan(value: Tensor) -> Tensor:
    """`value` with every NaN replaced by 0x7FC00000, whatever the device's own NaN is."""
    return float_from(torch.where(value.isnan(), NAN_BITS, bits_of(value)))


def to_fp8(value: Tensor, fmt: Format, poisoned: Tensor) -> Tensor:
    """FP8 codes of fp32 `value`; where `poisoned` (broadcast to it) is true, the NaN code."""
    limit = FORMAT_MAX[fmt]
    codes = value.clamp(-limit, limit).to(PAYLOAD_DTYPE[fmt]).view(torch.uint8)
    return codes.masked_fill_(poisoned, FP8_NAN).view(PAYLOAD_DTYPE[fmt])


def to_fp16(value: Tensor) -> Tensor:
    """fp16 of the fp32 values that codes stand for, which are overwritten.

    A block's largest code may decode to more than fp16 holds, and then gives its largest value; NaN stays.
    """
    largest = torch.finfo(torch.float16).max
    return value.clamp_(-largest, largest).to(torch.float16)


def e2m1_grid_code(magnitude: Tensor) -> Tensor:
    """int32 codes 0 to 7 of fp32 magnitudes in [0, 6], to nearest, ties to the even code.

    Below 1 the grid is uniform; from 1 up a code is the exponent and the first mantissa bit.
    """
    bits = bits_of(magnitude)
    upper = ((bits + 0x1FFFFF + ((bits >> 22) & 1)) >> 22) - 252
    return torch.where(magnitude < 1.0, (magnitude * 2.0).round().to(torch.int32), upper)


def to_e2m1(value: Tensor, poisoned: Tensor, random: Tensor | None = None) -> Tensor:
    """E2M1 codes (uint8, low nibble) of fp32 `value`; where `poisoned` is true, the code 0x7.

    random   int32 draws in [0, 2^16), one per element: round up iff floor(2^16 (v - lo) / (hi - lo)) + draw >= 2^16;
             None rounds to nearest even
    """
    sign = (bits_of(value) >> 28) & 0x8
    magnitude = value.abs().clamp_(max=6.0)
    code = e2m1_grid_code(magnitude) if random is None else _stochastic_code(magnitude, random)
    return (code | sign).masked_fill_(poisoned, E2M1_NAN).to(torch.uint8)


def _stochastic_code(magnitude: Tensor, random: Tensor) -> Tensor:
    """Between neighbours lo and hi of the grid, lo + 1 with probability (v - lo) / (hi - lo)."""
    table = e2m1_table(magnitude.device)
    bits = bits_of(magnitude)
    low = torch.where(magnitude < 1.0, (magnitude * 2.0).to(torch.int32), (bits >> 22) - 252)
    low = low.clamp_(0, 7)  # a poisoned element's NaN is overwritten by the caller, its index must stay in bounds
    floor = table[low]
    # 2^16 / (hi - lo) is exact: steps are 0.5, 1 and 2. torch.where of numbers has torch's default dtype, which may be
    # float16, where these are infinite
    inverse_step = torch.full_like(magnitude, 32768.0).masked_fill_(low < 6, 65536.0).masked_fill_(low < 4, 131072.0)
    fraction = ((magnitude - floor) * inverse_step).nan_to_num_(0.0).to(torch.int32)
    return low + ((fraction + random) >= 65536).to(torch.int32)


def e2m1_table(device: torch.device) -> Tensor:
    """The sixteen values of E2M1 by code, fp32, built on the device: a copy from the host would wait."""
    code = torch.arange(16, dtype=torch.int32, device=device)
    magnitude = code & 0x7
    bits = torch.where(magnitude < 2, bits_of(magnitude.to(torch.float32) * 0.5), (magnitude + 252) << 22)
    return float_from(bits | ((code & 0x8) << 28))


def from_codes(codes: Tensor) -> Tensor:
    """fp32 values of FP8 codes or of E2M1 codes (uint8)."""
    if codes.dtype is torch.uint8:
        table = e2m1_table(codes.device)
    elif codes.dtype is torch.float8_e4m3fn:
        # a table: torch's own E4M3 conversion is several times slower than a gather on a CPU
        table = torch.arange(256, dtype=torch.uint8, device=codes.device).view(codes.dtype).to(torch.float32)
    else:
        return codes.to(torch.float32)
    index = codes.reshape(-1).view(torch.uint8).to(torch.int32)
    if table.numel() < 256:
        # another backend leaves any byte at all in codes past the sum
        index = index & (table.numel() - 1)
    return table.index_select(0, index).view(codes.shape)


def e8m0_to_float(exponent: Tensor) -> Tensor:
    """fp32 values of E8M0 bytes: 2^(b - 127), NaN for 0xFF. 2^-127 is subnormal in fp32, so it is built from bits."""
    wide = exponent.to(torch.int32)
    bits = torch.where(wide == 0, 0x00400000, wide << 23)
    return float_from(torch.where(wide == 0xFF, NAN_BITS, bits))
