// Loops that move codes. Part of body.h, whose rules apply.
#pragma once

#include "octavo/numerics.h"

namespace octavo {
namespace {

// Four 8 x 8 byte matrices side by side, row i of each a little-endian word in w[i], transposed by swapping halves,
// quarters, eighths.
constexpr int WORDS = 4;

template <int level>
void swap_bytes(uint64_t (*w)[WORDS]) {
  constexpr uint64_t masks[] = {0x00000000FFFFFFFFu, 0x0000FFFF0000FFFFu, 0x00FF00FF00FF00FFu};
  constexpr int step = 4 >> level, shift = 32 >> level;
  for (int i = 0; i < 8; ++i) {
    if (i & step) continue;
    for (int k = 0; k < WORDS; ++k) {
      const uint64_t moved = ((w[i][k] >> shift) ^ w[i + step][k]) & masks[level];
      w[i][k] ^= moved << shift;
      w[i + step][k] ^= moved;
    }
  }
}

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
uint64_t little(uint64_t word) { return __builtin_bswap64(word); }
#else
uint64_t little(uint64_t word) { return word; }
#endif

void transpose(const uint8_t* __restrict from, int64_t stride, int64_t n, uint8_t* __restrict to) {
  for (int64_t c = 0; c < n; c += 8 * WORDS) {
    for (int r = 0; r < 128; r += 8) {
      alignas(32) uint64_t words[8][WORDS];
      for (int i = 0; i < 8; ++i) std::memcpy(words[i], from + (r + i) * stride + c, 8 * WORDS);
      for (int i = 0; i < 8; ++i) {
        for (int k = 0; k < WORDS; ++k) words[i][k] = little(words[i][k]);
      }
      swap_bytes<0>(words);
      swap_bytes<1>(words);
      swap_bytes<2>(words);
      for (int k = 0; k < WORDS; ++k) {
        for (int i = 0; i < 8; ++i) {
          const uint64_t column = little(words[i][k]);
          std::memcpy(to + (c + 8 * k + i) * 128 + r, &column, 8);
        }
      }
    }
  }
}

void pack(const uint8_t* __restrict from, int64_t n, uint8_t* __restrict to) {
  for (int64_t i = 0; i < n; ++i) {
    to[i] = static_cast<uint8_t>((from[2 * i] & 0xFu) | static_cast<uint32_t>(from[2 * i + 1]) << 4);
  }
}

void unpack(const uint8_t* __restrict from, int64_t n, uint8_t* __restrict to) {
  for (int64_t i = 0; i < n; ++i) {
    to[2 * i] = from[i] & 0xFu;
    to[2 * i + 1] = from[i] >> 4;
  }
}

}  // namespace
}  // namespace octavo
