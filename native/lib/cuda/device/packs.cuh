// Eight neighbouring values of one row in a thread's registers, and maxima of their magnitudes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "octavo/numerics.h"

namespace octavo::cuda {

struct F32 {};
struct F16 {};
struct BF16 {};

// Two 16-bit values per word. Magnitudes order like their bits, so the maximum is one of integers and NaN wins.
template <class T>
struct Pack {
  static constexpr int words = 4;
  static constexpr int per_word = 2;
  static constexpr int bytes = 2;
  uint32_t word[words];

  // The larger magnitudes, NaN above all; the sign bits are meaningless.
  static __device__ uint32_t maximum(uint32_t a, uint32_t b) {
    uint32_t most;
    if constexpr (std::is_same_v<T, BF16>) {
      asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
    } else {
      asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
    }
    return most;
  }
  // The larger half in both halves.
  static __device__ uint32_t across(uint32_t a) { return maximum(a, __byte_perm(a, a, 0x1032)); }
  // fp32 bits of one half's magnitude.
  static __device__ uint32_t fp32_bits(uint32_t word, int half) {
    const uint32_t bits = half ? word >> 16 & 0x7FFFu : word & 0x7FFFu;
    if constexpr (std::is_same_v<T, BF16>) return bits << 16;
    return bits_of(float_of_f16(static_cast<uint16_t>(bits)));
  }

  __device__ float value(int i) const {
    const uint32_t w = word[i / 2];
    if constexpr (std::is_same_v<T, BF16>) return float_of(i % 2 ? w & 0xFFFF0000u : w << 16);
    return float_of_f16(static_cast<uint16_t>(i % 2 ? w >> 16 : w & 0xFFFFu));
  }
  // Two values, each rounded once.
  __device__ void set(int pair, float low, float high) {
    if constexpr (std::is_same_v<T, BF16>) {
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word[pair]) : "f"(high), "f"(low));
    } else {
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word[pair]) : "f"(high), "f"(low));
    }
  }
};

template <>
struct Pack<F32> {
  static constexpr int words = 8;
  static constexpr int per_word = 1;
  static constexpr int bytes = 4;
  uint32_t word[words];

  static __device__ uint32_t maximum(uint32_t a, uint32_t b) { return max(a & ABS_BITS, b & ABS_BITS); }
  static __device__ uint32_t across(uint32_t a) { return a; }
  static __device__ uint32_t fp32_bits(uint32_t word, int) { return word & ABS_BITS; }

  __device__ float value(int i) const { return float_of(word[i]); }
  __device__ void set(int pair, float low, float high) {
    word[2 * pair] = bits_of(low);
    word[2 * pair + 1] = bits_of(high);
  }
};

template <class T>
__device__ __forceinline__ Pack<T> zeros() {
  Pack<T> pack;
#pragma unroll
  for (uint32_t& word : pack.word) word = 0;
  return pack;
}

// 16-byte aligned.
template <class T>
__device__ __forceinline__ Pack<T> load_pack(const void* at) {
  Pack<T> pack;
  const uint4* from = static_cast<const uint4*>(at);
#pragma unroll
  for (int i = 0; i < Pack<T>::words / 4; ++i) {
    const uint4 four = __ldg(from + i);
    pack.word[4 * i] = four.x, pack.word[4 * i + 1] = four.y;
    pack.word[4 * i + 2] = four.z, pack.word[4 * i + 3] = four.w;
  }
  return pack;
}

template <class T>
__device__ __forceinline__ void store_pack(void* at, const Pack<T>& pack) {
  uint4* to = static_cast<uint4*>(at);
#pragma unroll
  for (int i = 0; i < Pack<T>::words / 4; ++i)
    to[i] = {pack.word[4 * i], pack.word[4 * i + 1], pack.word[4 * i + 2], pack.word[4 * i + 3]};
}

// Replaces every NaN by the canonical one: 0x7FC0 (bf16), 0x7E00 (fp16), 0x7FC00000 (fp32).
template <class T>
__device__ __forceinline__ void make_canonical(Pack<T>& pack) {
  constexpr bool is_bf16 = std::is_same_v<T, BF16>;
  constexpr uint32_t inf = is_bf16 ? 0x7F80u : 0x7C00u, nan = is_bf16 ? 0x7FC0u : 0x7E00u;
#pragma unroll
  for (uint32_t& word : pack.word) {
    if constexpr (std::is_same_v<T, F32>) {
      if ((word & ABS_BITS) > INF_BITS) word = NAN_BITS;
    } else {
      if ((word & 0x7FFFu) > inf) word = (word & 0xFFFF0000u) | nan;
      if ((word >> 16 & 0x7FFFu) > inf) word = (word & 0xFFFFu) | nan << 16;
    }
  }
}

template <class T>
__device__ __forceinline__ float load_value(const void* base, int64_t index) {
  if constexpr (std::is_same_v<T, F32>) return __ldg(static_cast<const float*>(base) + index);
  const uint16_t bits = __ldg(static_cast<const uint16_t*>(base) + index);
  if constexpr (std::is_same_v<T, BF16>) return float_of_bf16(bits);
  return float_of_f16(bits);
}

template <class T>
__device__ __forceinline__ void store_value(void* base, int64_t index, float value) {
  if constexpr (std::is_same_v<T, F32>) {
    static_cast<float*>(base)[index] = value;
  } else {
    static_cast<uint16_t*>(base)[index] = std::is_same_v<T, BF16> ? bf16_of(value) : f16_of(value);
  }
}

// One rounding to T, back in fp32.
template <class T>
__device__ __forceinline__ float rounded(float value) {
  if constexpr (std::is_same_v<T, F32>) return value;
  Pack<T> pack;
  pack.set(0, value, 0.0f);
  return pack.value(0);
}

}  // namespace octavo::cuda
