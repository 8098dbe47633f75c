// Column codes and scales of a tile in smem, and their stores as whole columns and rows.
#pragma once

#include "cuda/device/hints.cuh"
#include "unit.cuh"

namespace octavo::cuda {

// Column codes of a tile as units of eight bytes: two columns in a row of 16, swizzled by the lane that holds the
// columns, so that a half warp writes to all banks at once.
struct StagedUnits {
  static __device__ uint32_t slot(uint32_t column, uint32_t unit) {
    return column / 2 * 16 + ((column % 2 * 8 + unit) ^ (column / 8 % 16));
  }

  static __device__ void store(uint32_t* panel, uint32_t column, uint32_t unit, uint32_t low, uint32_t high) {
    reinterpret_cast<uint2*>(panel)[slot(column, unit)] = {low, high};
  }

  // Units 2 q and 2 q + 1.
  static __device__ uint4 quad(const uint32_t* panel, uint32_t column, uint32_t q) {
    const uint32_t at = slot(column, 2 * q);
    const uint4 two = reinterpret_cast<const uint4*>(panel)[at / 2];
    return at % 2 ? uint4{two.z, two.w, two.x, two.y} : two;
  }
};

template <class Stores = Put>
__device__ __forceinline__ void store_staged_units(const Plane& plane, const Tile& tile, int64_t cols,
                                                   const uint32_t* panel, const Stores& put = Stores{}) {
  const uint32_t live_cols = min(tile.end - tile.col0, TILE_COLS);
  uint4* to =
      static_cast<uint4*>(plane.codes) + (static_cast<int64_t>(tile.panel_index) * cols + tile.col0) * 4 + threadIdx.x;
#pragma unroll
  for (uint32_t step = 0; step < TILE_COLS * 4 / UNIT_THREADS; ++step) {
    const uint32_t column = step * (UNIT_THREADS / 4) + threadIdx.x / 4;
    if (column < live_cols) put(to + step * UNIT_THREADS, StagedUnits::quad(panel, column, threadIdx.x % 4));
  }
}

// Eight staged scales, 128 bytes apart, of which the first `count` are stored side by side.
__device__ __forceinline__ void store_staged_scales(const uint8_t* from, uint8_t* to, int count) {
  uint32_t words[2] = {};
#pragma unroll
  for (int k = 0; k < 8; ++k) words[k / 4] |= static_cast<uint32_t>(from[k * 128]) << 8 * (k % 4);
  if (count == 8 && reinterpret_cast<uintptr_t>(to) % 8 == 0) {
    *reinterpret_cast<uint2*>(to) = {words[0], words[1]};
    return;
  }
#pragma unroll
  for (int k = 0; k < 8; ++k)
    if (k < count) to[k] = static_cast<uint8_t>(words[k / 4] >> 8 * (k % 4));
}

}  // namespace octavo::cuda
