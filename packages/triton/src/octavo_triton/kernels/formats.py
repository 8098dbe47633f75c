"""Between fp32 values, codes, and dtypes of unquantized operands: the same bits on every GPU and in the interpreter.

A format is a constant "e4m3", "e5m2" or "e2m1"; codes are int32 while they are computed.
"""

from __future__ import annotations

import triton.language as tl

from octavo_triton.kernels.device import COMPILED, device_function

_STEPS = (
    "abs.f32 f, ${0}; min.f32 f, f, 0f40C00000; mov.b32 b, f; and.b32 b, b, 0x7F800000; max.s32 b, b, 0x3F800000;"
    " add.s32 m, b, 0x0B000002; mov.b32 g, m; add.rn.f32 f, f, g; mov.b32 m, f; shr.u32 b, b, 22;"
    " add.s32 c{0}, m, b; mov.b32 s{0}, ${0};"
)
# as e2m1_code; the 2 that it adds in the end is in what is added to the binade, bytes 0 of the sums have codes in their
# low bits and bytes 3 of the values have signs
_E2M1 = tl.constexpr(
    "{ .reg .b32 b, m, c<5>, s<5>; .reg .f32 f, g; "
    + " ".join(_STEPS.replace("{0}", str(place)) for place in (1, 2, 3, 4))
    + " prmt.b32 c1, c1, c2, 0x0040; prmt.b32 c3, c3, c4, 0x0040; prmt.b32 c1, c1, c3, 0x5410;"
    " prmt.b32 s1, s1, s2, 0x0073; prmt.b32 s3, s3, s4, 0x0073; prmt.b32 s1, s1, s3, 0x5410;"
    " shr.u32 s1, s1, 4; lop3.b32 c1, s1, c1, 0x08080808, 0xE4; and.b32 $0, c1, 0x0F0F0F0F; }"
)


@device_function
def bits_of(value):
    """The int32 pattern of fp32 values."""
    return value.to(tl.int32, bitcast=True)


@device_function
def float_from(bits):
    """The fp32 values of int32 patterns."""
    return bits.to(tl.float32, bitcast=True)


@device_function
def as_bits(pointer):
    """A pointer to stored bits as kernels read and write them: of bfloat16 as int16, of FP8 codes as uint8.

    A framework that cannot view an array as another dtype passes it as it is.
    """
    if pointer.dtype.element_ty == tl.bfloat16:
        return pointer.to(tl.pointer_type(tl.int16), bitcast=True)
    elif pointer.dtype.element_ty == tl.float8e4nv or pointer.dtype.element_ty == tl.float8e5:
        return pointer.to(tl.pointer_type(tl.uint8), bitcast=True)
    else:
        return pointer


@device_function
def multiple_of_16(number):
    """`number`, which is a multiple of 16, so that the compiler knows it to be one.

    Triton's launcher tells the compiler which integers 16 divides; jax-triton does not, and each element of a row would
    then be loaded and stored by itself. EVEN says it of all of a kernel's lengths and of its strides other than 1.
    """
    return number // 16 * 16


@device_function
def from_stored(stored, DTYPE: tl.constexpr):
    """fp32 of what was loaded from an array of a high-precision dtype; "bfloat16" is loaded as int16."""
    if DTYPE == "bfloat16":
        return float_from(stored.to(tl.int32) << 16)
    else:
        return stored.to(tl.float32)


@device_function
def widened(stored, DTYPE: tl.constexpr, USE: tl.constexpr):
    """`from_stored` of a tile that is used more than once, which stays in registers as it was loaded between the uses.

    A compiler that knows two uses to be the same keeps the fp32 values, in twice as many registers; `USE` tells them
    apart.
    """
    if COMPILED and DTYPE == "bfloat16":
        # the assembler, too, finds equal instructions
        SHIFT: tl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;"
        PERMUTE: tl.constexpr = "prmt.b32 $0, $2, 0, 0x1044; prmt.b32 $1, $2, 0, 0x3244;"
        return tl.inline_asm_elementwise(
            PERMUTE if USE == "columns" else SHIFT, "=r,=r,r", [stored], dtype=tl.float32, is_pure=True, pack=2
        )
    else:
        return from_stored(stored, DTYPE)


