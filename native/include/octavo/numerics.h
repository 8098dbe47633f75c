// docs/numerics in code: casts, scales, Philox, stochastic rounding. One source for the host and for the device.
//
// Every operation is one IEEE binary32 operation: compile with -ffp-contract=off, nvcc with -fmad=false, never with
// fast-math, and run with subnormals kept. An amax is held as the bits of |x| in fp32, so that an integer maximum
// orders it and NaN wins.
#pragma once

#include <cstring>

#include "octavo/types.h"

#if defined(__CUDA_ARCH__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace octavo {

constexpr uint32_t ABS_BITS = 0x7FFFFFFFu;
constexpr uint32_t INF_BITS = 0x7F800000u;
constexpr uint32_t NAN_BITS = 0x7FC00000u;  // the NaN of every stored scale and of every dequantized value
constexpr float FLOAT_MAX = 3.402823466e+38f;

OCTAVO_HD float float_of(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
#endif
}

OCTAVO_HD uint32_t bits_of(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
#endif
}

OCTAVO_HD uint32_t abs_bits(float value) { return bits_of(value) & ABS_BITS; }
OCTAVO_HD bool not_finite(uint32_t amax_bits) { return amax_bits >= INF_BITS; }
OCTAVO_HD float smaller(float a, float b) { return a < b ? a : b; }  // b where a is NaN

OCTAVO_HD float format_max(Format format) {
  return format == Format::e4m3 ? 448.0f : format == Format::e5m2 ? 57344.0f : 6.0f;
}

// ---- bf16 and fp16, as their bits

OCTAVO_HD float float_of_bf16(uint16_t bits) { return float_of(static_cast<uint32_t>(bits) << 16); }

// Nearest even, subnormals kept; every NaN becomes 0x7FC0.
OCTAVO_HD uint16_t bf16_of(float value) {
  const uint32_t bits = bits_of(value);
  if ((bits & ABS_BITS) > INF_BITS) return 0x7FC0;
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

OCTAVO_HD float float_of_f16(uint16_t bits) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(bits));
#else
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16, rest = bits & 0x7FFFu;
  if (rest >= 0x7C00u) return float_of(sign | INF_BITS | ((rest & 0x3FFu) << 13));
  // 2^112 moves the exponent from fp16's bias to fp32's and makes subnormals normal, exactly.
  return float_of(sign | bits_of(float_of(rest << 13) * float_of(0x77800000u)));
#endif
}

// Nearest even, subnormals kept; past the largest value Inf; every NaN becomes 0x7E00.
OCTAVO_HD uint16_t f16_of(float value) {
#if defined(__CUDA_ARCH__)
  return value != value ? 0x7E00 : __half_as_ushort(__float2half_rn(value));
#else
  const uint32_t bits = bits_of(value), sign = (bits >> 16) & 0x8000u, rest = bits & ABS_BITS;
  if (rest > INF_BITS) return 0x7E00;
  if (rest >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);  // from 65520 on
  if (rest < 0x38800000u) {                                               // below 2^-14: a multiple of 2^-24
    const float shifted = float_of(rest) + float_of(0x3F000000u);         // 0.5, whose ulp is 2^-24
    return static_cast<uint16_t>(sign | (bits_of(shifted) - 0x3F000000u));
  }
  return static_cast<uint16_t>(sign | ((rest - 0x38000000u + 0xFFFu + ((rest >> 13) & 1u)) >> 13));
#endif
}

// ---- casts to codes: nearest even, saturating, -0 kept, NaN to 0x7F (E2M1: 0x7)

