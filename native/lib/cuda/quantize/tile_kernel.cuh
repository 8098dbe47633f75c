// The quantize kernel: a tile to rowwise codes, columnwise codes or both, in one pass over the input.
#pragma once

#include "cuda/tile/columns.cuh"
#include "cuda/tile/rows.cuh"
#include "cuda/tile/sides.cuh"

namespace octavo::cuda {

extern __shared__ __align__(16) unsigned char dynamic_smem[];

// CTAs per multiprocessor, and with it registers per thread: as many as fit without spilling. WIDE: loads and stores of
// eight neighbours are aligned; the other kernels are for odd shapes that no GEMM takes. HEAVY: how many features need
// more registers.
template <class S, bool COLUMNS, int HEAVY, bool WIDE>
constexpr int ctas() {
  if (!WIDE || Pack<typename S::Type>::bytes == 4 || S::inputs == 3) return 1;
  if (S::inputs == 2) return HEAVY ? 1 : 2;
  if (makes_halves<S> || joins_halves<S>) return HEAVY ? 1 : 2;
  if (is_interleaved<S>) return 2;  // twice the bytes are on their way
  constexpr int left = (COLUMNS || keeps_slots<S> ? 3 : 4) - HEAVY - (S::computes ? 1 : 0);
  return left < 1 ? 1 : left;
}

// Features that need more registers: random bits, in the rowwise kernel, which otherwise leaves fewer; the Hadamard
// transform; and the codes of all rows at once next to SwiGLU's slots.
template <class S, Kind K, bool COLUMNS, bool STOCHASTIC, bool HADAMARD>
constexpr int heavy() {
  return (STOCHASTIC && !COLUMNS ? 1 : 0) + (HADAMARD ? 1 : 0) +
         (K == Kind::known && keeps_slots<S> && !makes_halves<S> ? 1 : 0);
}

template <class S, Kind K, Format F, bool COLUMNS, bool STOCHASTIC, bool HADAMARD, bool WIDE>
__global__ void __launch_bounds__(THREADS, ctas<S, COLUMNS, heavy<S, K, COLUMNS, STOCHASTIC, HADAMARD>(), WIDE>())
    quantize_tile(const __grid_constant__ TileArgs<S> args) {
  using T = typename S::Type;
  constexpr int LANES = COLUMNS ? COLUMN_LANES : ROW_LANES;
  __shared__ std::conditional_t<COLUMNS, TileSmem<T, K, F>, Nothing> smem;
  __shared__ std::conditional_t<STOCHASTIC, DrawKeys, Nothing> keys;
  if (args.unchanged && *args.unchanged) return;
  if constexpr (STOCHASTIC) make_keys(args, keys);
  const auto work = [&](const Tile& tile, Pack<T>(&values)[8]) {
    side_outputs<WIDE, COLUMNS>(args, tile, smem, values);
    if constexpr (K == Kind::known) {
      const float scale = __ldg(args.encode + tile.panel.group), stored = decode_scale(scale);
      Codes<F> codes[8];
      if (args.poison_infinities) poison_infinities(values);
#pragma unroll
      for (int i = 0; i < 8; ++i) codes[i] = encode_row<F, false>(Draws{}, tile, i, values[i], scale);
      store_rows<WIDE, K>(args, tile, codes, stored);
      if constexpr (COLUMNS) {
        if (args.columnwise.codes) store_transposed(args, tile, smem, codes);
      }
    } else {
      const Draws draws = draws_of<STOCHASTIC>(args, tile, keys);
      quantize_rows<WIDE, K, F, STOCHASTIC>(args, tile, values, draws);
      if constexpr (COLUMNS) {
        if (args.columnwise.codes) quantize_columns<S, K, F, STOCHASTIC, HADAMARD>(args, tile, smem, values, draws);
      }
    }
  };
  const auto finish = [&](const Tile& tile) {
    if constexpr (COLUMNS) {
      if (!args.columnwise.codes) return;
      __syncthreads();
      store_columns<F, HADAMARD>(args, tile, smem);
    }
  };
  for_each_tile<LANES, WIDE>(args.source, args.tiles, args.reverse, args.cols, dynamic_smem, work, finish);
}

}  // namespace octavo::cuda
