// A tile's codes, E4M3 with one scale for 128 x 128, in both planes: the bits of quantize_square (cuda/quantize).
#pragma once

#include "cuda/device/packs.cuh"
#include "cuda/scaling/scales.cuh"
#include "steps.h"

namespace octavo::cuda {

struct NoTile {};

// A tile's bf16 values, each thread's own, and then its columns of codes in the same memory.
struct CodeTile {
  // [row][lane]
  alignas(16) uint2 values[TILE_SIDE * 32];
  uint32_t maxima[STEP_WARPS];

  __device__ uint2& kept(int row) { return values[row * 32 + threadIdx.x % 32]; }
  __device__ void keep(int row, uint2 four) { kept(row) = four; }
  // 16 rows of a column: one warp's. Eight lanes in a row meet eight different banks of 16 bytes.
  __device__ uint4& chunk(int column, int rows16) {
    return reinterpret_cast<uint4*>(values)[column * (TILE_SIDE / 16) + (rows16 ^ (column / 4 % 8))];
  }
};

struct TilePlace {
  int64_t panel, across;  // numbers of the tile's rows and columns of tiles
  int64_t first_row;
  int rows;  // up to 128 exist
};

// Magnitudes order like their bits; NaN is above all.
__device__ __forceinline__ uint32_t tile_maximum(CodeTile& tile) {
  const int warp = static_cast<int>(threadIdx.x / 32);
  uint32_t most = 0;
#pragma unroll
  for (int row = 0; row < WARP_ROWS; ++row) {
    const uint2 four = tile.kept(warp * WARP_ROWS + row);
    most = Pack<BF16>::maximum(most, Pack<BF16>::maximum(four.x, four.y));
  }
  const uint32_t own = Pack<BF16>::fp32_bits(Pack<BF16>::across(most), 0);
  const uint32_t of_warp = __reduce_max_sync(~0u, own);
  if (threadIdx.x % 32 == 0) tile.maxima[warp] = of_warp;
  __syncthreads();
  uint32_t largest = 0;
#pragma unroll
  for (int k = 0; k < STEP_WARPS; ++k) largest = max(largest, tile.maxima[k]);
  return largest;
}

__device__ __forceinline__ uint32_t encode_four(uint2 four, float scale) {
  float scaled[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t word = i < 2 ? four.x : four.y;
    scaled[i] = float_of(i % 2 ? word & 0xFFFF0000u : word << 16) * scale;
  }
  return fp8_pair<Format::e4m3>(scaled[0], scaled[1]) | fp8_pair<Format::e4m3>(scaled[2], scaled[3]) << 16;
}

// Called by the whole CTA once all its rows are kept. Rows that do not exist have zero codes, whatever the scale.
__device__ __forceinline__ void write_codes(CodeTile& tile, const AdamWCodes& out, int64_t cols,
                                            const TilePlace& place) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  float stored;
  const ScaleOptions options = {out.amax_epsilon, out.power_of_two};
  const float scale = Scale<Kind::block>::encode_any<Format::e4m3>(tile_maximum(tile), options, {}, stored);
  if (threadIdx.x == 0) {
    const int64_t at = place.panel * ceil_div(cols, TILE_SIDE) + place.across;
    if (out.rowwise.codes) static_cast<float*>(out.rowwise.scales)[at] = stored;
    if (out.columnwise.codes) static_cast<float*>(out.columnwise.scales)[at] = stored;
  }
  const int64_t col = place.across * TILE_SIDE + lane * 4;
  const bool plain = out.columnwise.codes && out.columnwise.layout == Layout::plain;
  uint32_t column[4][WARP_ROWS / 4];
#pragma unroll
  for (int quad = 0; quad < WARP_ROWS / 4; ++quad) {
    uint32_t rows[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int row = warp * WARP_ROWS + 4 * quad + k;
      rows[k] = row < place.rows ? encode_four(tile.kept(row), scale) : 0u;
      if (row >= place.rows || col >= cols) continue;
      const int64_t at = (place.first_row + row) * cols + col;
      if (out.rowwise.codes) *reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(out.rowwise.codes) + at) = rows[k];
      if (plain) *reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(out.columnwise.codes) + at) = rows[k];
    }
    transpose4(rows[0], rows[1], rows[2], rows[3]);
#pragma unroll
    for (int k = 0; k < 4; ++k) column[k][quad] = rows[k];
  }
  __syncthreads();  // every kept value has been read
  if (out.columnwise.codes && !plain) {
#pragma unroll
    for (int k = 0; k < 4; ++k)
      tile.chunk(lane * 4 + k, warp) = {column[k][0], column[k][1], column[k][2], column[k][3]};
    __syncthreads();
    const int live = static_cast<int>(min(cols - place.across * TILE_SIDE, int64_t{TILE_SIDE}));
    uint4* to = reinterpret_cast<uint4*>(static_cast<uint8_t*>(out.columnwise.codes) +
                                         (place.panel * cols + place.across * TILE_SIDE) * TILE_SIDE);
#pragma unroll
    for (int step = 0; step < TILE_SIDE * TILE_SIDE / 16 / STEP_THREADS; ++step) {
      const int at = step * STEP_THREADS + static_cast<int>(threadIdx.x), number = at / (TILE_SIDE / 16);
      if (number < live) to[at] = tile.chunk(number, at % (TILE_SIDE / 16));
    }
    __syncthreads();  // the next tile's values overwrite the columns
  }
}

}  // namespace octavo::cuda
