// A unit's encode scale and its stored decode scale, by kind of scale.
#pragma once

#include <cuda_fp16.h>

#include "cuda/device/codes.cuh"
#include "octavo/numerics.h"

namespace octavo::cuda {

// known: one precomputed encode scale per group. rows: one precomputed per row or column. The others: computed from the
// amax of the tile's own units.
enum class Kind { known, rows, block, mxfp8, nvfp4 };

__host__ __device__ constexpr int unit_size(Kind kind) {
  return kind == Kind::block ? 128 : kind == Kind::mxfp8 ? 32 : kind == Kind::nvfp4 ? 16 : 0;
}

struct ScaleOptions {
  float epsilon;
  bool power_of_two;
};

// NVFP4's second level for one plane and group: fl(S / 6) and the stored factor fl(1 / S).
struct SecondLevel {
  float sixth;
  float factor;
};

// The decode scale of a power of two that encodes: exponents add up to 254, 2^127 has the subnormal 2^-127, and NaN's
// exponent is 255.
__device__ __forceinline__ float inverse_power_of_two(float scale) {
  const uint32_t exponent = bits_of(scale) >> 23;
  return float_of(exponent < 254u ? (254u - exponent) << 23 : exponent == 254u ? 0x00400000u : NAN_BITS);
}

// The encode scale of a unit with this amax, and its stored decode scale. `encode_any` chooses the rule at run time.
template <Kind K>
struct Scale;

// Calls `body` with power_of_two as a compile-time constant, so that eight scales share one branch.
template <Kind K, class Body>
__device__ __forceinline__ void with_options(const ScaleOptions& options, const Body& body) {
  if (K != Kind::block || options.power_of_two) {
    body(std::true_type{});
  } else {
    body(std::false_type{});
  }
}

template <>
struct Scale<Kind::block> {
  using Stored = float;
  template <Format F, bool POWER_OF_TWO>
  static __device__ float encode(uint32_t amax, const ScaleOptions& options, const SecondLevel&, Stored& stored) {
    if constexpr (!POWER_OF_TWO) {
      const float scale = fp32_scale(amax, format_max(F), options.epsilon, false);
      stored = decode_scale(scale);
      return scale;
    }
    const float scale = fp32_scale_power_of_two(amax, F, options.epsilon);
    stored = inverse_power_of_two(scale);
    return scale;
  }
  template <Format F>
  static __device__ float encode_any(uint32_t amax, const ScaleOptions& options, const SecondLevel& level,
                                     Stored& stored) {
    return options.power_of_two ? encode<F, true>(amax, options, level, stored)
                                : encode<F, false>(amax, options, level, stored);
  }
};

template <>
struct Scale<Kind::mxfp8> {
  using Stored = uint8_t;
  template <Format F, bool>
  static __device__ float encode(uint32_t amax, const ScaleOptions&, const SecondLevel&, Stored& stored) {
    stored = e8m0_scale(amax, F);
    return e8m0_encode(stored);
  }
  template <Format F>
  static __device__ float encode_any(uint32_t amax, const ScaleOptions& options, const SecondLevel& level,
                                     Stored& stored) {
    return encode<F, true>(amax, options, level, stored);
  }
};

template <>
struct Scale<Kind::nvfp4> {
  using Stored = uint8_t;
  template <Format F, bool>
  static __device__ float encode(uint32_t amax, const ScaleOptions&, const SecondLevel& level, Stored& stored) {
    // fminf would drop a NaN
    const float product = float_of(amax) * level.sixth, clamped = product > FLOAT_MAX ? FLOAT_MAX : product;
    const uint32_t code = fp8_pair<Format::e4m3>(clamped, 0.0f) & 0xFFu;
    stored = static_cast<uint8_t>(code);
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(code)));
    const float decode = __half2float(__ushort_as_half(static_cast<uint16_t>(halves)));
    const float scale = __frcp_rn(decode * level.factor);
    return scale > FLOAT_MAX ? FLOAT_MAX : scale;
  }
  template <Format F>
  static __device__ float encode_any(uint32_t amax, const ScaleOptions& options, const SecondLevel& level,
                                     Stored& stored) {
    return encode<F, true>(amax, options, level, stored);
  }
};

}  // namespace octavo::cuda
