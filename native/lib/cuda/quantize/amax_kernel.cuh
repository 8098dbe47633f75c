// The amax pass before quantizing, for scales that cover more than a tile: current and row scaling, NVFP4's second
// level.
#pragma once

#include "cuda/tile/raises.cuh"
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
  const auto raise_group = [&](uint32_t* most, uint32_t bits) {
    raise_by_cta(most, bits, partial);
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
      if (args.rows) raise_rows(args.rows, tile, values);
      if (args.columns) raise_columns(args.columns, args.cols, tile, values, partial);
    }
  };
  for_each_tile<LANES, WIDE>(args.source, args.tiles, false, args.cols, dynamic_smem, work, [](const Tile&) {});
}

}  // namespace octavo::cuda
