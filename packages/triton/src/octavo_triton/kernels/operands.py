"""Tiles of a GEMM's operands, whichever way they are scaled, and the product of two of them.

SCALING   "none", "group", "row", "block", "mxfp8", "nvfp4"
PRODUCT   what the tensor cores multiply
          "bfloat16", "float16", "float32"   values as they are; of MXFP8 and NVFP4 data exact dequantized copies;
                                             of other codes (fp32 alone) their values
          "half"                             FP8 codes as fp16, which has all their values
          "fp8"                              FP8 codes, sums promoted to fp32 after every tile
          "scaled"                           codes and block scales, tl.dot_scaled
"""

from __future__ import annotations

import triton.language as tl

from octavo_triton.kernels.device import COMPILED, device_function
from octavo_triton.kernels.formats import (
    from_code,
    from_scale,
    from_stored,
    half_from_code,
    to_bfloat16,
    to_stored,
)

LARGEST = tl.constexpr(3.4028234663852886e38)


@device_function
def scale_at(
    group, row, local, column, first, columns,
    SCALING: tl.constexpr, BLOCK: tl.constexpr, SQUARE: tl.constexpr, COLUMNWISE: tl.constexpr,
):  # fmt: skip
    """Where the plain layout has the decode scale of an element: `row` of all, `local` of its group, `column`.

    first   packed index of the group's first block of rows
    """
    if SCALING == "group":
        return group
    elif SCALING == "row":
        return group * columns + column if COLUMNWISE else row
    elif SQUARE:
        return (first + local // BLOCK) * ((columns + BLOCK - 1) // BLOCK) + column // BLOCK
    elif COLUMNWISE:
        return (first + local // BLOCK) * columns + column
    else:
        return row * ((columns + BLOCK - 1) // BLOCK) + column // BLOCK


@device_function
def unquantized(stored, DTYPE: tl.constexpr, PRODUCT: tl.constexpr):
    """A tile of an unquantized operand as PRODUCT multiplies it; rows that were masked are zero."""
    if PRODUCT == "bfloat16":
        return stored.to(tl.bfloat16, bitcast=True)
    elif PRODUCT == "float16":
        return stored
    else:
        return from_stored(stored, DTYPE)


@device_function
def dequantized(codes, scales, FORMAT: tl.constexpr, SCALES: tl.constexpr, PRODUCT: tl.constexpr):
    """A tile of MXFP8 or NVFP4 data: each code times its block's scale, without NVFP4's second level.

    Exact in bfloat16: E4M3 times a power of two has 4 significant bits, E2M1 times E4M3 has 6.
    """
    value = from_code(codes.to(tl.int32), FORMAT) * from_scale(scales, SCALES)
    if PRODUCT == "bfloat16":
        # from bits, because a cast of NaN is not the same everywhere
        return (to_bfloat16(value) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return value


@device_function
def coded(codes, FORMAT: tl.constexpr, PRODUCT: tl.constexpr):
    """A tile of FP8 codes as PRODUCT multiplies it."""
    if PRODUCT == "float32":
        return from_code(codes.to(tl.int32), FORMAT)
    elif PRODUCT == "half":
        return half_from_code(codes, FORMAT)
    elif codes.dtype != tl.uint8:
        return codes
    elif FORMAT == "e4m3":
        return codes.to(tl.float8e4nv, bitcast=True)
    else:
        return codes.to(tl.float8e5, bitcast=True)


@device_function
def added(total, a, b, PRODUCT: tl.constexpr, DEPTH: tl.constexpr):
    """total + a b in fp32."""
    if PRODUCT == "fp8":
        # Hopper's FP8 sums keep 14 bits: not one of them goes on past the tile
        return total + tl.dot(a, b, max_num_imprecise_acc=DEPTH, out_dtype=tl.float32)
    elif PRODUCT == "float32":
        # TF32 would round the operands
        return tl.dot(a, b, total, input_precision="ieee", out_dtype=tl.float32)
    else:
        return tl.dot(a, b, total, out_dtype=tl.float32)


@device_function
def multiplied(a, b):
    """a b of FP8 codes, 128 deep: Hopper's FP8 sums keep 14 bits, so none goes on past the tile."""
    return tl.dot(a, b, out_dtype=tl.float32)


@device_function
def as_stored(total, DTYPE: tl.constexpr):
    """Sums rounded once to the dtype of a result, whose bfloat16 is stored as int16."""
    if COMPILED and DTYPE == "bfloat16":
        return total.to(tl.bfloat16).to(tl.int16, bitcast=True)
    else:
        return to_stored(total, DTYPE)


@device_function
def added_scaled(total, a, b, a_scale, b_scale, PRODUCT: tl.constexpr, DEPTH: tl.constexpr):
    """total + (a b) times the scales of a's rows and of b's columns."""
    product = added(tl.full(total.shape, 0.0, tl.float32), a, b, PRODUCT, DEPTH)
    return total + times_scales(product, a_scale, b_scale)


@device_function
def times_scales(product, a_scale, b_scale):
    """A product of codes times two decode scales, together: one alone may leave the range in which it is exact."""
    # the scales' own product may overflow where the sum is zero, and zero times infinity is NaN; that of a poisoned
    # unit is in its codes
    return product * tl.minimum(a_scale * b_scale, LARGEST)


@device_function
def packed(codes):
    """E2M1 codes [R, C] (uint8, one per byte) as [R, C / 2], the first of two in the low half."""
    pairs = tl.reshape(codes, (codes.shape[0], codes.shape[1] // 2, 2))
    low, high = tl.split(pairs)
    return (low & 0xF) | ((high & 0xF) << 4)


@device_function
def multiplied_in_blocks(total, a, a_scale, b, b_scale, A_FORMAT: tl.constexpr, B_FORMAT: tl.constexpr):
    """total + a b^T of codes a [R, C] and b [S, C] with scales along C, in the tensor cores' own block scaling."""
    if A_FORMAT == "e2m1":
        scale_a = a_scale.to(tl.float8e4nv, bitcast=True)
        scale_b = b_scale.to(tl.float8e4nv, bitcast=True)
        return tl.dot_scaled(packed(a), scale_a, "e2m1", tl.trans(packed(b)), scale_b, "e2m1", total)
    else:
        left = coded(a, A_FORMAT, "fp8")
        right = tl.trans(coded(b, B_FORMAT, "fp8"))
        return tl.dot_scaled(left, a_scale, A_FORMAT, right, b_scale, B_FORMAT, total)
