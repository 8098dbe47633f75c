// Loops that compute amaxes and scales. Part of body.h, whose rules apply.
#pragma once

#include "casts.h"
#include "octavo/numerics.h"
#include "values.h"

namespace octavo {
namespace {

int32_t amax_of(float value) { return static_cast<int32_t>(abs_bits(value)); }
int32_t larger(int32_t a, int32_t b) { return a > b ? a : b; }

template <int size>
void amax_runs(const float* values, int64_t blocks, int32_t* out) {
  for (int64_t b = 0; b < blocks; ++b) {
    int32_t amax = 0;
    for (int i = 0; i < size; ++i) amax = larger(amax, amax_of(values[b * size + i]));
    out[b] = amax;
  }
}

void amax_blocks(const float* values, int size, int64_t blocks, int32_t* out) {
  if (size == 128) return amax_runs<128>(values, blocks, out);
  if (size == 32) return amax_runs<32>(values, blocks, out);
  amax_runs<16>(values, blocks, out);
}

void amax_columns(const float* values, int64_t n, int32_t* amax) {
  for (int64_t i = 0; i < n; ++i) amax[i] = larger(amax[i], amax_of(values[i]));
}

int32_t amax_all(const float* values, int64_t n) {
  int32_t amax = 0;
  for (int64_t i = 0; i < n; ++i) amax = larger(amax, amax_of(values[i]));
  return amax;
}

void fp32_scales(int format, const int32_t* amax, int64_t n, float epsilon, bool power_of_two, float* encode,
                 float* decode) {
  const float top = format_max(static_cast<Format>(format));
  for (int64_t i = 0; i < n; ++i) {
    encode[i] = fp32_scale(static_cast<uint32_t>(amax[i]), top, epsilon, power_of_two);
    decode[i] = decode_scale(encode[i]);
  }
}

void e8m0_scales(int format, const int32_t* amax, int64_t n, float* encode, uint8_t* bytes) {
  for (int64_t i = 0; i < n; ++i) {
    const uint8_t byte = e8m0_scale(static_cast<uint32_t>(amax[i]), static_cast<Format>(format));
    bytes[i] = byte;
    encode[i] = e8m0_encode(byte);
  }
}

void nvfp4_scales(const int32_t* amax, int64_t n, float sixth, float factor, float* encode, uint8_t* codes) {
  for (int64_t i = 0; i < n; ++i) {
    // minima as choices, which vectorise
    const float wanted = float_of(static_cast<uint32_t>(amax[i])) * sixth;
    const auto code =
        static_cast<uint8_t>(e4m3_cast(float_of(bits_of(wanted) == INF_BITS ? 0x7F7FFFFFu : bits_of(wanted))));
    codes[i] = code;
    const uint32_t bits = bits_of(1.0f / (e4m3_decoded(code) * factor));
    encode[i] = float_of(bits == INF_BITS ? 0x7F7FFFFFu : bits);
  }
}

void e8m0_values(const uint8_t* bytes, int64_t n, float* values) {
  for (int64_t i = 0; i < n; ++i) values[i] = e8m0_value(bytes[i]);
}

void nvfp4_values(const uint8_t* codes, int64_t n, float factor, float* values) {
  for (int64_t i = 0; i < n; ++i) values[i] = e4m3_decoded(codes[i]) * factor;
}

template <int size>
void spread_runs(const float* scales, int64_t blocks, float* out) {
  for (int64_t b = 0; b < blocks; ++b) {
    for (int i = 0; i < size; ++i) out[b * size + i] = scales[b];
  }
}

void spread(const float* scales, int size, int64_t blocks, float* out) {
  if (size == 128) return spread_runs<128>(scales, blocks, out);
  if (size == 32) return spread_runs<32>(scales, blocks, out);
  spread_runs<16>(scales, blocks, out);
}

}  // namespace
}  // namespace octavo
