// Rounding a tile to MXFP4's values in registers: E2M1, with a power of two for each 32 elements of a row, which are
// those of four neighbouring threads, or of a column, which are those of two warps. Bit for bit
// octavo_numerics.round_mxfp4.
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
  // Numbers of the word's own columns.
  static __device__ uint32_t of(const float (&values)[2]) {
    return __byte_perm(bits_of(values[0]), bits_of(values[1]), 0x7632);
  }
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
  static __device__ uint32_t of(const float (&values)[1]) { return bits_of(values[0]); }
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

constexpr int MXFP4_LANES = 32 / 8;  // threads that share a block of a row

// Calls `body(i, scale)` with the scale of each of the thread's eight rows. `scales`: those of the lane's own two rows
// as bf16, which holds them, in one word.
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
__device__ __forceinline__ void round_word(uint32_t& word, uint32_t scale) {
  using A = Arithmetic<T>;
  const uint32_t binade = A::larger(word & A::exponents, scale);
  const uint32_t sum = A::fma(binade, A::of(A::magic), word);
  word = A::fma(binade, A::of(-A::magic), sum) | (word & A::signs);
}

template <class T>
__device__ __forceinline__ void round_row(Pack<T>& values, float scale) {
#pragma unroll
  for (uint32_t& word : values.word) round_word<T>(word, Arithmetic<T>::of(scale));
}

// From this scale on `magic` times a binade could overflow, so blocks are scaled down by 2^-64, rounded, and scaled up
// again. What their smallest values lose is far below a step. Scales end at 2^125 (mxfp4_scale), so that here alone a
// magnitude may be above 6 of them, and is clamped.
constexpr float LARGE_SCALE = 0x1p93f;

template <class T>
__device__ __forceinline__ void scale_down_row(Pack<T>& values, float scale) {
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
__device__ __forceinline__ void scale_up_row(Pack<T>& values, float scale) {
  using A = Arithmetic<T>;
  if (!(scale >= LARGE_SCALE)) return;
#pragma unroll
  for (uint32_t& word : values.word) word = A::fma(word, A::of(0x1p64f), A::signs);
}

// In blocks of 32 elements of a row.
template <class T>
__device__ __forceinline__ void round_rows_to_mxfp4(Pack<T> (&values)[8]) {
  const RowMaxima<MXFP4_LANES, T> maxima = row_maxima<MXFP4_LANES>(values);
  uint32_t scales = 0, lowered = 0;
#pragma unroll
  for (int k = 0; k < maxima.rows; ++k) {
    const float scale = e8m0_value(mxfp4_scale(maxima.fp32_bits(k)));
    scales |= bits_of(scale) >> 16 << 16 * k;
    lowered |= bits_of(scale >= LARGE_SCALE ? scale * 0x1p-64f : scale) >> 16 << 16 * k;
  }
  // Whole warps branch, which large values are too rare to slow down.
  const bool large = __any_sync(~0u, scales != lowered);
  if (large) for_each_scale(scales, [&](int i, float scale) { scale_down_row(values[i], scale); });
  for_each_scale(lowered, [&](int i, float scale) { round_row(values[i], scale); });
  if (large) for_each_scale(scales, [&](int i, float scale) { scale_up_row(values[i], scale); });
}

// Multiplies the columns whose scale is large by `factor`, the others by one.
template <class T>
__device__ __forceinline__ void scale_large_columns(Pack<T> (&values)[8], const float (&scales)[8], float factor) {
  using A = Arithmetic<T>;
  constexpr int per_word = Pack<T>::per_word;
#pragma unroll
  for (int k = 0; k < Pack<T>::words; ++k) {
    float factors[per_word];
#pragma unroll
    for (int j = 0; j < per_word; ++j) factors[j] = scales[per_word * k + j] >= LARGE_SCALE ? factor : 1.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i].word[k] = A::fma(values[i].word[k], A::of(factors), A::signs);  // + -0
  }
}

// As scale_down_row, of the thread's columns.
template <class T>
__device__ __forceinline__ void scale_down_columns(Pack<T> (&values)[8], const float (&scales)[8]) {
  using A = Arithmetic<T>;
  constexpr int per_word = Pack<T>::per_word;
  scale_large_columns(values, scales, 0x1p-64f);
#pragma unroll
  for (int k = 0; k < Pack<T>::words; ++k) {
    float most[per_word];
#pragma unroll
    for (int j = 0; j < per_word; ++j) {
      const float scale = scales[per_word * k + j];
      most[j] = scale >= LARGE_SCALE ? scale * 0x6p-64f : INFINITY;
    }
    const uint32_t six = A::of(most);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i].word[k] = A::smaller(A::larger(values[i].word[k], six | A::signs), six);
  }
}

// In blocks of 32 elements of a column. Every thread of the CTA calls it.
template <class T>
__device__ __forceinline__ void round_columns_to_mxfp4(Pack<T> (&values)[8]) {
  using P = Pack<T>;
  __shared__ uint32_t maxima[WARPS][P::words * 16];
  uint32_t words[P::words];
  column_maxima(values, words);  // of 16 rows
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 16;
#pragma unroll
  for (int k = 0; k < P::words; ++k) maxima[warp][k * 16 + lane] = words[k];
  __syncthreads();
  float scales[8], lowered[8];
  bool any_large = false;
#pragma unroll
  for (int k = 0; k < P::words; ++k) {
    const uint32_t most = P::maximum(words[k], maxima[warp ^ 1][k * 16 + lane]);
#pragma unroll
    for (int j = 0; j < P::per_word; ++j) {
      const int column = P::per_word * k + j;
      scales[column] = e8m0_value(mxfp4_scale(P::fp32_bits(most, j)));
      const bool large = scales[column] >= LARGE_SCALE;
      any_large |= large;
      lowered[column] = large ? scales[column] * 0x1p-64f : scales[column];
    }
  }
  any_large = __any_sync(~0u, any_large);
  if (any_large) scale_down_columns(values, scales);
#pragma unroll
  for (int k = 0; k < P::words; ++k) {
    float of_word[P::per_word];
#pragma unroll
    for (int j = 0; j < P::per_word; ++j) of_word[j] = lowered[P::per_word * k + j];
#pragma unroll
    for (int i = 0; i < 8; ++i) round_word<T>(values[i].word[k], Arithmetic<T>::of(of_word));
  }
  if (any_large) scale_large_columns(values, scales, 0x1p64f);
}

}  // namespace octavo::cuda
