// The Hadamard transform of a unit's rows, all of which are one thread's.
#pragma once

#include "cuda/tile/e2m1_rows.cuh"
#include "unit.cuh"

namespace octavo::cuda {

// Three of its four steps over the unit's rows, for a column whose values are one half of the words: the last one adds
// rows i and i + 8 and subtracts them.
template <class T>
__device__ __forceinline__ void hadamard_of_halves(const uint32_t (&words)[UNIT_ROWS], int which, const Multipliers& by,
                                                   float (&x)[UNIT_ROWS]) {
#pragma unroll
  for (int i = 0; i < UNIT_ROWS; ++i) {
    float value = half_of<T>(words[i], which, by);
    if constexpr (!std::is_same_v<T, BF16>) value = rounded<BF16>(value);
    x[i] = HADAMARD_SIGNS >> i & 1u ? -value : value;
  }
#pragma unroll
  for (int step = 1; step < 8; step *= 2)
#pragma unroll
    for (int i = 0; i < UNIT_ROWS; ++i)
      if (!(i & step)) {
        const float a = x[i], b = x[i + step];
        x[i] = a + b;
        x[i + step] = a - b;
      }
}

// The transform of two columns, in place; bf16 values.
template <class T>
__device__ __forceinline__ void hadamard_pair(uint32_t (&words)[UNIT_ROWS], const Multipliers& by) {
  float low[UNIT_ROWS], high[UNIT_ROWS];
  hadamard_of_halves<T>(words, 0, by, low);
  hadamard_of_halves<T>(words, 1, by, high);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    Pack<BF16> pack;
    pack.set(0, (low[i] + low[i + 8]) * 0.25f, (high[i] + high[i + 8]) * 0.25f);
    pack.set(1, (low[i] - low[i + 8]) * 0.25f, (high[i] - high[i + 8]) * 0.25f);
    words[i] = pack.word[0], words[i + 8] = pack.word[1];
  }
}

// fp32 bits of the largest magnitude of the unit's transform, NaN or infinity where it holds one: of a sum and a
// difference the larger magnitude is the sum of magnitudes, and rounding to bf16 keeps their order.
template <class T>
__device__ __forceinline__ uint32_t hadamard_maximum(const Pack<T> (&values)[UNIT_ROWS], const Multipliers& by) {
  float most = 0.0f;
#pragma unroll
  for (int column = 0; column < 8; ++column) {
    uint32_t words[UNIT_ROWS];
#pragma unroll
    for (int i = 0; i < UNIT_ROWS; ++i) words[i] = values[i].word[column / 2];
    float x[UNIT_ROWS];
    hadamard_of_halves<T>(words, column % 2, by, x);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float larger = fabsf(x[i]) + fabsf(x[i + 8]);
      asm("max.NaN.f32 %0, %0, %1;" : "+f"(most) : "f"(larger));
    }
  }
  return abs_bits(rounded<BF16>(most * 0.25f));
}

}  // namespace octavo::cuda
