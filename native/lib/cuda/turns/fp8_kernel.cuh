// Current and row scaling of 16-bit values without a prologue, amaxes and codes in one launch.
//
//   reads   2 B/element from device memory, and once more from the L2 cache
//   writes  1 B/element of each plane
//   bound   device memory, and waiting: docs/decisions/0064
#pragma once

#include "cuda/tile/columns.cuh"
#include "cuda/tile/raises.cuh"
#include "cuda/tile/rows.cuh"
#include "finish.cuh"

namespace octavo::cuda {

// K: known or rows, the latter with COLUMNS.
template <class T, Kind K, Format F, bool COLUMNS>
__global__ void __launch_bounds__(THREADS, COLUMNS ? 3 : 4)
    quantize_in_turns(const __grid_constant__ TurnArgs<Plain<T>> args) {
  constexpr int LANES = COLUMNS ? COLUMN_LANES : ROW_LANES;
  __shared__ std::conditional_t<COLUMNS, TileSmem<T, K, F>, Nothing> smem;
  __shared__ uint32_t partial[K == Kind::rows ? TILE_COLS : WARPS];
  const TileArgs<Plain<T>>& of = args.tile;
  if (of.unchanged && *of.unchanged) return;
  Tile tile;
  tile.end = static_cast<int>(of.cols);
  bool codes_turn;
  if (!take_turn<LANES>(args.turns, tile, codes_turn)) return;
  const bool some = tile.first < tile.panel.rows;
  const int live = tile.col() < tile.end ? tile.live_rows() : 0;
  Pack<T> values[8];
  if (some) {
    const uint64_t policy = l2_policy(codes_turn);
    const char* from = of.source.address(0, tile.first_row(), tile.col());
    const int64_t stride = of.source.row_bytes(0);
#pragma unroll
    for (int i = 0; i < 8; ++i, from += stride) values[i] = i < live ? load_pack_by<T>(from, policy) : zeros<T>();
  }
  if (!codes_turn) {
    if constexpr (K == Kind::rows) {
      if (args.rows) raise_rows(args.rows, tile, values);
      if (args.columns) raise_columns(args.columns, of.cols, tile, values, partial);
      __syncthreads();
      if (threadIdx.x < 32) finish_rows_and_columns<F>(args, tile);
    } else {
      if (some) raise_by_cta(args.group + tile.panel.group, warp_maximum(values), partial);
      if (threadIdx.x == 0) finish_group<K, F>(args, tile.panel.group);
    }
    return;
  }
  if (!some) return;
  const PutOnce put;
  uint8_t* to = static_cast<uint8_t*>(of.rowwise.codes) + tile.first_row() * of.cols + tile.col();
  const auto store_row = [&](int i, const Codes<F>& codes) {
    if (i < live) put(to, uint2{codes.low, codes.high});
    to += of.cols;
  };
  if constexpr (K == Kind::known) {
    wait_until_ready(args.turns.of_groups + tile.panel.group);
    const float scale = made_value(of.encode + tile.panel.group);
    Codes<F> codes[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) codes[i] = encode_row<F, false>(Draws{}, tile, i, values[i], scale);
    if (of.rowwise.codes) {
#pragma unroll
      for (int i = 0; i < 8; ++i) store_row(i, codes[i]);
    }
    if constexpr (COLUMNS) {
      if (of.columnwise.codes) store_transposed(of, tile, smem, codes);
    }
  } else {
    if (args.rows) wait_until_ready(args.turns.of_panels + tile.panel_index);
    if (args.columns) wait_until_ready(count_of_columns(args.turns, tile));
    if (args.rows && is_live(tile)) {
      float encode[8];
#pragma unroll
      for (int i = 0; i < 8; ++i)
        encode[i] = i < tile.live_rows() ? made_value(of.encode_rows + tile.first_row() + i) : 1.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) store_row(i, encode_row<F, false>(Draws{}, tile, i, values[i], encode[i]));
    }
    if (args.columns) {
      const float* const from = of.encode_cols + tile.panel.group * of.cols + tile.col();
      const bool inside = tile.col() < tile.end;
      stage_columns<F, false, false>(tile, smem, values, Draws{}, [&](int half) {
        return inside ? made_values(from + 4 * half) : float4{1.0f, 1.0f, 1.0f, 1.0f};
      });
    }
  }
  if constexpr (COLUMNS) {
    if (!of.columnwise.codes) return;
    __syncthreads();
    store_columns<F, false>(of, tile, smem, put);
  }
}

}  // namespace octavo::cuda
