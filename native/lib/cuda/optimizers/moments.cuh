// Eight moments of a row in 8 bits, two at a time in the halves of words: the bits of moment_value and moment_code.
#pragma once

#include "rounding.cuh"
#include "steps.cuh"

namespace octavo::cuda {

// Whether a byte is zero; those of a first moment without their signs.
template <int MOMENT>
__device__ __forceinline__ uint32_t zero_bytes(uint32_t word) {
  if constexpr (MOMENT == 0) return ~((word & 0x7F7F7F7Fu) + 0x7F7F7F7Fu);
  return (word - 0x01010101u) & ~word;
}

// Whether the bits of a value are those of its code plus a number that is the same for the whole block, for every code
// but 0: none is then negative or reaches the sign bit.
template <int MOMENT>
__device__ __forceinline__ bool adds(int32_t top) {
  constexpr uint32_t least = MOMENT == 0 ? 126u : 254u;  // moment_levels less one
  return static_cast<uint32_t>(top) - least < 2048u - least;
}

// Bits 16 to 31 of the values of codes 0 and 2, or of 1 and 3.
template <int MOMENT, int ODD>
__device__ __forceinline__ uint32_t halves_of_codes(uint32_t word, uint32_t offset) {
  constexpr uint32_t magnitudes = MOMENT == 0 ? 0x007F007Fu : 0x00FF00FFu;
  uint32_t halves = ((word & magnitudes << 8) >> 4) + offset;
  // one multiplication, of which nvcc would make a shift and an addition
  if constexpr (!ODD) asm("mad.lo.u32 %0, %1, 16, %2;" : "=r"(halves) : "r"(word & magnitudes), "r"(offset));
  if constexpr (MOMENT == 0) halves |= (ODD ? word : word << 8) & 0x80008000u;
  return halves;
}

template <int MOMENT>
__device__ __forceinline__ void decode_eight(float (&values)[8], uint2 codes, int32_t top) {
  const uint32_t words[2] = {codes.x, codes.y};
  const uint32_t offset = static_cast<uint32_t>((top - moment_levels(MOMENT)) * 16 * 0x10001);
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const uint32_t even = halves_of_codes<MOMENT, 0>(words[k], offset);
    const uint32_t odd = halves_of_codes<MOMENT, 1>(words[k], offset);
    values[4 * k] = float_of(even << 16), values[4 * k + 2] = float_of(even & 0xFFFF0000u);
    values[4 * k + 1] = float_of(odd << 16), values[4 * k + 3] = float_of(odd & 0xFFFF0000u);
  }
}

template <int MOMENT>
__device__ __forceinline__ void decode_any(float (&values)[8], uint2 codes, int32_t top) {
#pragma unroll 1
  for (int i = 0; i < 8; ++i) {
    append(values, moment_value(MOMENT, codes.x & 0xFFu, top));
    codes = {__funnelshift_r(codes.x, codes.y, 8), codes.y >> 8};
  }
}

__device__ __forceinline__ void decode_moments(float (&first)[8], float (&second)[8], const uint2 (&codes)[2],
                                               const int32_t (&tops)[2]) {
  const uint32_t zeros =
      zero_bytes<0>(codes[0].x) | zero_bytes<0>(codes[0].y) | zero_bytes<1>(codes[1].x) | zero_bytes<1>(codes[1].y);
  decode_eight<0>(first, codes[0], tops[0]);
  decode_eight<1>(second, codes[1], tops[1]);
  if ((zeros & 0x80808080u) == 0 && adds<0>(tops[0]) && adds<1>(tops[1])) return;
  decode_any<0>(first, codes[0], tops[0]);
  decode_any<1>(second, codes[1], tops[1]);
}

// ---- encoding. A lane's draws of eight elements are four words, element i half i % 2 of word i / 2

// The block's largest magnitude, NaN above all.
__device__ __forceinline__ uint32_t largest_first(const float (&values)[8]) {
  float most = values[0];
#pragma unroll
  for (int i = 1; i < 8; ++i)
    asm("{\n.reg .f32 a, b;\nabs.f32 a, %1;\nabs.f32 b, %2;\nmax.NaN.f32 %0, a, b;\n}"
        : "=f"(most)
        : "f"(most), "f"(values[i]));
  return bits_of(most);
}

// Second moments have no sign, so that their bits are ordered.
__device__ __forceinline__ uint32_t largest_second(const float (&values)[8]) {
  uint32_t most = bits_of(values[0]);
#pragma unroll
  for (int i = 1; i < 7; i += 2) most = __vimax3_u32(most, bits_of(values[i]), bits_of(values[i + 1]));
  return max(most, bits_of(values[7]));
}