// An 8-bit format with `mantissa` bits, smallest exponent 1 - bias, and largest finite code `top`.
template <int mantissa, int bias, uint32_t top>
OCTAVO_HD uint8_t fp8_code(float value) {
  const uint32_t bits = bits_of(value), sign = (bits >> 24) & 0x80u, rest = bits & ABS_BITS;
  constexpr uint32_t smallest_normal = static_cast<uint32_t>(128 - bias) << 23;
  constexpr int shift = 23 - mantissa;
  // Below the normal range: adding a power of two whose ulp is the format's smallest step rounds to it.
  constexpr uint32_t magic = static_cast<uint32_t>(128 - bias - mantissa + 23) << 23;
  const uint32_t small = bits_of(float_of(rest < smallest_normal ? rest : 0u) + float_of(magic)) - magic;
  const uint32_t rounded = (rest + ((1u << (shift - 1)) - 1u) + ((rest >> shift) & 1u)) >> shift;
  const uint32_t normal = rounded - (static_cast<uint32_t>(127 - bias) << mantissa);
  uint32_t code = rest < smallest_normal ? small : normal;
  code = code > top ? top : code;
  return rest > INF_BITS ? 0x7F : static_cast<uint8_t>(sign | code);
}

OCTAVO_HD uint8_t e4m3_code(float value) { return fp8_code<3, 7, 0x7E>(value); }
OCTAVO_HD uint8_t e5m2_code(float value) { return fp8_code<2, 15, 0x7B>(value); }

// Code of |value| on E2M1's grid: the step of its binade doubles from 0.5 below 2. `magnitude` is at most 6.
OCTAVO_HD uint32_t e2m1_magnitude(float magnitude) {
  const uint32_t bits = bits_of(magnitude) & INF_BITS;
  const uint32_t binade = bits > 0x3F800000u ? bits : 0x3F800000u;  // 1, 2 or 4
  const uint32_t magic = binade + (22u << 23);                      // its ulp is the step, binade / 2
  return bits_of(magnitude + float_of(magic)) - magic + ((binade - 0x3F800000u) >> 22);
}

OCTAVO_HD uint8_t e2m1_code(float value) {
  const uint32_t bits = bits_of(value), rest = bits & ABS_BITS;
  const float magnitude = rest < 0x40C00000u ? float_of(rest) : 6.0f;
  return rest > INF_BITS ? 0x7 : static_cast<uint8_t>(((bits >> 28) & 8u) | e2m1_magnitude(magnitude));
}

// Stochastic rounding: up in magnitude where floor(2^16 (v - lo) / (hi - lo)) + draw >= 2^16. `draw` has 16 bits.
OCTAVO_HD uint8_t e2m1_code_stochastic(float value, uint32_t draw) {
  const uint32_t bits = bits_of(value), rest = bits & ABS_BITS;
  const float magnitude = rest < 0x40C00000u ? float_of(rest) : 6.0f;
  const uint32_t exponent = bits_of(magnitude) & INF_BITS;
  const uint32_t binade = exponent > 0x3F800000u ? exponent : 0x3F800000u;
  // 2^16 / step = 2^17 / binade: an exact power of two
  const float scaled = magnitude * float_of((static_cast<uint32_t>(254 + 17) << 23) - binade);
  const uint32_t steps = (static_cast<uint32_t>(scaled) + draw) >> 16;
  const uint32_t code = steps + ((binade - 0x3F800000u) >> 22);
  return rest > INF_BITS ? 0x7 : static_cast<uint8_t>(((bits >> 28) & 8u) | code);
}

OCTAVO_HD uint8_t code_of(Format format, float value) {
  return format == Format::e4m3 ? e4m3_code(value) : format == Format::e5m2 ? e5m2_code(value) : e2m1_code(value);
}

OCTAVO_HD uint8_t nan_code(Format format) { return format == Format::e2m1 ? 0x7 : 0x7F; }

// ---- codes back to values

template <int mantissa, int bias>
OCTAVO_HD float fp8_value(uint8_t code) {
  const uint32_t rest = code & 0x7Fu, sign = static_cast<uint32_t>(code & 0x80u) << 24;
  // the code's bits as an fp32 of a wrong bias, moved to the right one by an exact product
  const float magnitude = float_of(rest << (23 - mantissa)) * float_of(static_cast<uint32_t>(254 - bias) << 23);
  return float_of(sign | bits_of(magnitude));
}

OCTAVO_HD float e4m3_value(uint8_t code) {
  return (code & 0x7Fu) == 0x7Fu ? float_of(NAN_BITS) : fp8_value<3, 7>(code);
}

