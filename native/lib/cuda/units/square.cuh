// NVFP4 in square blocks: one scale per 16 x 16 values, so that columnwise codes are the transposed rowwise codes.
#pragma once

#include "cuda/tile/e2m1_rows.cuh"
#include "rows.cuh"
#include "scales.cuh"

namespace octavo::cuda {

// CTAs that share a multiprocessor: as many as fit without spilling.
constexpr int SQUARE_UNIT_CTAS = 6;

// What a tile of square blocks needs to store values.
struct SquareValues {
  Magnitudes table[SCALE_CODES];
  uint8_t scales[UNITS][BLOCKS_ACROSS];
};

// One scale per 16 x 16 values, so that columnwise codes are the transposed rowwise codes. `most`: unit_maximum.
// VALUES: a plane is of values, and there is `by_value` in smem.
template <bool VALUES, class T, class Stores>
__device__ __forceinline__ void quantize_square_unit(const TileArgs<Plain<T>>& args, const Tile& tile, const Unit& unit,
                                                     const Pack<T> (&values)[UNIT_ROWS], uint32_t most,
                                                     const SecondLevel& level, const Multipliers& by, uint32_t* panel,
                                                     const Stores& put, SquareValues* by_value = nullptr) {
  using P = Pack<T>;
  most = P::maximum(most, __shfl_xor_sync(~0u, most, 1));
  const uint32_t scale = scale_codes(P::fp32_bits(most, 0), 0, level.sixth) & 0xFFu;
  if (threadIdx.x % 2 == 0 && unit.live && tile.col() < tile.end) {
    const int64_t at = (tile.panel.first16 + unit.number) * ceil_div(args.cols, UNIT_ROWS) + tile.col() / UNIT_ROWS;
    if (args.rowwise.scales) static_cast<uint8_t*>(args.rowwise.scales)[at] = static_cast<uint8_t>(scale);
    if (args.columnwise.scales && args.columnwise.scales != args.rowwise.scales)
      static_cast<uint8_t*>(args.columnwise.scales)[at] = static_cast<uint8_t>(scale);
  }
  const float encode = encode_scale_of(scale, level.factor);
  const uint32_t places = sign_places(level);
  if constexpr (VALUES) {
    by_value->table[threadIdx.x] = magnitudes_of(threadIdx.x);
    by_value->scales[unit.number][threadIdx.x % COLUMN_LANES / 2] = static_cast<uint8_t>(scale);
    __syncthreads();
  }
  UnitRows<VALUES> rows(args, tile, unit);
  Codes<Format::e2m1> codes[2][8];
#pragma unroll
  for (int i = 0; i < UNIT_ROWS; ++i) {
    const uint32_t made = row_codes<false>(values[i], encode, places, Words{}, by);
    if (VALUES && rows.values()) {
      if (args.rowwise.codes) rows.store_values(i, made, by_value->table[scale], put);
    } else if (args.rowwise.codes) {
      rows.store(i, made, put);
    }
    codes[i / 8][i % 8].low = i < unit.live ? made : 0;  // a NaN scale has poisoned the zeros past the group's end
  }
  transpose(codes[0]);
  transpose(codes[1]);
#pragma unroll
  for (int j = 0; j < 8; ++j)
    StagedUnits::store(panel, threadIdx.x % COLUMN_LANES * 8 + j, unit.number, codes[0][j].low, codes[1][j].low);
  __syncthreads();
  if (VALUES && args.columnwise.layout == Layout::values) {
    store_staged_values(
        args.columnwise, tile, args.cols, panel, by_value->table,
        [&](uint32_t column, uint32_t of) { return by_value->scales[of][column / UNIT_ROWS]; }, put);
  } else {
    store_staged_units(args.columnwise, tile, args.cols, panel, put);
  }
}

// VALUES: a plane is of values, which need some registers more.
template <class T, bool VALUES>
__global__ void __launch_bounds__(UNIT_THREADS, SQUARE_UNIT_CTAS - (VALUES ? 1 : 0))
    quantize_square_units(const __grid_constant__ TileArgs<Plain<T>> args) {
  __shared__ alignas(16) uint32_t panel[TILE_COLS * PANEL_ROWS / 8];
  __shared__ std::conditional_t<VALUES, SquareValues, Nothing> by_value;
  if (args.unchanged && *args.unchanged) return;
  Tile tile;
  if (!locate_tile(args, args.reverse, tile)) return;
  const Unit unit = Unit::of(tile);
  const Multipliers by = Multipliers::unknown(UNIT_THREADS);
  Pack<T> values[UNIT_ROWS];
  read_unit(args.source, tile, unit, values);
  const SecondLevel level = args.row_levels[tile.panel.group];
  if constexpr (VALUES) {
    quantize_square_unit<true>(args, tile, unit, values, unit_maximum(values), level, by, panel, Put{}, &by_value);
  } else {
    quantize_square_unit<false>(args, tile, unit, values, unit_maximum(values), level, by, panel, Put{});
  }
}

}  // namespace octavo::cuda
