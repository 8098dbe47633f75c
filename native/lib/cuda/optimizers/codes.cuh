// A tile's codes, E4M3 with one scale for 128 x 128, in both planes: the bits of quantize_square (cuda/quantize).
#pragma once

#include "cuda/device/memory.cuh"
#include "cuda/device/packs.cuh"
#include "cuda/scaling/scales.cuh"
#include "steps.cuh"

namespace octavo::cuda {

struct NoTile {};

// A tile's new masters in bf16, 256 bytes per row, and later its columns of codes in the same memory.
struct MasterTile {
  alignas(16) uint4 values[TILE_SIDE * 16];
  uint32_t maxima[STEP_WARPS];

  // Values 4 lane to 4 lane + 3 of a row, or 8 lane to 8 lane + 7.
  __device__ uint2& four(int row, int lane) { return reinterpret_cast<uint2*>(values)[row * 32 + lane]; }
  __device__ uint4& eight(int row, int lane) { return values[row * 16 + lane]; }
  // The codes of 16 rows of a column, one warp's. Eight neighbouring lanes access eight different banks of 16 bytes.
  __device__ uint4& chunk(int column, int rows16) {
    return values[column * (TILE_SIDE / 16) + (rows16 ^ (column / 4 % 8))];
  }
};

// Of all threads' `most`, each the larger magnitudes of pairs. Magnitudes order like their bits; NaN is above all.
__device__ __forceinline__ uint32_t tile_maximum(MasterTile& tile, uint32_t thread, uint32_t most) {
  const uint32_t own = Pack<BF16>::fp32_bits(Pack<BF16>::across(most), 0);
  const uint32_t of_warp = __reduce_max_sync(~0u, own);
  if (thread % 32 == 0) tile.maxima[thread / 32] = of_warp;
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

// Called by the whole CTA once all its rows are in the tile, each thread with the maximum of those that it stored. Rows
// that do not exist have zero codes, whatever the scale.
__device__ __forceinline__ void write_codes(MasterTile& tile, uint32_t thread, uint32_t most, const AdamWCodes& out,
                                            int64_t cols, const TilePlace& place) {
  const int lane = static_cast<int>(thread % 32), warp = static_cast<int>(thread / 32);
  float stored;
  const ScaleOptions options = {out.amax_epsilon, out.power_of_two};
  const float scale =
      Scale<Kind::block>::encode_any<Format::e4m3>(tile_maximum(tile, thread, most), options, {}, stored);
  if (thread == 0) {
    const int64_t at = int64_t{place.panel} * ceil_div(cols, TILE_SIDE) + place.across;
    if (out.rowwise.codes) static_cast<float*>(out.rowwise.scales)[at] = stored;
    if (out.columnwise.codes) static_cast<float*>(out.columnwise.scales)[at] = stored;
  }
  const int64_t col = int64_t{place.across} * TILE_SIDE + lane * 4;
  const bool plain = out.columnwise.codes && out.columnwise.layout == Layout::plain;
  const uint64_t apart =
      reinterpret_cast<uint64_t>(out.columnwise.codes) - reinterpret_cast<uint64_t>(out.rowwise.codes);
  const int live_rows = place.rows - warp * WARP_ROWS, stored_rows = col < cols ? live_rows : 0;
  uint32_t column[4][WARP_ROWS / 4];
  const auto write_rows = [&](auto full) {
    const int64_t at = (place.first_row + warp * WARP_ROWS) * cols + col;
    // an address as a number, since there may be no rowwise codes
    auto codes = reinterpret_cast<uint64_t>(out.rowwise.codes) + at;
#pragma unroll
    for (int quad = 0; quad < WARP_ROWS / 4; ++quad) {
      uint32_t rows[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int row = 4 * quad + k;
        rows[k] = full || row < live_rows ? encode_four(tile.four(warp * WARP_ROWS + row, lane), scale) : 0u;
        if ((full || row < stored_rows) && out.rowwise.codes) store_global(reinterpret_cast<void*>(codes), rows[k]);
        if ((full || row < stored_rows) && plain) store_global(reinterpret_cast<void*>(codes + apart), rows[k]);
        codes += cols;
      }
      transpose_bytes(rows[0], rows[1], rows[2], rows[3]);
#pragma unroll
      for (int k = 0; k < 4; ++k) column[k][quad] = rows[k];
    }
  };
  if (stored_rows >= WARP_ROWS) {
    write_rows(std::true_type{});
  } else {
    write_rows(std::false_type{});
  }
  __syncthreads();  // every value has been read, and codes take their place
  if (out.columnwise.codes && !plain) {
#pragma unroll
    for (int k = 0; k < 4; ++k)
      tile.chunk(lane * 4 + k, warp) = {column[k][0], column[k][1], column[k][2], column[k][3]};
    __syncthreads();
    const int live = static_cast<int>(min(cols - int64_t{place.across} * TILE_SIDE, int64_t{TILE_SIDE}));
    uint4* to = reinterpret_cast<uint4*>(static_cast<uint8_t*>(out.columnwise.codes) +
                                         (place.panel * cols + int64_t{place.across} * TILE_SIDE) * TILE_SIDE);
#pragma unroll
    for (int step = 0; step < TILE_SIDE * TILE_SIDE / 16 / STEP_THREADS; ++step) {
      const int at = step * STEP_THREADS + static_cast<int>(thread), number = at / (TILE_SIDE / 16);
      if (number < live) to[at] = tile.chunk(number, at % (TILE_SIDE / 16));
    }
  }
}

}  // namespace octavo::cuda
