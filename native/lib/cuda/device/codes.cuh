// Casts of eight values at a time with the device's own instructions, bit for bit those of numerics.h.
#pragma once

#include "octavo/e2m1.h"
#include "octavo/numerics.h"
#include "transpose.cuh"

namespace octavo::cuda {

// Eight codes of one row or of one column: FP8 one byte each, E2M1 four bits each, the first in the low bits.
template <Format F>
struct Codes {
  uint32_t low, high;
  static constexpr int bytes = 8;
};

template <>
struct Codes<Format::e2m1> {
  uint32_t low;
  static constexpr int bytes = 4;
};

// NaN encodes as 0x7F and values past the largest saturate: what .satfinite does.
template <Format F>
__device__ __forceinline__ uint32_t fp8_pair(float first, float second) {
  uint16_t pair;
  if constexpr (F == Format::e4m3) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  }
  return pair;
}

// The signs of eight values where E2M1 codes have them: in the top bit of each nibble.
__device__ __forceinline__ uint32_t e2m1_signs(const float (&values)[8]) {
  const auto top_bytes = [&](int i) {
    return __byte_perm(__byte_perm(bits_of(values[i]), bits_of(values[i + 2]), 0x0073),
                       __byte_perm(bits_of(values[i + 4]), bits_of(values[i + 6]), 0x0073), 0x5410);
  };
  return (top_bytes(0) >> 4 & 0x08080808u) | (top_bytes(1) & 0x80808080u);
}

template <Format F>
__device__ __forceinline__ Codes<F> encode8(const float (&scaled)[8]) {
  if constexpr (F == Format::e2m1) {
    return {e2m1_codes([&](int i) { return fabsf(scaled[i]); }) | e2m1_signs(scaled)};
  } else {
    return {fp8_pair<F>(scaled[0], scaled[1]) | fp8_pair<F>(scaled[2], scaled[3]) << 16,
            fp8_pair<F>(scaled[4], scaled[5]) | fp8_pair<F>(scaled[6], scaled[7]) << 16};
  }
}

// Codes of eight magnitudes by stochastic rounding: the draw is added below the one mantissa bit that is kept, and
// carries into it. Below 1 the step is that between 1 and 2: half of the magnitude plus a half has the same mantissa
// step one binade lower, and is the larger of the two exactly there (rounded towards zero: bits that are cut off do not
// count). Exponent and kept bit are then the code plus twice the exponent of 0.5. One instruction adds the draw, cuts
// off and appends to the codes of the later elements; the excess is subtracted from all codes at once. `sixteen` is 16,
// see e2m1_codes.
template <class MagnitudeOf>
__device__ __forceinline__ uint32_t stochastic_codes(const MagnitudeOf& magnitude_of, const Words& words,
                                                     uint32_t sixteen = 16u) {
  constexpr uint32_t too_large = 2u * 126u * 0x11111111u;
  uint32_t codes = 0;
#pragma unroll
  for (int i = 7; i >= 0; --i) {
    const float magnitude = fminf(magnitude_of(i), 6.0f);  // NaN, of a NaN scale, becomes 6
    const float stepped = fmaxf(magnitude, __fmaf_rz(magnitude, 0.5f, 0.5f));
    const uint32_t word = words.word[i / 2], draw = i % 2 ? word & 0xFFFF0000u : word << 16;
    // high word: 16 * codes + (stepped's bits * 2^10 + draw) / 2^32
    asm("{\n.reg .b64 sum;\n.reg .b32 cut;\n"
        "mov.b64 sum, {%2, %3};\nmad.wide.u32 sum, %1, 1024, sum;\nmov.b64 {cut, %0}, sum;\n}"
        : "=r"(codes)
        : "r"(bits_of(stepped)), "r"(draw), "r"(codes * sixteen));
  }
  return codes - too_large;
}

__device__ __forceinline__ Codes<Format::e2m1> encode8_stochastic(const float (&scaled)[8], const Words& words) {
  return {stochastic_codes([&](int i) { return fabsf(scaled[i]); }, words) | e2m1_signs(scaled)};
}

// A mask of the first `count` of eight codes, for `masked`.
template <Format F>
__device__ __forceinline__ Codes<F> first_codes(int count) {
  if constexpr (F == Format::e2m1) {
    return {count < 8 ? (1u << 4 * count) - 1 : ~0u};
  } else {
    return {count < 4 ? (1u << 8 * count) - 1 : ~0u, count < 8 ? count > 4 ? (1u << 8 * (count - 4)) - 1 : 0 : ~0u};
  }
}

template <Format F>
__device__ __forceinline__ Codes<F> masked(Codes<F> codes, const Codes<F>& kept) {
  codes.low &= kept.low;
  if constexpr (F != Format::e2m1) codes.high &= kept.high;
  return codes;
}

// Code i as a byte.
template <Format F>
__device__ __forceinline__ uint8_t code_at(const Codes<F>& codes, int i) {
  if constexpr (F == Format::e2m1) {
    return static_cast<uint8_t>((codes.low >> (4 * i)) & 0xFu);
  } else {
    return static_cast<uint8_t>((i < 4 ? codes.low : codes.high) >> (8 * (i % 4)));
  }
}

// Transposes 8 x 8 codes in place.
template <Format F>
__device__ __forceinline__ void transpose(Codes<F> (&codes)[8]) {
  if constexpr (F == Format::e2m1) {
    // Nibbles, then bytes, then half words.
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const uint32_t a = codes[i].low, b = codes[i + 1].low;
      codes[i].low = (a & 0x0F0F0F0Fu) | (b << 4 & 0xF0F0F0F0u);
      codes[i + 1].low = (a >> 4 & 0x0F0F0F0Fu) | (b & 0xF0F0F0F0u);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i & 2) continue;
      const uint32_t a = codes[i].low, b = codes[i + 2].low;
      codes[i].low = __byte_perm(a, b, 0x6240);
      codes[i + 2].low = __byte_perm(a, b, 0x7351);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t a = codes[i].low, b = codes[i + 4].low;
      codes[i].low = __byte_perm(a, b, 0x5410);
      codes[i + 4].low = __byte_perm(a, b, 0x7632);
    }
  } else {
    transpose_bytes(codes[0].low, codes[1].low, codes[2].low, codes[3].low);
    transpose_bytes(codes[4].high, codes[5].high, codes[6].high, codes[7].high);
    transpose_bytes(codes[0].high, codes[1].high, codes[2].high, codes[3].high);
    transpose_bytes(codes[4].low, codes[5].low, codes[6].low, codes[7].low);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t swapped = codes[i].high;
      codes[i].high = codes[i + 4].low;
      codes[i + 4].low = swapped;
    }
  }
}

}  // namespace octavo::cuda
