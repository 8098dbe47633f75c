// Square blocks: one scale per B x B elements, so that columnwise codes are the transposed rowwise codes.
#pragma once

#include "tile_kernel.cuh"

namespace octavo::cuda {

// fp32 bits of the maximum magnitude of this thread's block.
template <int B, class T>
__device__ __forceinline__ uint32_t block_maximum(const Pack<T> (&values)[8], uint32_t (&partial)[WARPS * 4]) {
  uint32_t bits = thread_maximum(values);
  // The block's columns over the lanes of a half warp, then the two half warps.
#pragma unroll
  for (int step = 1; step < B / 8; step *= 2) bits = max(bits, __shfl_xor_sync(~0u, bits, step));
  bits = max(bits, __shfl_xor_sync(~0u, bits, 16));
  if constexpr (B > 16) {
    constexpr int across = TILE_COLS / B, warps = B / 16;
    const int warp = static_cast<int>(threadIdx.x / 32), block = static_cast<int>(threadIdx.x % 16) / (B / 8);
    if (threadIdx.x % 32 < 16 && threadIdx.x % (B / 8) == 0) partial[warp * across + block] = bits;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < warps; ++k) bits = max(bits, partial[(warp / warps * warps + k) * across + block]);
  }
  return bits;
}

// CTAs that share a multiprocessor. Where values are rounded first, the compiler would take registers that it can do
// without, and one CTA less would fit than of other sources.
template <class S, bool STOCHASTIC, bool WIDE>
constexpr int square_ctas() {
  return WIDE && !STOCHASTIC ? (Pack<typename S::Type>::bytes == 2 ? 2 : 1) + is_rounded<S> : 1;
}

template <class S, Kind K, Format F, bool COLUMNS, bool STOCHASTIC, bool WIDE>
__global__ void __launch_bounds__(THREADS, square_ctas<S, STOCHASTIC, WIDE>())
    quantize_square(const __grid_constant__ TileArgs<S> args) {
  using T = typename S::Type;
  constexpr int B = unit_size(K);
  __shared__ TileSmem<T, K, F> smem;
  __shared__ uint32_t partial[WARPS * 4];
  __shared__ std::conditional_t<STOCHASTIC, DrawKeys, Nothing> keys;
  if (args.unchanged && *args.unchanged) return;
  if constexpr (STOCHASTIC) make_keys(args, keys);
  const auto work = [&](const Tile& tile, Pack<T>(&values)[8]) {
    side_outputs<WIDE, true>(args, tile, smem, values);
    SecondLevel level{};
    if constexpr (K == Kind::nvfp4) level = args.row_levels[tile.panel.group];
    typename Scale<K>::Stored stored;
    const uint32_t amax = block_maximum<B>(values, partial);
    const float scale = Scale<K>::template encode_any<F>(amax, args.options, level, stored);
    if (tile.row() % B == 0 && tile.col() % B == 0 && tile.row() < tile.panel.rows && tile.col() < args.cols) {
      const int64_t first = B == 128 ? tile.panel_index : B == 32 ? tile.panel.first32 : tile.panel.first16;
      const int64_t at = (first + tile.row() / B) * ceil_div(args.cols, B) + tile.col() / B;
      using Stored = typename Scale<K>::Stored;
      if (args.rowwise.scales) static_cast<Stored*>(args.rowwise.scales)[at] = stored;
      if (args.columnwise.scales && args.columnwise.scales != args.rowwise.scales)
        static_cast<Stored*>(args.columnwise.scales)[at] = stored;
    }
    const Draws draws = draws_of<STOCHASTIC>(args, tile, keys);
    Codes<F> codes[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) codes[i] = encode_row<F, STOCHASTIC>(draws, tile, i, values[i], scale);
    store_rows<WIDE, K>(args, tile, codes, decode_of<K>(stored, level_of_values<K>(args, level)));
    if constexpr (K == Kind::mxfp8 && COLUMNS) {
      if (args.columnwise.layout == Layout::values && tile.row() % B == 0) {
        float* const to = smem.encode + tile.row() / B * ENCODE_STRIDE + (tile.col() - tile.col0);
#pragma unroll
        for (int j = 0; j < 8; ++j) to[j] = scale;
      }
    }
    if constexpr (COLUMNS) {
      if (args.columnwise.codes) store_transposed(args, tile, smem, codes);
    }
  };
  const auto finish = [&](const Tile& tile) {
    __syncthreads();  // the next tile overwrites `partial`
    if constexpr (COLUMNS) {
      if (args.columnwise.codes) store_columns<F, false>(args, tile, smem);
    }
  };
  for_each_tile<COLUMN_LANES, WIDE>(args.source, args.tiles, args.reverse, args.cols, dynamic_smem, work, finish);
}

}  // namespace octavo::cuda
