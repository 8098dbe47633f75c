// Rounding of several values at once, in halves of words: stochastically to bf16, and to nearest.
#pragma once

#include "cuda/device/packs.cuh"

namespace octavo::cuda {

// What is rare goes through the elements one by one, in a loop: eight copies of its code would need registers of their
// own. Registers have no index, so an element is picked by comparisons, and a new one moves all others.
template <int N, class T>
__device__ __forceinline__ T picked(const T (&values)[N], int i) {
  T value = values[0];
#pragma unroll
  for (int k = 1; k < N; ++k) value = k == i ? values[k] : value;
  return value;
}

template <int N, class T>
__device__ __forceinline__ void append(T (&values)[N], T last) {
#pragma unroll
  for (int i = 0; i + 1 < N; ++i) values[i] = values[i + 1];
  values[N - 1] = last;
}

// value + 2^SHIFT times the draw of element i, which is half i % 2 of the word. SHIFT: 0 or 4.
template <int SHIFT>
__device__ __forceinline__ uint32_t plus_draw(uint32_t value, uint32_t word, int i) {
  uint32_t sum;  // one instruction: both halves of the word times a byte each, one of which is zero
  asm("dp2a.lo.u32.u32 %0, %1, %2, %3;"
      : "=r"(sum)
      : "r"(word), "r"(i % 2 ? 0x100u << SHIFT : 1u << SHIFT), "r"(value));
  return sum;
}

// The upper halves of two words.
__device__ __forceinline__ uint32_t upper_halves(uint32_t low, uint32_t high) { return __byte_perm(low, high, 0x7632); }

// Whether any is NaN. Infinities and the largest numbers may count as such.
template <int N>
__device__ __forceinline__ bool maybe_nan(const float (&values)[N]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < N; i += 2) sum = __fmaf_rn(values[i], values[i + 1], sum);
  return sum != sum;
}

// Puts element i of a pair.
__device__ __forceinline__ void put_half(uint32_t& pair, int i, uint32_t half) {
  pair = __byte_perm(pair, half, i % 2 ? 0x5410 : 0x3254);
}

// bf16 of each, rounded by 16 bits of `words`.
template <int N>
__device__ __forceinline__ void stochastic_halves(uint32_t (&halves)[N / 2], const float (&values)[N],
                                                  const uint32_t (&words)[N / 2]) {
#pragma unroll
  for (int pair = 0; pair < N / 2; ++pair) {
    uint32_t sum[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) sum[i] = plus_draw<0>(bits_of(values[2 * pair + i]), words[pair], i);
    halves[pair] = upper_halves(sum[0], sum[1]);
  }
  if (!maybe_nan(values)) return;
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (values[i] != values[i]) put_half(halves[i / 2], i, 0x7FC0u);
}

// To nearest, NaN canonical.
template <int N>
__device__ __forceinline__ void nearest_halves(uint32_t (&halves)[N / 2], const float (&values)[N], DType dtype) {
#pragma unroll
  for (int pair = 0; pair < N / 2; ++pair) {
    if (dtype == DType::bf16) {
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(halves[pair]) : "f"(values[2 * pair + 1]), "f"(values[2 * pair]));
    } else {
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(halves[pair]) : "f"(values[2 * pair + 1]), "f"(values[2 * pair]));
    }
  }
  if (!maybe_nan(values)) return;
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (values[i] != values[i]) put_half(halves[i / 2], i, dtype == DType::bf16 ? 0x7FC0u : 0x7E00u);
}

// Values of bf16 halves, exactly.
template <int N>
__device__ __forceinline__ void values_of_halves(float (&values)[N], const uint32_t (&halves)[N / 2]) {
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = float_of(i % 2 ? halves[i / 2] & 0xFFFF0000u : halves[i / 2] << 16);
}

}  // namespace octavo::cuda