@device_function
def magnitudes(stored, DTYPE: tl.constexpr):
    """int32 patterns of |x|."""
    if COMPILED and DTYPE == "bfloat16":
        ABS: tl.constexpr = (
            "{ .reg .b32 both; and.b32 both, $2, 0x7FFF7FFF; shl.b32 $0, both, 16; and.b32 $1, both, 0xFFFF0000; }"
        )
        return tl.inline_asm_elementwise(ABS, "=r,=r,r", [stored], dtype=tl.int32, is_pure=True, pack=2)
    else:
        return bits_of(from_stored(stored, DTYPE)) & 0x7FFFFFFF


@device_function
def to_bfloat16(value):
    """int32 patterns of fp32 values rounded to the nearest bfloat16, ties to even; the low 16 bits are zero."""
    bits = bits_of(value)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, rounded)


@device_function
def rounded_to_bfloat16(value):
    """Stored bits (int16) of fp32 values as bfloat16, every NaN one of bfloat16's."""
    if COMPILED:
        ROUND: tl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
        return tl.inline_asm_elementwise(ROUND, "=r,f,f", [value], dtype=tl.int16, is_pure=True, pack=2)
    else:
        return (to_bfloat16(value) >> 16).to(tl.int16)


@device_function
def e2m1_bytes(value):
    """`e2m1_code` of fp32 values as uint8, four of which share a register from the start."""
    if COMPILED:
        return tl.inline_asm_elementwise(_E2M1, "=r,f,f,f,f", [value], dtype=tl.uint8, is_pure=True, pack=4)
    else:
        return e2m1_code(value).to(tl.uint8)


@device_function
def to_stored(value, DTYPE: tl.constexpr):
    """fp32 values rounded once, as they are stored in an array of that dtype."""
    if DTYPE == "bfloat16":
        return (to_bfloat16(value) >> 16).to(tl.int16)
    elif DTYPE == "float16":
        return value.to(tl.float16)
    else:
        return value


@device_function
def cast(value, FORMAT: tl.constexpr):
    """FP8 codes (uint8) of fp32 values by the instruction that sm_89 and later chips have: the same bits as to_code."""
    E4M3: tl.constexpr = (
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;"
        " mov.b32 $0, {low, high}; }"
    )
    E5M2: tl.constexpr = (
        "{ .reg .b16 low, high; cvt.rn.satfinite.e5m2x2.f32 low, $2, $1; cvt.rn.satfinite.e5m2x2.f32 high, $4, $3;"
        " mov.b32 $0, {low, high}; }"
    )
    return tl.inline_asm_elementwise(
        E4M3 if FORMAT == "e4m3" else E5M2, "=r,f,f,f,f", [value], dtype=tl.uint8, is_pure=True, pack=4
    )


@device_function
def fp8_codes(value, FORMAT: tl.constexpr, CAST: tl.constexpr):
    """FP8 codes (uint8) of fp32 values; CAST: by the chip's instruction."""
    if CAST:
        return cast(value, FORMAT)
    else:
        return to_code(value, FORMAT).to(tl.uint8)


@device_function
def e2m1_code(value):
    """E2M1 codes of fp32 values: to nearest, ties to even, saturating; a NaN is 0x7 with its sign."""
    magnitude = tl.minimum(tl.abs(value), 6.0)
    # 2^k of the binade, k = 0 below 1, too; the last place of 2^(k + 22) is a step of the format there, so that fp32
    # addition rounds and leaves the number of steps, the code less 2 k, in the low bits
    binade = tl.maximum(bits_of(magnitude) & 0x7F800000, 0x3F800000)
    steps = bits_of(magnitude + float_from(binade + (22 << 23)))
    return ((steps + (binade >> 22) + 2) & 0x7) | ((bits_of(value) >> 28) & 0x8)


