// Codes and stored scales to values, and values to memory, a few at a time. The bits are those of numerics.h.
#pragma once

#include "octavo/dequantize.h"
#include "octavo/numerics.h"

namespace octavo::cuda {

// How a unit's decode scale is stored. e4m3: to be multiplied by the group's second-level factor.
enum class Stored { f32, e8m0, e4m3 };

template <Stored S>
__device__ __forceinline__ float scale_value(const void* __restrict__ scales, int64_t index, float global) {
  if constexpr (S == Stored::f32) return __ldg(static_cast<const float*>(scales) + index);
  const uint8_t byte = __ldg(static_cast<const uint8_t*>(scales) + index);
  if constexpr (S == Stored::e8m0) return e8m0_value(byte);
  return e4m3_value(byte) * global;
}

// Four one-byte codes, the first in the low byte.
template <Format F>
__device__ __forceinline__ void decode4(uint32_t codes, float* values) {
#if defined(__CUDA_ARCH__)
  if constexpr (F == Format::e2m1) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t code = codes >> (8 * i);
      // Exponent and mantissa in fp32 positions with the wrong bias, which an exact multiplication corrects.
      values[i] = __uint_as_float((code & 7u) << 22 | (code & 8u) << 28) * 0x1p126f;
    }
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint16_t pair = static_cast<uint16_t>(codes >> (16 * half));
      uint32_t halves;
      if constexpr (F == Format::e4m3) {
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
      } else {
        asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(pair));
      }
      values[2 * half] = float_of_f16(static_cast<uint16_t>(halves));
      values[2 * half + 1] = float_of_f16(static_cast<uint16_t>(halves >> 16));
    }
  }
#else
  for (int i = 0; i < 4; ++i) values[i] = value_of(F, static_cast<uint8_t>(codes >> (8 * i)));
#endif
}

// Four 4-bit codes, in the low half, to four bytes; and back.
__device__ __forceinline__ uint32_t spread_nibbles(uint32_t codes) {
  const uint32_t pairs = (codes | codes << 8) & 0x00FF00FFu;
  return (pairs | pairs << 4) & 0x0F0F0F0Fu;
}

__device__ __forceinline__ uint32_t gather_nibbles(uint32_t bytes) {
  const uint32_t codes = bytes & 0x0F0F0F0Fu, pairs = (codes | codes >> 4) & 0x00FF00FFu;
  return (pairs | pairs >> 8) & 0xFFFFu;
}

template <DType D>
__device__ __forceinline__ uint16_t half_word(float value) {
  if constexpr (D == DType::bf16) return bf16_of(value);
  return f16_of(value);
}

// Two values rounded to D. The cvt instruction's NaN is not the canonical one, so `nan` takes the slow path.
template <DType D>
__device__ __forceinline__ uint32_t round_pair(float low, float high, bool nan) {
#if defined(__CUDA_ARCH__)
  if (!nan) {
    uint32_t pair;
    if constexpr (D == DType::bf16) {
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    } else {
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    }
    return pair;
  }
#endif
  return half_word<D>(low) | static_cast<uint32_t>(half_word<D>(high)) << 16;
}

template <DType D>
__device__ __forceinline__ void store_value(void* out, int64_t index, float value) {
  if constexpr (D == DType::f32) {
    static_cast<float*>(out)[index] = canonical(value);
  } else {
    static_cast<uint16_t*>(out)[index] = half_word<D>(value);
  }
}

// `count` (4 or 8) neighbouring values from element `index` on, whose address is a multiple of 16 bytes (8 where four
// values need only that).
template <DType D, int count>
__device__ __forceinline__ void store_values(void* out, int64_t index, const float (&values)[count]) {
  if constexpr (D == DType::f32) {
    float4* to = reinterpret_cast<float4*>(static_cast<float*>(out) + index);
#pragma unroll
    for (int i = 0; i < count / 4; ++i) {
      to[i] = make_float4(canonical(values[4 * i]), canonical(values[4 * i + 1]), canonical(values[4 * i + 2]),
                          canonical(values[4 * i + 3]));
    }
  } else {
    bool nan = false;
    uint32_t pairs[count / 2];
#pragma unroll
    for (int i = 0; i < count; ++i) nan |= values[i] != values[i];
#pragma unroll
    for (int i = 0; i < count / 2; ++i) pairs[i] = round_pair<D>(values[2 * i], values[2 * i + 1], nan);
    uint16_t* to = static_cast<uint16_t*>(out) + index;
    if constexpr (count == 8) {
      *reinterpret_cast<uint4*>(to) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    } else {
      *reinterpret_cast<uint2*>(to) = make_uint2(pairs[0], pairs[1]);
    }
  }
}

}  // namespace octavo::cuda
