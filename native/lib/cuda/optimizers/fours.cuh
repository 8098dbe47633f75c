// Four neighbouring elements of a row, one lane's share of a warp's 128 columns: loads and stores.
#pragma once

#include "cuda/device/memory.cuh"
#include "cuda/device/packs.cuh"
#include "steps.cuh"

namespace octavo::cuda {

// A gradient whose dtype is known at run time alone.
struct AnyDType {};

// Which of a lane's four elements exist; WIDE: all of them or none, at an address of whole fours.
template <bool WIDE>
struct Live {
  int count;
  __device__ bool any() const { return count > 0; }
  __device__ bool at(int i) const { return WIDE ? count > 0 : i < count; }
};

template <class T, bool WIDE>
__device__ __forceinline__ void load_four(float* to, const void* base, int64_t at, Live<WIDE> live) {
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = 0.0f;
  if (!live.any()) return;
  if constexpr (!WIDE) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (live.at(i)) to[i] = load_value<T>(base, at + i);
  } else if constexpr (std::is_same_v<T, F32>) {
    const float4 four = *reinterpret_cast<const float4*>(static_cast<const float*>(base) + at);
    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
  } else {
    const uint2 two = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(base) + at);
    const uint32_t halves[4] = {two.x & 0xFFFFu, two.x >> 16, two.y & 0xFFFFu, two.y >> 16};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto half = static_cast<uint16_t>(halves[i]);
      to[i] = std::is_same_v<T, BF16> ? float_of_bf16(half) : float_of_f16(half);
    }
  }
}

template <class G, bool WIDE>
__device__ __forceinline__ void load_gradient(float* to, const AdamWArrays& arrays, int64_t at, Live<WIDE> live) {
  if constexpr (!std::is_same_v<G, AnyDType>) {
    load_four<G>(to, arrays.grad, at, live);
  } else if (arrays.grad_dtype == DType::f32) {
    load_four<F32>(to, arrays.grad, at, live);
  } else if (arrays.grad_dtype == DType::bf16) {
    load_four<BF16>(to, arrays.grad, at, live);
  } else {
    load_four<F16>(to, arrays.grad, at, live);
  }
}

template <bool WIDE>
__device__ __forceinline__ uint32_t load_codes(const void* base, int64_t at, Live<WIDE> live) {
  const auto* from = static_cast<const uint8_t*>(base) + at;
  if (!live.any()) return 0;
  if constexpr (WIDE) return *reinterpret_cast<const uint32_t*>(from);
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (live.at(i)) word |= static_cast<uint32_t>(from[i]) << (8 * i);
  return word;
}

template <bool WIDE>
__device__ __forceinline__ void store_codes(void* base, int64_t at, Live<WIDE> live, uint32_t word) {
  auto* to = static_cast<uint8_t*>(base) + at;
  if (!live.any()) return;
  if constexpr (WIDE) {
    store_global(to, word);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (live.at(i)) to[i] = static_cast<uint8_t>(word >> (8 * i));
  }
}

template <bool WIDE>
__device__ __forceinline__ void store_floats(void* base, int64_t at, Live<WIDE> live, const float* from) {
  float* to = static_cast<float*>(base) + at;
  if (!live.any()) return;
  if constexpr (WIDE) {
    store_global(to, uint4{bits_of(from[0]), bits_of(from[1]), bits_of(from[2]), bits_of(from[3])});
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (live.at(i)) to[i] = from[i];
  }
}

// Four 16-bit values.
template <bool WIDE>
__device__ __forceinline__ void store_halves(void* base, int64_t at, Live<WIDE> live, uint2 from) {
  auto* to = static_cast<uint16_t*>(base) + at;
  if (!live.any()) return;
  if constexpr (WIDE) {
    store_global(to, from);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (live.at(i)) to[i] = static_cast<uint16_t>((i < 2 ? from.x : from.y) >> (16 * (i % 2)));
  }
}

}  // namespace octavo::cuda
