// Tables of what a block's codes stand for, and codes to bf16 values by looking them up: every E2M1 code times every
// E4M3 scale is exact in bf16.
#pragma once

#include "staged.cuh"

namespace octavo::cuda {

// The low and the high bytes of the eight magnitudes of a block: of codes 0 to 3 and 4 to 7.
struct alignas(16) Magnitudes {
  uint32_t low[2], high[2];
};

// Of the block with this scale code. Zero stays zero under a NaN scale: rows past a group's end are zeros, and a
// poisoned block's own codes are not.
__device__ __forceinline__ Magnitudes magnitudes_of(uint32_t scale_code) {
  if ((scale_code & 0x7Fu) == 0x7Fu) return {{0xC0C0C000u, 0xC0C0C0C0u}, {0x7F7F7F00u, 0x7F7F7F7Fu}};
  const float scale = e4m3_value(static_cast<uint8_t>(scale_code));
  constexpr float of_code[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  Pack<BF16> all;
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) all.set(pair, of_code[2 * pair] * scale, of_code[2 * pair + 1] * scale);
  return {{__byte_perm(all.word[0], all.word[1], 0x6420), __byte_perm(all.word[2], all.word[3], 0x6420)},
          {__byte_perm(all.word[0], all.word[1], 0x7531), __byte_perm(all.word[2], all.word[3], 0x7531)}};
}

// Values of eight codes of one block.
__device__ __forceinline__ Pack<BF16> values_of(uint32_t codes, const Magnitudes& of) {
  Pack<BF16> values;
  const uint32_t even_signs = codes << 4;  // an even code's sign in the top bit of its byte, where an odd one's is
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t which = codes >> 16 * half & 0x7777u;
    const uint32_t low = __byte_perm(of.low[0], of.low[1], which), high = __byte_perm(of.high[0], of.high[1], which);
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const uint32_t magnitudes = __byte_perm(low, high, pair ? 0x7362 : 0x5140);
      const uint32_t byte = static_cast<uint32_t>(2 * half + pair);
      const uint32_t signs = __byte_perm(even_signs, codes, byte << 4 | (4 + byte) << 12);
      values.word[2 * half + pair] = magnitudes | (signs & 0x80008000u);
    }
  }
  return values;
}

__device__ __forceinline__ uint4 words_of(const Pack<BF16>& values) {
  return {values.word[0], values.word[1], values.word[2], values.word[3]};
}

// Stores the staged panel as values. `table` has the magnitudes of each scale code; `scale_at(column, unit)`: a
// block's.
template <class ScaleAt, class Stores = Put>
__device__ __forceinline__ void store_staged_values(const Plane& plane, const Tile& tile, int64_t cols,
                                                    const uint32_t* panel, const Magnitudes* table,
                                                    const ScaleAt& scale_at, const Stores& put = Stores{}) {
  constexpr uint32_t eights = PANEL_ROWS / 8;
  const uint32_t live_cols = min(tile.end - tile.col0, TILE_COLS);
  uint4* to = static_cast<uint4*>(plane.codes) + (static_cast<int64_t>(tile.panel_index) * cols + tile.col0) * eights +
              threadIdx.x;
#pragma unroll 4
  for (uint32_t step = 0; step < TILE_COLS * eights / UNIT_THREADS; ++step, to += UNIT_THREADS) {
    const uint32_t at = step * UNIT_THREADS + threadIdx.x, column = at / eights, unit = at % eights / 2;
    if (column >= live_cols) break;
    const uint32_t codes = panel[2 * StagedUnits::slot(column, unit) + at % 2];
    put(to, words_of(values_of(codes, table[scale_at(column, unit)])));
  }
}

}  // namespace octavo::cuda
