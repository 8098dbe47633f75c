// Loops that encode values. Part of body.h, whose rules apply.
#pragma once

#include "octavo/numerics.h"

namespace octavo {
namespace {

// Nearest even, saturating, -0 kept, NaN to 0x7F: adding a power of two whose ulp is the format's step in the value's
// binade rounds to it. `top` is the bits of the largest value.
template <int mantissa, int bias, uint32_t top>
int32_t fp8_cast(float value) {
  constexpr auto least = static_cast<int32_t>(static_cast<uint32_t>(128 - bias) << 23);  // the least normal number
  const uint32_t bits = bits_of(value);
  const auto rest = static_cast<int32_t>(bits & ABS_BITS);
  const int32_t magnitude = rest < static_cast<int32_t>(top) ? rest : static_cast<int32_t>(top);
  const int32_t exponent = magnitude & static_cast<int32_t>(INF_BITS), binade = exponent > least ? exponent : least;
  const int32_t magic = binade + ((23 - mantissa) << 23);
  const float rounded = float_of(static_cast<uint32_t>(magnitude)) + float_of(static_cast<uint32_t>(magic));
  const int32_t steps = static_cast<int32_t>(bits_of(rounded)) - magic;
  const int32_t code = steps + ((binade - least) >> (23 - mantissa));
  const int32_t finite = code | static_cast<int32_t>((bits >> 24) & 0x80u);
  return rest > static_cast<int32_t>(INF_BITS) ? 0x7F : finite;
}

int32_t e4m3_cast(float value) { return fp8_cast<3, 7, 0x43E00000u>(value); }
int32_t e5m2_cast(float value) { return fp8_cast<2, 15, 0x47600000u>(value); }

// Signed comparisons and a clamp, which vectorise everywhere.
int32_t e2m1_signed(uint32_t bits, int32_t rest, int32_t code) {
  return rest > static_cast<int32_t>(INF_BITS) ? 0x7 : code | static_cast<int32_t>((bits >> 28) & 8u);
}

int32_t e2m1_cast(float value) {
  constexpr int32_t one = 0x3F800000, six = 0x40C00000;
  const uint32_t bits = bits_of(value);
  const auto rest = static_cast<int32_t>(bits & ABS_BITS);
  const int32_t magnitude = rest < six ? rest : six, exponent = magnitude & static_cast<int32_t>(INF_BITS);
  const int32_t binade = exponent > one ? exponent : one, magic = binade + (22 << 23);
  const float rounded = float_of(static_cast<uint32_t>(magnitude)) + float_of(static_cast<uint32_t>(magic));
  const int32_t code = static_cast<int32_t>(bits_of(rounded)) - magic + ((binade - one) >> 22);
  return e2m1_signed(bits, rest, code);
}

int32_t e2m1_cast_stochastic(float value, int32_t draw) {
  constexpr int32_t one = 0x3F800000, six = 0x40C00000;
  const uint32_t bits = bits_of(value);
  const auto rest = static_cast<int32_t>(bits & ABS_BITS);
  const int32_t magnitude = rest < six ? rest : six, exponent = magnitude & static_cast<int32_t>(INF_BITS);
  const int32_t binade = exponent > one ? exponent : one;
  const float place = float_of(static_cast<uint32_t>(magnitude)) *
                      float_of((static_cast<uint32_t>(254 + 17) << 23) - static_cast<uint32_t>(binade));
  const int32_t code = ((static_cast<int32_t>(place) + draw) >> 16) + ((binade - one) >> 22);
  return e2m1_signed(bits, rest, code);
}

// codes[i] = code(i), computed in 32 bits and narrowed afterwards: in one loop the compiler would narrow every
// intermediate value on its own.
template <typename Code>
void narrowed(int64_t n, uint8_t* __restrict codes, const Code& code) {
  constexpr int64_t CHUNK = 128;
  alignas(64) int32_t wide[CHUNK];
  for (int64_t first = 0; first < n; first += CHUNK) {
    const int64_t count = n - first < CHUNK ? n - first : CHUNK;
    for (int64_t i = 0; i < count; ++i) wide[i] = code(first + i);
    for (int64_t i = 0; i < count; ++i) codes[first + i] = static_cast<uint8_t>(wide[i]);
  }
}

void cast(int format, const float* __restrict values, const float* __restrict encode, int64_t n,
          uint8_t* __restrict codes) {
  if (format == static_cast<int>(Format::e4m3)) {
    narrowed(n, codes, [=](int64_t i) { return e4m3_cast(values[i] * encode[i]); });
  } else if (format == static_cast<int>(Format::e5m2)) {
    narrowed(n, codes, [=](int64_t i) { return e5m2_cast(values[i] * encode[i]); });
  } else {
    narrowed(n, codes, [=](int64_t i) { return e2m1_cast(values[i] * encode[i]); });
  }
}

void cast_stochastic(const float* __restrict values, const float* __restrict encode, const uint16_t* __restrict draws,
                     int64_t n, uint8_t* __restrict codes) {
  narrowed(n, codes, [=](int64_t i) { return e2m1_cast_stochastic(values[i] * encode[i], draws[i]); });
}

void mark_non_finite(const float* __restrict values, int64_t n, uint8_t nan, uint8_t* __restrict codes) {
  for (int64_t i = 0; i < n; ++i) codes[i] = not_finite(abs_bits(values[i])) ? nan : codes[i];
}

}  // namespace
}  // namespace octavo
