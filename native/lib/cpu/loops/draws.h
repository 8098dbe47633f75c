// Loops that generate the random draws of stochastic rounding. Part of body.h, whose rules apply.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "octavo/numerics.h"

namespace octavo {
namespace {

// Philox for 8 counters side by side.
constexpr int LANES = 8;

#if defined(__AVX2__)
// The low halves of 64-bit lanes, which is where the 32 x 32-bit multiplier reads; the high halves hold anything.
void philox_lanes(uint32_t (*c)[LANES], uint32_t k0, uint32_t k1) {
  __m256i state[4][2];
  for (int word = 0; word < 4; ++word) {
    for (int half = 0; half < 2; ++half) {
      const auto* from = reinterpret_cast<const __m128i*>(c[word] + 4 * half);
      state[word][half] = _mm256_cvtepu32_epi64(_mm_loadu_si128(from));
    }
  }
  const __m256i multiplier0 = _mm256_set1_epi64x(0xD2511F53), multiplier1 = _mm256_set1_epi64x(0xCD9E8D57);
  for (int round = 0; round < 10; ++round) {
    const __m256i key0 = _mm256_set1_epi64x(k0), key1 = _mm256_set1_epi64x(k1);
    for (int half = 0; half < 2; ++half) {
      const __m256i first = _mm256_mul_epu32(state[0][half], multiplier0);
      const __m256i second = _mm256_mul_epu32(state[2][half], multiplier1);
      state[0][half] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(second, 32), state[1][half]), key0);
      state[2][half] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(first, 32), state[3][half]), key1);
      state[1][half] = second;
      state[3][half] = first;
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  const __m256i low_halves = _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6);
  for (int word = 0; word < 4; ++word) {
    for (int half = 0; half < 2; ++half) {
      const __m256i packed = _mm256_permutevar8x32_epi32(state[word][half], low_halves);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(c[word] + 4 * half), _mm256_castsi256_si128(packed));
    }
  }
}
#else
void philox_lanes(uint32_t (*c)[LANES], uint32_t k0, uint32_t k1) {
  for (int i = 0; i < LANES; ++i) {
    const Words words = philox(c[0][i], c[1][i], c[2][i], c[3][i], k0, k1);
    for (int word = 0; word < 4; ++word) c[word][i] = words.word[word];
  }
}
#endif

void draws_row(uint32_t row, uint32_t block, int64_t blocks, uint32_t stream, uint32_t group, const uint32_t* key,
               uint16_t* out) {
  for (int64_t b = 0; b < blocks; b += LANES / 2) {
    uint32_t c[4][LANES];
    for (int i = 0; i < LANES; ++i) {
      c[0][i] = row;
      c[1][i] = block + static_cast<uint32_t>(b) + static_cast<uint32_t>(i / 2);
      c[2][i] = stream + static_cast<uint32_t>(i & 1);
      c[3][i] = group;
    }
    philox_lanes(c, key[0], key[1]);
    uint16_t halves[LANES * 8];
    for (int i = 0; i < LANES; ++i) {
      for (int word = 0; word < 4; ++word) {
        halves[i * 8 + 2 * word] = static_cast<uint16_t>(c[word][i]);
        halves[i * 8 + 2 * word + 1] = static_cast<uint16_t>(c[word][i] >> 16);
      }
    }
    const int64_t left = 2 * (blocks - b);
    std::memcpy(out + b * 16, halves, static_cast<size_t>(left < LANES ? left : LANES) * 16);
  }
}

void draws_columns(uint32_t column, int64_t n, uint32_t block, uint32_t stream, uint32_t group, const uint32_t* key,
                   uint16_t* out, int64_t stride) {
  for (int64_t first = 0; first < n; first += LANES) {
    const int count = n - first < LANES ? static_cast<int>(n - first) : LANES;
    for (int half = 0; half < 2; ++half) {
      uint32_t c[4][LANES];
      for (int i = 0; i < LANES; ++i) {
        c[0][i] = column + static_cast<uint32_t>(first) + static_cast<uint32_t>(i);
        c[1][i] = block;
        c[2][i] = stream + static_cast<uint32_t>(half);
        c[3][i] = group;
      }
      philox_lanes(c, key[0], key[1]);
      for (int word = 0; word < 4; ++word) {
        uint16_t* low = out + (8 * half + 2 * word) * stride + first;
        for (int i = 0; i < count; ++i) {
          low[i] = static_cast<uint16_t>(c[word][i]);
          low[stride + i] = static_cast<uint16_t>(c[word][i] >> 16);
        }
      }
    }
  }
}

}  // namespace
}  // namespace octavo
