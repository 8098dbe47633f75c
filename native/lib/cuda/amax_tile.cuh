// The pass before quantizing, where a scale covers more than a tile: current and row scaling, NVFP4's second level.
#pragma once

#include "quantize_tile.cuh"

namespace octavo::cuda {

// group: each group's amax. hadamard: also that of its transformed columns. rows_and_columns: each row's, and each
// (group, column)'s.
enum class Amax { group, hadamard, rows_and_columns };

// All arrays hold fp32 bits and are zeroed before: an integer maximum orders magnitudes, NaN wins, order does not matter.
template <class Source>
struct AmaxArgs {
  Source source;
  Tiles tiles;
  int64_t panels;
  int64_t cols;
  uint32_t* group;     // [G]
  uint32_t* hadamard;  // [G]
  uint32_t* rows;      // [M] or null
  uint32_t* columns;   // [G, C] or null
  const int32_t* unchanged;
};

template <class S, Amax A, bool WIDE>
constexpr int amax_ctas() {
  return ctas<S, A != Amax::group, A == Amax::hadamard, WIDE>();
}

template <class S, Amax A, bool WIDE>
__global__ void __launch_bounds__(THREADS, amax_ctas<S, A, WIDE>())
    amax_tile(const __grid_constant__ AmaxArgs<S> args) {
  using T = typename S::Type;
  constexpr int LANES = A == Amax::group ? ROW_LANES : COLUMN_LANES;
  __shared__ uint32_t partial[TILE_COLS];
  if (args.unchanged && *args.unchanged) return;
  const bool leader = threadIdx.x % 32 == 0;
  const auto work = [&](const Place& place, Pack<T>(&values)[8]) {
    if constexpr (A != Amax::rows_and_columns) {
      const uint32_t bits = warp_maximum(values);
      if (leader && args.group) raise(args.group + place.panel.group, bits);
    }
    if constexpr (A == Amax::hadamard) {
      Pack<BF16> transformed[8];
      hadamard_rows(values, transformed);
      const uint32_t bits = warp_maximum(transformed);
      if (leader) raise(args.hadamard + place.panel.group, bits);
    }
    if constexpr (A == Amax::rows_and_columns) {
      if (args.rows) {
        const RowMaxima<T> maxima = row_maxima<16>(values);
#pragma unroll
        for (int i = 0; i < 8; ++i)
          if (threadIdx.x % 16 == i && i < place.live_rows()) raise(args.rows + place.first_row() + i, maxima.fp32_bits(i));
      }
      if (args.columns) {
        if (threadIdx.x < TILE_COLS) partial[threadIdx.x] = 0;
        __syncthreads();
        uint32_t words[Pack<T>::words];
        column_maxima(values, words);
        if (threadIdx.x % 32 < 16) {
#pragma unroll
          for (int j = 0; j < 8; ++j)
            atomicMax(partial + threadIdx.x % 16 * 8 + j,
                      Pack<T>::fp32_bits(words[j / Pack<T>::per_word], j % Pack<T>::per_word));
        }
        __syncthreads();
        const int64_t col = place.col0 + threadIdx.x;
        if (threadIdx.x < TILE_COLS && col < args.cols)
          raise(args.columns + place.panel.group * args.cols + col, partial[threadIdx.x]);
      }
    }
  };
  for_each_tile<LANES, WIDE>(args.source, args.tiles, false, args.cols, dynamic_shared, work);
}

}  // namespace octavo::cuda
