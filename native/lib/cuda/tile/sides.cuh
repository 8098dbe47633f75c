// A tile's outputs besides codes and scales: amax, column sums, and the values that were quantized.
#pragma once

#include "args.cuh"

namespace octavo::cuda {

// Column sums of the tile in a fixed order: a thread's eight rows, the two half warps, then the warps.
template <class T, class S, class Smem>
__device__ __forceinline__ void store_partial_sums(const TileArgs<S>& args, const Tile& tile, Smem& smem,
                                                   const Pack<T> (&values)[8]) {
  static_assert(sizeof(smem.panel) >= WARPS * TILE_COLS * sizeof(float));
  __syncthreads();  // the last tile's staged panel has been stored
  float* sums = reinterpret_cast<float*>(smem.panel);
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    float sum = values[0].value(j);
#pragma unroll
    for (int i = 1; i < 8; ++i) sum += values[i].value(j);
    sum += __shfl_down_sync(~0u, sum, 16);
    if (lane < 16) sums[warp * TILE_COLS + lane * 8 + j] = sum;
  }
  __syncthreads();
  const int column = static_cast<int>(threadIdx.x);
  if (column < TILE_COLS && tile.col0 + column < tile.end) {
    float sum = sums[column];
    for (int k = 1; k < WARPS; ++k) sum += sums[k * TILE_COLS + column];
    args.partial_sums[static_cast<int64_t>(tile.panel_index) * args.cols + tile.col0 + column] = sum;
  }
  __syncthreads();
}

// `args`: TileArgs or AmaxArgs.
template <bool WIDE, class T, class Args>
__device__ __forceinline__ void store_activated(const Args& args, const Tile& tile, const Pack<T> (&values)[8]) {
  if (tile.col() >= tile.end) return;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i >= tile.live_rows()) break;
    const int64_t at = (tile.first_row() + i) * args.cols + tile.col();
    if constexpr (WIDE) {
      Pack<T> pack = values[i];
      make_canonical(pack);
      store_pack(static_cast<char*>(args.activated) + at * Pack<T>::bytes, pack);
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if (tile.col() + j < tile.end) store_value<T>(args.activated, at + j, values[i].value(j));
    }
  }
}

template <bool WIDE, bool COLUMNS, class T, class S, class Smem>
__device__ __forceinline__ void side_outputs(const TileArgs<S>& args, const Tile& tile, Smem& smem,
                                             const Pack<T> (&values)[8]) {
  if (args.amax) {
    const uint32_t bits = warp_maximum(values);
    if (threadIdx.x % 32 == 0) raise(args.amax + tile.panel.group, bits);
  }
  if (args.activated) store_activated<WIDE>(args, tile, values);
  if constexpr (COLUMNS) {
    if (args.partial_sums) store_partial_sums(args, tile, smem, values);
  }
}

}  // namespace octavo::cuda