// The top of a block in which no number is very large, infinite or NaN.
__device__ __forceinline__ int32_t finite_top(uint32_t largest) {
  return static_cast<int32_t>((largest + ((1u << MOMENT_SHIFT) - 1)) >> MOMENT_SHIFT);
}

// Tops whose blocks have roots and quotients as elements.cuh wants them, if no code is too small: the largest first
// moment from 2^-64 to 2^60, the second from 2^-85 to 2^20. The top of 2^e is 8 (127 + e).
template <int MOMENT>
__device__ __forceinline__ bool is_plain(int32_t top) {
  constexpr uint32_t least = MOMENT == 0 ? 504u : 337u, most = MOMENT == 0 ? 1496u : 1176u;
  return static_cast<uint32_t>(top) - least <= most - least;
}

// Codes in bytes, of sums of magnitudes and draws less the offset of the block, in halves of words: in bits 4 to 11 of
// each, 0 where they were negative. `signs` gets the values' in the top bits of bytes. All are 0 if the top is not
// plain.
template <int MOMENT>
__device__ __forceinline__ uint2 codes_of(const float (&values)[8], int32_t top, const Words& draws, uint2& signs) {
  const int32_t offset = is_plain<MOMENT>(top) ? (moment_levels(MOMENT) - top) * 16 : -0x8000;
  const uint32_t offsets = __byte_perm(static_cast<uint32_t>(offset), 0, 0x1010);
  uint32_t halves[4], carried[4];
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    const uint32_t low = plus_draw<4>(bits_of(values[2 * pair]), draws.word[pair], 0);
    const uint32_t high = plus_draw<4>(bits_of(values[2 * pair + 1]), draws.word[pair], 1);
    carried[pair] = upper_halves(low, high);
    const uint32_t magnitudes = MOMENT == 0 ? carried[pair] & 0x7FFF7FFFu : carried[pair];
    halves[pair] = __viaddmax_s16x2_relu(magnitudes, offsets, 0u) >> 4;
  }
  signs = {__byte_perm(carried[0], carried[1], 0x7531), __byte_perm(carried[2], carried[3], 0x7531)};
  return {__byte_perm(halves[0], halves[1], 0x6420), __byte_perm(halves[2], halves[3], 0x6420)};
}

// A block's codes and top in one lane. `rare` is not 0 where roots and quotients of these moments are not as
// elements.cuh wants them.
struct Encoded {
  uint2 codes;
  int32_t top;
  uint32_t rare;
};

template <int MOMENT>
__device__ __forceinline__ void encode_any(Encoded& made, const float (&values)[8], uint32_t largest,
                                           const Words& draws) {
  made.top = moment_top(largest);
#pragma unroll 1
  for (int i = 0; i < 8; ++i) {
    const uint32_t draw = picked(draws.word, i / 2) >> (16 * (i % 2)) & 0xFFFFu;
    const uint32_t code = moment_code(MOMENT, picked(values, i), made.top, draw);
    made.codes = {__funnelshift_r(made.codes.x, made.codes.y, 8), made.codes.y >> 8 | code << 24};
  }
}

__device__ __forceinline__ Encoded encode_first(const float (&values)[8], uint32_t largest, const Words& draws) {
  Encoded made;
  made.top = finite_top(largest);
  uint2 signs;
  made.codes = codes_of<0>(values, made.top, draws, signs);
  made.rare = ((made.codes.x - 0x01010101u) | (made.codes.y - 0x01010101u)) & 0x80808080u;  // a code is 0
  made.codes.x |= signs.x & 0x80808080u;
  made.codes.y |= signs.y & 0x80808080u;
  if (made.rare) encode_any<0>(made, values, largest, draws);
  return made;
}

// A root is exact from the bits LEAST_ROOTED on. 1 is the code of whatever is smaller, too.
__device__ __forceinline__ Encoded encode_second(const float (&values)[8], uint32_t largest, const Words& draws) {
  Encoded made;
  made.top = finite_top(largest);
  uint2 signs;
  made.codes = codes_of<1>(values, made.top, draws, signs);
  // from 2 to 128, for which the bytes below it are told apart; with a top that is not plain all of them are
  const int32_t least_rooted = static_cast<int32_t>(LEAST_ROOTED >> MOMENT_SHIFT) + 1 + moment_levels(1) - made.top;
  const uint32_t leasts = static_cast<uint32_t>(min(max(2, least_rooted), 128)) * 0x01010101u;
  made.rare = (((made.codes.x - leasts) & ~made.codes.x) | ((made.codes.y - leasts) & ~made.codes.y)) & 0x80808080u;
  if (made.rare) encode_any<1>(made, values, largest, draws);
  return made;
}

}  // namespace octavo::cuda