OCTAVO_HD float e5m2_value(uint8_t code) {
  const uint32_t rest = code & 0x7Fu;
  if (rest >= 0x7Cu)
    return rest == 0x7Cu ? float_of(static_cast<uint32_t>(code & 0x80u) << 24 | INF_BITS) : float_of(NAN_BITS);
  return fp8_value<2, 15>(code);
}

OCTAVO_HD float e2m1_value(uint8_t code) {
  const uint32_t rest = code & 7u;
  const float magnitude = rest < 2u ? 0.5f * static_cast<float>(rest) : float_of(((rest + 252u) << 22));
  return float_of(static_cast<uint32_t>(code & 8u) << 28 | bits_of(magnitude));
}

OCTAVO_HD float value_of(Format format, uint8_t code) {
  return format == Format::e4m3 ? e4m3_value(code) : format == Format::e5m2 ? e5m2_value(code) : e2m1_value(code);
}

OCTAVO_HD float e8m0_value(uint8_t byte) {
  return float_of(byte == 0xFF ? NAN_BITS : byte == 0 ? 0x00400000u : static_cast<uint32_t>(byte) << 23);
}

// Every NaN as 0x7FC00000, whatever the device's own.
OCTAVO_HD float canonical(float value) { return value != value ? float_of(NAN_BITS) : value; }

// ---- scales from amax

// Encode scale of a delayed, current, row or block unit: fl(max / a), a = max(amax, epsilon).
OCTAVO_HD float fp32_scale(uint32_t amax_bits, float format_max, float epsilon, bool power_of_two) {
  const float amax = float_of(amax_bits), floor = amax > epsilon ? amax : epsilon;
  float encode = smaller(format_max / floor, FLOAT_MAX);
  if (power_of_two) encode = float_of(bits_of(encode) & 0xFF800000u);
  if (floor == 0.0f) encode = 1.0f;
  return not_finite(amax_bits) ? float_of(NAN_BITS) : encode;
}

// The same with `power_of_two` without a division: both formats' largest value is 1.75 times a power of two, so the
// exponent of fl(max / a) follows from a's exponent and from whether its mantissa is past 1.75.
OCTAVO_HD float fp32_scale_power_of_two(uint32_t amax_bits, Format format, float epsilon) {
  const uint32_t epsilon_bits = bits_of(epsilon), bits = amax_bits > epsilon_bits ? amax_bits : epsilon_bits;
  const uint32_t top = 254u + (format == Format::e4m3 ? 8u : 15u);
  const uint32_t wanted = top - (bits >> 23) - ((bits & 0x7FFFFFu) > 0x600000u ? 1u : 0u);
  const uint32_t byte = (bits >> 23) == 0 || wanted > 254u ? 254u : wanted;
  return float_of(not_finite(amax_bits) ? NAN_BITS : bits == 0 ? 0x3F800000u : byte << 23);
}

// Stored decode scale of an fp32 encode scale.
OCTAVO_HD float decode_scale(float encode) { return canonical(1.0f / encode); }

// E8M0 byte of an MX block: the smallest b with 2^(b - 127) >= fl(amax * fl(1 / max)). 0xFF: not finite.
OCTAVO_HD uint8_t e8m0_scale(uint32_t amax_bits, Format format) {
  const float inverse = format == Format::e4m3 ? 1.0f / 448.0f : format == Format::e5m2 ? 1.0f / 57344.0f : 1.0f / 6.0f;
  const uint32_t target = bits_of(float_of(amax_bits) * inverse);
  const uint32_t exponent = target >> 23, mantissa = target & 0x7FFFFFu;
  const uint32_t byte = exponent + (mantissa > (exponent == 0 ? 0x400000u : 0u) ? 1u : 0u);
  return not_finite(amax_bits) ? 0xFF : static_cast<uint8_t>(byte);
}

// That of a block of MXFP4: at most 252, because E2M1's 4 under the next one would be 2^128.
OCTAVO_HD uint8_t mxfp4_scale(uint32_t amax_bits) {
  const uint8_t byte = e8m0_scale(amax_bits, Format::e2m1);
  return byte == 0xFF || byte < 252 ? byte : 252;
}

