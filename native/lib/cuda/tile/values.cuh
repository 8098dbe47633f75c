// Codes to the bf16 values that a GEMM multiplies: code times scale, rounded once, NaN canonical.
#pragma once

#include "args.cuh"
#include "cuda/device/values.cuh"

namespace octavo::cuda {

// Four of eight codes, the first ones where `half` is 0: one byte each.
template <Format F>
__device__ __forceinline__ uint32_t four_codes(const Codes<F>& codes, int half) {
  if constexpr (F == Format::e2m1) {
    return spread_nibbles(codes.low >> 16 * half & 0xFFFFu);
  } else {
    return half ? codes.high : codes.low;
  }
}

template <Format F>
__device__ __forceinline__ Pack<BF16> values_of(const Codes<F>& codes, float scale) {
  Pack<BF16> pack;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float values[4];
    decode4<F>(four_codes(codes, half), values);
#pragma unroll
    for (int pair = 0; pair < 2; ++pair)
      pack.set(2 * half + pair, values[2 * pair] * scale, values[2 * pair + 1] * scale);
  }
  bool nan = scale != scale;
  if constexpr (F != Format::e2m1) {
    // 0x7F and 0xFF, the NaN that casts make, carry into the top bit.
    const uint32_t carried = ((codes.low & 0x7F7F7F7Fu) + 0x01010101u) | ((codes.high & 0x7F7F7F7Fu) + 0x01010101u);
    nan |= (carried & 0x80808080u) != 0;
  }
  if (nan) make_canonical(pack);
  return pack;
}

// Zeros where there are no codes: rows past a group's end, which a NaN scale has poisoned.
template <Format F>
__device__ __forceinline__ void clear_uncoded(const Codes<F>& codes, Pack<BF16>& values) {
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (code_at(codes, i) == 0) values.word[i / 2] &= i % 2 ? 0x0000FFFFu : 0xFFFF0000u;
}

// Stores the staged panel of MXFP8 codes as values. `smem.encode` has the encode scales of its units.
template <Format F, class S, class Smem>
__device__ __forceinline__ void store_column_values(const TileArgs<S>& args, const Tile& tile, const Smem& smem) {
  constexpr uint32_t chunks = PANEL_ROWS / 8, chunks_a_unit = unit_size(Kind::mxfp8) / 8;
  const uint32_t live_cols = min(tile.end - tile.col0, TILE_COLS);
  const int64_t first = static_cast<int64_t>(tile.panel_index) * args.cols + tile.col0;
  uint4* to = static_cast<uint4*>(args.columnwise.codes) + first * chunks + threadIdx.x;
#pragma unroll 4
  for (uint32_t step = 0; step < TILE_COLS * chunks / THREADS; ++step, to += THREADS) {
    const uint32_t at = step * THREADS + threadIdx.x, column = at / chunks, rows8 = at % chunks;
    if (column >= live_cols) break;
    const uint2 codes =
        reinterpret_cast<const uint2*>(smem.panel)[column * chunks + chunk_of(static_cast<int>(column), rows8)];
    const float scale = inverse_power_of_two(smem.encode[rows8 / chunks_a_unit * ENCODE_STRIDE + column]);
    Pack<BF16> values = values_of<F>({codes.x, codes.y}, scale);
    if (scale != scale) clear_uncoded<F>({codes.x, codes.y}, values);
    store_pack(to, values);
  }
}

}  // namespace octavo::cuda