@device_function
def to_code(value, FORMAT: tl.constexpr):
    """Codes of fp32 values: to nearest, ties to even, saturating; every NaN is the code 0x7F, of E2M1 0x7."""
    if FORMAT == "e2m1":
        return tl.where((bits_of(value) & 0x7FFFFFFF) > 0x7F800000, 0x7, e2m1_code(value))
    # mantissa bits that are cut off; the exponent's bias, shifted; the number whose last place is the least subnormal;
    # the least normal number and the largest code
    IS_E4M3: tl.constexpr = FORMAT == "e4m3"
    SHIFT: tl.constexpr = 20 if IS_E4M3 else 21
    BIAS: tl.constexpr = 120 << 3 if IS_E4M3 else 112 << 2
    UNIT: tl.constexpr = 0x46800000 if IS_E4M3 else 0x43000000
    LEAST: tl.constexpr = 0x3C800000 if IS_E4M3 else 0x38800000
    LARGEST: tl.constexpr = 0x7E if IS_E4M3 else 0x7B
    bits = bits_of(value)
    magnitude = bits & 0x7FFFFFFF
    finite = tl.minimum(magnitude, 0x7F800000)
    normal = ((finite + ((1 << (SHIFT - 1)) - 1) + ((finite >> SHIFT) & 1)) >> SHIFT) - BIAS
    # the sum's last place is the format's least subnormal, so fp32 addition rounds there
    subnormal = bits_of(float_from(finite) + float_from(tl.full([], UNIT, tl.int32))) - UNIT
    code = tl.minimum(tl.where(finite < LEAST, subnormal, normal), LARGEST)
    return tl.where(magnitude > 0x7F800000, 0x7F, code | ((bits >> 24) & 0x80))


@device_function
def from_code(code, FORMAT: tl.constexpr):
    """fp32 values of int32 codes."""
    # a code's bits are those of an fp32 number with another bias; signs are set as bits, for Triton's minus is 0 - x
    if FORMAT == "e4m3":
        magnitude = code & 0x7F
        value = float_from(magnitude << 20) * 1.329227995784916e36
        bits = tl.where(magnitude == 0x7F, 0x7FC00000, bits_of(value))
        return float_from(bits | ((code & 0x80) << 24))
    elif FORMAT == "e5m2":
        magnitude = code & 0x7F
        value = float_from(magnitude << 21) * 5.192296858534828e33
        bits = tl.where(magnitude > 0x7C, 0x7FC00000, tl.where(magnitude == 0x7C, 0x7F800000, bits_of(value)))
        return float_from(bits | ((code & 0x80) << 24))
    else:
        value = float_from((code & 0x7) << 22) * 8.507059173023462e37
        return float_from(bits_of(value) | ((code & 0x8) << 28))


@device_function
def half_from_code(code, FORMAT: tl.constexpr):
    """fp16 values of FP8 codes (uint8), exactly: fp16 has every value of E4M3 and of E5M2."""
    wide = code.to(tl.int16)
    if FORMAT == "e4m3":
        magnitude = wide & 0x7F
        value = ((magnitude << 7) | ((wide & 0x80) << 8)).to(tl.float16, bitcast=True) * 256.0
        return tl.where(magnitude == 0x7F, float("nan"), value).to(tl.float16)
    else:
        return (wide << 8).to(tl.float16, bitcast=True)


@device_function
def from_e8m0(byte):
    """fp32 values of E8M0 bytes (int32): 2^(b - 127), whose least is subnormal, and NaN for 0xFF."""
    power = float_from(tl.where(byte == 0, 0x00400000, byte << 23))
    return tl.where(byte == 0xFF, float("nan"), power)


@device_function
def from_scale(stored, SCALES: tl.constexpr):
    """fp32 of stored decode scales: "fp32", or bytes of "e8m0" or "e4m3"."""
    if SCALES == "fp32":
        return stored
    elif SCALES == "e8m0":
        return from_e8m0(stored.to(tl.int32))
    else:
        return from_code(stored.to(tl.int32), "e4m3")