// 2^(127 - byte); byte is at most 253, or 0xFF for NaN.
OCTAVO_HD float e8m0_encode(uint8_t byte) {
  return float_of(byte == 0xFF ? NAN_BITS : static_cast<uint32_t>(254 - byte) << 23);
}

// NVFP4's second level of a group: S. The stored factor is decode_scale(S).
OCTAVO_HD float nvfp4_global(uint32_t group_amax_bits) {
  const float global = smaller(2688.0f / float_of(group_amax_bits), FLOAT_MAX);
  if (group_amax_bits == 0) return 1.0f;
  return not_finite(group_amax_bits) ? float_of(NAN_BITS) : global;
}

// E4M3 code of a block's decode scale; `sixth` is fl(S * fl(1 / 6)).
OCTAVO_HD uint8_t nvfp4_scale(uint32_t block_amax_bits, float sixth) {
  const float wanted = float_of(block_amax_bits) * sixth;
  return e4m3_code(wanted > FLOAT_MAX ? FLOAT_MAX : wanted);
}

OCTAVO_HD float nvfp4_sixth(float global) { return global * (1.0f / 6.0f); }

// Encode scale of a block with this decode code; `factor` is the group's stored factor. NaN where either is.
OCTAVO_HD float nvfp4_encode(uint8_t code, float factor) {
  const float encode = 1.0f / (e4m3_value(code) * factor);
  return encode > FLOAT_MAX ? FLOAT_MAX : encode;
}

// ---- Hadamard

// Bit i is set where row i of a run of 16 is multiplied by -1: + + + - + - - - - - - + - + - -
constexpr uint32_t HADAMARD_SIGNS = 0xD7E8u;

OCTAVO_HD float hadamard_sign(float value, int row) {
  return float_of(bits_of(value) ^ (((HADAMARD_SIGNS >> row) & 1u) << 31));
}

// ---- Philox4x32-10 (Salmon et al., SC 2011, table 2; word order as in Random123)

struct Words {
  uint32_t word[4];
};

constexpr int PHILOX_ROUNDS = 10;

// Both keys of a round.
struct RoundKeys {
  uint32_t first, second;
};

OCTAVO_HD RoundKeys round_keys(uint32_t k0, uint32_t k1, uint32_t round) {
  return {k0 + round * 0x9E3779B9u, k1 + round * 0xBB67AE85u};
}

// `keys_of(round)`: round_keys, worked out now or before.
template <class KeysOf>
OCTAVO_HD Words philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, const KeysOf& keys_of) {
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int round = 0; round < PHILOX_ROUNDS; ++round) {
    const uint64_t first = static_cast<uint64_t>(c0) * 0xD2511F53u, second = static_cast<uint64_t>(c2) * 0xCD9E8D57u;
    const RoundKeys keys = keys_of(round);
    c0 = static_cast<uint32_t>(second >> 32) ^ c1 ^ keys.first;
    c2 = static_cast<uint32_t>(first >> 32) ^ c3 ^ keys.second;
    c1 = static_cast<uint32_t>(second);
    c3 = static_cast<uint32_t>(first);
  }
  return {{c0, c1, c2, c3}};
}

OCTAVO_HD Words philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
  return philox(c0, c1, c2, c3, [=](int round) { return round_keys(k0, k1, static_cast<uint32_t>(round)); });
}

// Counter word 2 of the eight draws of half a block of 16, of which element i takes 16 bits of word i / 2, the low ones
// when i is even. Word 3 is the group; words 0 and 1 are rowwise the row within its group and the column block,
// columnwise the column and the block in the group.
OCTAVO_HD uint32_t draw_stream(Direction direction, int half, Operand operand) {
  return 8 * static_cast<uint32_t>(operand) + 2 * static_cast<uint32_t>(direction) + half;
}

OCTAVO_HD uint32_t draw(const Words& words, int element) {
  return (words.word[element / 2] >> (16 * (element & 1))) & 0xFFFFu;
}

}  // namespace octavo
