// The amax pass before quantizing, for scales that cover more than a tile: current and row scaling, NVFP4's second
// level.
#pragma once

#include "tile_kernel.cuh"

namespace octavo::cuda {

// group: the amax of each group. hadamard: also that of its Hadamard transform. rows_and_columns: of each row, and of
// each column of each group.
enum class Amax { group, hadamard, rows_and_columns };

template <class S, Amax A, bool WIDE>
constexpr int amax_ctas() {
  return ctas<S, A != Amax::group, A == Amax::hadamard ? 1 : 0, WIDE>();
}

template <class S, Amax A, bool WIDE>
__global__ void __launch_bounds__(THREADS, amax_ctas<S, A, WIDE>())
    amax_tile(const __grid_constant__ AmaxArgs<S> args) {
  using T = typename S::Type;
  constexpr int LANES = A == Amax::group ? ROW_LANES : COLUMN_LANES;
  __shared__ uint32_t partial[TILE_COLS];
  if (args.unchanged && *args.unchanged) return;
  // One atomic per CTA: those on one address are serialised.
  const auto raise_group = [&](uint32_t* most, uint32_t bits) {
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = bits;
    __syncthreads();
    if (threadIdx.x < WARPS) {
      bits = __reduce_max_sync((1u << WARPS) - 1u, partial[threadIdx.x]);
      if (threadIdx.x == 0) raise(most, bits);
    }
    __syncthreads();
  };
  const auto work = [&](const Tile& tile, Pack<T>(&values)[8]) {
    if constexpr (A != Amax::rows_and_columns) {
      if (args.group) raise_group(args.group + tile.panel.group, warp_maximum(values));
    }
    if constexpr (A == Amax::hadamard) {
      Pack<BF16> transformed[8];
      hadamard_rows(values, transformed);
      raise_group(args.hadamard + tile.panel.group, warp_maximum(transformed));
    }
    if constexpr (A == Amax::rows_and_columns) {
      if (args.activated) store_activated<WIDE>(args, tile, values);
      if (args.rows) {
        const int mine = static_cast<int>(threadIdx.x % COLUMN_LANES);
        const uint32_t bits = row_maxima<COLUMN_LANES>(values).fp32_bits(0);
        if (mine < tile.live_rows()) raise(args.rows + tile.first_row() + mine, bits);
      }
      if (args.columns) {
        if (threadIdx.x < TILE_COLS) partial[threadIdx.x] = 0;
        __syncthreads();
        uint32_t words[Pack<T>::words];
        column_maxima(values, words);
        if (threadIdx.x % 32 < 16) {
          uint32_t* const mine = partial + threadIdx.x % 16 * 8;
#pragma unroll
          for (int k = 0; k < Pack<T>::words; ++k)
#pragma unroll
            for (int half = 0; half < Pack<T>::per_word; ++half)
              atomicMax(mine + k * Pack<T>::per_word + half, Pack<T>::fp32_bits(words[k], half));
        }
        __syncthreads();
        const int64_t col = tile.col0 + threadIdx.x;
        if (threadIdx.x < TILE_COLS && col < args.cols)
          raise(args.columns + tile.panel.group * args.cols + col, partial[threadIdx.x]);
      }
    }
  };
  for_each_tile<LANES, WIDE>(args.source, args.tiles, false, args.cols, dynamic_smem, work, [](const Tile&) {});
}

}  // namespace octavo::cuda
