// E2M1 codes of 16-bit values: magnitudes are scaled, and signs go from the words of the values to the codes' at once.
#pragma once

#include "cuda/device/codes.cuh"
#include "cuda/device/packs.cuh"

namespace octavo::cuda {

// Where E2M1 codes have their signs, for `signed_codes`; nowhere where the scale is NaN, under which all encode as +6.
__device__ __forceinline__ uint32_t sign_places(float scale) { return scale == scale ? 0x88888888u : 0u; }

// `even`, `odd`: the upper bytes of elements 0, 2, 4, 6 and 1, 3, 5, 7.
__device__ __forceinline__ uint32_t signed_codes(uint32_t codes, uint32_t even, uint32_t odd, uint32_t places) {
  const uint32_t shifted = even >> 4, signs = (shifted & 0x0F0F0F0Fu) | (odd & 0xF0F0F0F0u);
  return (signs & places) | codes;
}

// Upper bytes of both halves of two words: those of the low halves, then those of the high ones.
__device__ __forceinline__ uint32_t upper_bytes(uint32_t first, uint32_t second) {
  return __byte_perm(first, second, 0x7351);
}

__device__ __forceinline__ uint32_t low_pairs(uint32_t first, uint32_t second) {
  return __byte_perm(first, second, 0x5410);
}

__device__ __forceinline__ uint32_t high_pairs(uint32_t first, uint32_t second) {
  return __byte_perm(first, second, 0x7632);
}

// Factors that the compiler cannot tell to be powers of two. It then multiplies, in the FMA pipes, where it would
// shift: the ALU shifts at half the rate, and is busy with maxima and permutations.
struct Multipliers {
  uint32_t sixteen, half_word;  // 2^4, 2^16

  // `threads`: of a CTA, whose number is known at launch alone.
  __device__ static Multipliers unknown(uint32_t threads) {
    const uint32_t one = blockDim.x / threads;
    return {one << 4, one << 16};
  }
  __device__ static Multipliers known() { return {1u << 4, 1u << 16}; }
};

// One half of a word, in fp32.
template <class T>
__device__ __forceinline__ float half_of(uint32_t word, int which, const Multipliers& by) {
  if constexpr (std::is_same_v<T, BF16>) return float_of(which ? word & 0xFFFF0000u : word * by.half_word);
  return float_of_f16(static_cast<uint16_t>(which ? word >> 16 : word & 0xFFFFu));
}

// Codes of a row's eight values; `words`: the draws of stochastic rounding.
template <bool STOCHASTIC, class T>
__device__ __forceinline__ uint32_t row_codes(const Pack<T>& row, float encode, uint32_t places, const Words& words,
                                              const Multipliers& by) {
  const uint32_t first = upper_bytes(row.word[0], row.word[1]), second = upper_bytes(row.word[2], row.word[3]);
  const auto magnitude = [&](int j) { return fabsf(half_of<T>(row.word[j / 2], j % 2, by)) * encode; };
  const uint32_t codes =
      STOCHASTIC ? stochastic_codes(magnitude, words, by.sixteen) : e2m1_codes(magnitude, by.sixteen);
  return signed_codes(codes, low_pairs(first, second), high_pairs(first, second), places);
}

}  // namespace octavo::cuda
