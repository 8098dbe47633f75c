// Loops over fp32 values: conversions from and to other dtypes, decoding, transforms, sums. Part of body.h, whose rules
// apply.
#pragma once

#include "octavo/numerics.h"

namespace octavo {
namespace {

// fp8_value without subnormal operands: below the normal range a code counts steps of 2^(1 - bias - mantissa), the ulp
// of `magic`. The sign is left out.
template <int mantissa, int bias>
uint32_t fp8_magnitude(uint32_t rest) {
  constexpr uint32_t magic = static_cast<uint32_t>(128 - bias - mantissa + 23) << 23;
  const uint32_t small = bits_of(float_of(magic + (rest & ((1u << mantissa) - 1u))) - float_of(magic));
  const uint32_t normal = (rest << (23 - mantissa)) + (static_cast<uint32_t>(127 - bias) << 23);
  return rest < (1u << mantissa) ? small : normal;
}

float e4m3_decoded(uint8_t code) {
  const uint32_t rest = code & 0x7Fu, sign = static_cast<uint32_t>(code & 0x80u) << 24;
  return float_of(rest == 0x7Fu ? NAN_BITS : sign | fp8_magnitude<3, 7>(rest));
}

float e5m2_decoded(uint8_t code) {
  const uint32_t rest = code & 0x7Fu, sign = static_cast<uint32_t>(code & 0x80u) << 24;
  const uint32_t special = rest == 0x7Cu ? sign | INF_BITS : NAN_BITS;
  return float_of(rest >= 0x7Cu ? special : sign | fp8_magnitude<2, 15>(rest));
}

void load(int dtype, const void* from, float* to, int64_t n) {
  if (dtype == static_cast<int>(DType::f32)) {
    std::memcpy(to, from, static_cast<size_t>(n) * 4);
  } else if (dtype == static_cast<int>(DType::bf16)) {
    const auto* bits = static_cast<const uint16_t*>(from);
    for (int64_t i = 0; i < n; ++i) to[i] = float_of_bf16(bits[i]);
  } else {
    const auto* values = static_cast<const uint16_t*>(from);
    for (int64_t i = 0; i < n; ++i) {
      // float_of_f16 without its branch, which would keep the loop scalar, and without subnormal operands, which some
      // processors take a hundred cycles for: 0.5 has an ulp of 2^-24, fp16's smallest step.
      const uint32_t rest = values[i] & 0x7FFFu, sign = static_cast<uint32_t>(values[i] & 0x8000u) << 16;
      const uint32_t small = bits_of(float_of(0x3F000000u + (rest & 0x3FFu)) - 0.5f);
      const uint32_t finite = rest < 0x400u ? small : (rest << 13) + 0x38000000u;
      const uint32_t special = INF_BITS | ((rest & 0x3FFu) << 13);
      to[i] = float_of(sign | (rest >= 0x7C00u ? special : finite));
    }
  }
}

void store(int dtype, const float* from, void* to, int64_t n) {
  if (dtype == static_cast<int>(DType::f32)) {
    auto* bits = static_cast<uint32_t*>(to);
    for (int64_t i = 0; i < n; ++i) bits[i] = abs_bits(from[i]) > INF_BITS ? NAN_BITS : bits_of(from[i]);
  } else if (dtype == static_cast<int>(DType::bf16)) {
    auto* bits = static_cast<uint16_t*>(to);
    for (int64_t i = 0; i < n; ++i) bits[i] = bf16_of(from[i]);
  } else {
    auto* bits = static_cast<uint16_t*>(to);
    for (int64_t i = 0; i < n; ++i) bits[i] = f16_of(from[i]);
  }
}

void round(int dtype, float* values, int64_t n) {
  if (dtype == static_cast<int>(DType::bf16)) {
    for (int64_t i = 0; i < n; ++i) values[i] = float_of_bf16(bf16_of(values[i]));
  } else if (dtype == static_cast<int>(DType::f16)) {
    for (int64_t i = 0; i < n; ++i) values[i] = float_of_f16(f16_of(values[i]));
  }
}

float canonical_bits(float value) { return float_of(abs_bits(value) > INF_BITS ? NAN_BITS : bits_of(value)); }

void decode(int format, const uint8_t* __restrict codes, const float* __restrict scales, int64_t n,
            float* __restrict out) {
  if (format == static_cast<int>(Format::e4m3)) {
    for (int64_t i = 0; i < n; ++i) out[i] = canonical_bits(e4m3_decoded(codes[i]) * scales[i]);
  } else if (format == static_cast<int>(Format::e5m2)) {
    for (int64_t i = 0; i < n; ++i) out[i] = canonical_bits(e5m2_decoded(codes[i]) * scales[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) out[i] = canonical_bits(e2m1_value(codes[i]) * scales[i]);
  }
}

constexpr int RUN = 16;  // rows of one Hadamard transform

void hadamard(const float* __restrict from, int rows, int64_t n, int64_t stride, float* __restrict to) {
  for (int row = 0; row < RUN; ++row) {
    const uint32_t sign = ((HADAMARD_SIGNS >> row) & 1u) << 31;
    float* out = to + row * stride;
    for (int64_t i = 0; i < n; ++i) out[i] = float_of(sign);
    if (row >= rows) continue;
    for (int64_t i = 0; i < n; ++i) {
      out[i] = float_of(bits_of(float_of_bf16(bf16_of(from[row * stride + i]))) ^ sign);
    }
  }
  for (int step = 1; step < RUN; step *= 2) {
    for (int row = 0; row < RUN; ++row) {
      if (row & step) continue;
      float *first = to + row * stride, *second = first + step * stride;
      for (int64_t i = 0; i < n; ++i) {
        const float a = first[i], b = second[i];
        first[i] = a + b;
        second[i] = a - b;
      }
    }
  }
  for (int row = 0; row < RUN; ++row) {
    float* out = to + row * stride;
    for (int64_t i = 0; i < n; ++i) out[i] = float_of_bf16(bf16_of(out[i] * 0.25f));
  }
}

void add(const float* __restrict values, int64_t n, float* __restrict sums) {
  for (int64_t i = 0; i < n; ++i) sums[i] += values[i];
}

}  // namespace
}  // namespace octavo
