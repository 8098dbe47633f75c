// Rounding a tile to MXFP4's values in registers: E2M1, with a power of two for each 32 elements of a row, which are
// those of four neighbouring threads. Bit for bit octavo_numerics.round_mxfp4.
#pragma once

#include "maxima.cuh"
#include "octavo/numerics.h"

namespace octavo::cuda {

// Arithmetic on one word of a Pack: two bf16 values, or one of fp32. Subnormals are kept.
template <class T>
struct Arithmetic;

template <>
struct Arithmetic<BF16> {
  static constexpr uint32_t exponents = 0x7F807F80u, signs = 0x80008000u;
  static constexpr float magic = 96.0f;  // 1.5 * 2^6, whose ulp is 1/2
  // A number that bf16 holds, in every half.
  static __device__ uint32_t of(float value) { return __byte_perm(bits_of(value), 0, 0x3232); }
  static __device__ uint32_t fma(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t sum;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
  }
  static __device__ uint32_t larger(uint32_t a, uint32_t b) {
    uint32_t most;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
    return most;
  }
  static __device__ uint32_t smaller(uint32_t a, uint32_t b) {
    uint32_t least;
    asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(least) : "r"(a), "r"(b));
    return least;
  }
};

template <>
struct Arithmetic<F32> {
  static constexpr uint32_t exponents = 0x7F800000u, signs = 0x80000000u;
  static constexpr float magic = 6291456.0f;  // 1.5 * 2^22, likewise
  static __device__ uint32_t of(float value) { return bits_of(value); }
  static __device__ uint32_t fma(uint32_t a, uint32_t b, uint32_t c) {
    return bits_of(fmaf(float_of(a), float_of(b), float_of(c)));
  }
  static __device__ uint32_t larger(uint32_t a, uint32_t b) {
    uint32_t most;
    asm("max.NaN.f32 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
    return most;
  }
  static __device__ uint32_t smaller(uint32_t a, uint32_t b) {
    uint32_t least;
    asm("min.NaN.f32 %0, %1, %2;" : "=r"(least) : "r"(a), "r"(b));
    return least;
  }
};

// Calls `body(i, scale)` with the scale of each of the thread's eight rows. `scales`: those of the lane's own two rows
// as bf16, which holds them, in one word.
constexpr int MXFP4_LANES = 32 / 8;

template <class Body>
__device__ __forceinline__ void for_each_scale(uint32_t scales, const Body& body) {
  constexpr int own = own_rows<MXFP4_LANES>();
  static_assert(own == 2);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t both = __shfl_sync(~0u, scales, i / own, MXFP4_LANES);
    body(i, float_of(i % own ? both & 0xFFFF0000u : both << 16));
  }
}

// The grid's step is half of the value's binade, at least of the scale's, which is a power of two or NaN. Adding a
// number with that ulp and subtracting it again rounds to nearest even, and a zero gets its sign back.
template <class T>
__device__ __forceinline__ void round_row(Pack<T>& values, float scale) {
  using A = Arithmetic<T>;
#pragma unroll
  for (uint32_t& word : values.word) {
    const uint32_t binade = A::larger(word & A::exponents, A::of(scale));
    const uint32_t sum = A::fma(binade, A::of(A::magic), word);
    word = A::fma(binade, A::of(-A::magic), sum) | (word & A::signs);
  }
}

// From this scale on `magic` times a binade could overflow, so that rows are rounded at 2^-64 times their size: what is
// lost of their smallest values is far below a step. Scales end at 2^125 (mxfp4_scale), hence only here a magnitude may
// round to more than 6 of them.
constexpr float LARGE_SCALE = 0x1p93f;

template <class T>
__device__ __forceinline__ void reduce_row(Pack<T>& values, float scale) {
  using A = Arithmetic<T>;
  if (!(scale >= LARGE_SCALE)) return;
  const uint32_t six = A::of(scale * 0x6p-64f);
#pragma unroll
  for (uint32_t& word : values.word) {
    const uint32_t value = A::fma(word, A::of(0x1p-64f), A::signs);  // + -0
    word = A::smaller(A::larger(value, six | A::signs), six);
  }
}

template <class T>
__device__ __forceinline__ void restore_row(Pack<T>& values, float scale) {
  using A = Arithmetic<T>;
  if (!(scale >= LARGE_SCALE)) return;
#pragma unroll
  for (uint32_t& word : values.word) word = A::fma(word, A::of(0x1p64f), A::signs);
}

template <class T>
__device__ __forceinline__ void round_to_mxfp4(Pack<T> (&values)[8]) {
  const RowMaxima<MXFP4_LANES, T> maxima = row_maxima<MXFP4_LANES>(values);
  uint32_t scales = 0, reduced = 0;
#pragma unroll
  for (int k = 0; k < maxima.rows; ++k) {
    const float scale = e8m0_value(mxfp4_scale(maxima.fp32_bits(k)));
    scales |= bits_of(scale) >> 16 << 16 * k;
    reduced |= bits_of(scale >= LARGE_SCALE ? scale * 0x1p-64f : scale) >> 16 << 16 * k;
  }
  // Whole warps branch, which large values are too rare to slow down.
  const bool large = __any_sync(~0u, scales != reduced);
  if (large) for_each_scale(scales, [&](int i, float scale) { reduce_row(values[i], scale); });
  for_each_scale(reduced, [&](int i, float scale) { round_row(values[i], scale); });
  if (large) for_each_scale(scales, [&](int i, float scale) { restore_row(values[i], scale); });
}

}  // namespace octavo::cuda
