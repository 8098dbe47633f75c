// NVFP4 in square blocks, of values that are two bytes each: the second level's amaxes and the codes in one launch.
// What it serves is what served_in_units says.
#pragma once

#include "cuda/device/hints.cuh"
#include "cuda/units/kernels.cuh"
#include "finish.cuh"

namespace octavo::cuda {

// Words that hold the largest magnitude of the thread's half of a 16 x 16 block, in both halves.
template <class T>
__device__ __forceinline__ uint32_t unit_maximum(const Pack<T> (&values)[UNIT_ROWS]) {
  using P = Pack<T>;
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < UNIT_ROWS; ++i)
#pragma unroll
    for (int k = 0; k < 4; ++k) most = P::maximum(most, values[i].word[k]);
  return P::across(most);
}

// quantize_square_units from the scales on, with hints for its stores. `most`: unit_maximum.
template <class T>
__device__ __forceinline__ void quantize_square_unit(const TileArgs<Plain<T>>& args, const Tile& tile, const Unit& unit,
                                                     const Pack<T> (&values)[UNIT_ROWS], uint32_t most,
                                                     const SecondLevel& level, const Multipliers& by, uint32_t* panel) {
  using P = Pack<T>;
  const PutOnce put;
  most = P::maximum(most, __shfl_xor_sync(~0u, most, 1));
  const uint32_t scale = scale_codes(P::fp32_bits(most, 0), 0, level.sixth) & 0xFFu;
  if (threadIdx.x % 2 == 0 && unit.live && tile.col() < tile.end) {
    const int64_t at = (tile.panel.first16 + unit.number) * ceil_div(args.cols, UNIT_ROWS) + tile.col() / UNIT_ROWS;
    if (args.rowwise.codes) static_cast<uint8_t*>(args.rowwise.scales)[at] = static_cast<uint8_t>(scale);
    if (!args.rowwise.codes || args.columnwise.scales != args.rowwise.scales)
      static_cast<uint8_t*>(args.columnwise.scales)[at] = static_cast<uint8_t>(scale);
  }
  const float encode = encode_scale_of(scale, level.factor);
  const uint32_t places = sign_places(level);
  const int live = tile.col() < tile.end ? unit.live : 0;
  const int64_t stride = args.cols / 2;
  uint8_t* to = static_cast<uint8_t*>(args.rowwise.codes) + (tile.panel.row0 + unit.row) * stride + tile.col() / 2;
  Codes<Format::e2m1> codes[2][8];
#pragma unroll
  for (int i = 0; i < UNIT_ROWS; ++i, to += stride) {
    const uint32_t made = row_codes<false>(values[i], encode, places, Words{}, by);
    if (args.rowwise.codes && i < live) put(to, made);
    codes[i / 8][i % 8].low = i < unit.live ? made : 0;  // a NaN scale has poisoned the zeros past the group's end
  }
  transpose(codes[0]);
  transpose(codes[1]);
#pragma unroll
  for (int j = 0; j < 8; ++j)
    StagedUnits::store(panel, threadIdx.x % COLUMN_LANES * 8 + j, unit.number, codes[0][j].low, codes[1][j].low);
  __syncthreads();
  const uint32_t live_cols = min(tile.end - tile.col0, TILE_COLS);
  uint4* const at = static_cast<uint4*>(args.columnwise.codes) +
                    (static_cast<int64_t>(tile.panel_index) * args.cols + tile.col0) * 4 + threadIdx.x;
#pragma unroll
  for (uint32_t step = 0; step < TILE_COLS * 4 / UNIT_THREADS; ++step) {
    const uint32_t column = step * (UNIT_THREADS / 4) + threadIdx.x / 4;
    if (column < live_cols) put(at + step * UNIT_THREADS, StagedUnits::quad(panel, column, threadIdx.x % 4));
  }
}

// CTAs that share a multiprocessor; six of them would spill.
constexpr int SQUARE_TURN_CTAS = 5;

template <class T>
__global__ void __launch_bounds__(UNIT_THREADS, SQUARE_TURN_CTAS)
    quantize_square_units_in_turns(const __grid_constant__ TurnArgs<Plain<T>> args) {
  __shared__ alignas(16) uint32_t panel[TILE_COLS * PANEL_ROWS / 8];
  __shared__ uint32_t partial[UNIT_WARPS];
  const TileArgs<Plain<T>>& of = args.tile;
  if (of.unchanged && *of.unchanged) return;
  Tile tile;
  tile.end = static_cast<int>(of.cols);
  bool codes_turn;
  if (!take_turn<COLUMN_LANES>(args.turns, tile, codes_turn)) return;
  const Unit unit = Unit::of(tile);
  const Multipliers by = Multipliers::unknown(UNIT_THREADS);
  const uint64_t policy = l2_policy(codes_turn);
  const int live = tile.col() < tile.end ? unit.live : 0;
  const char* from = of.source.address(0, tile.panel.row0 + unit.row, tile.col());
  const int64_t stride = of.source.row_bytes(0);
  Pack<T> values[UNIT_ROWS];
#pragma unroll
  for (int i = 0; i < UNIT_ROWS; ++i, from += stride) values[i] = i < live ? load_pack_by<T>(from, policy) : zeros<T>();
  const uint32_t most = unit_maximum(values);
  if (!codes_turn) {
    const uint32_t bits = __reduce_max_sync(~0u, Pack<T>::fp32_bits(most, 0));
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = bits;
    __syncthreads();
    if (threadIdx.x != 0) return;
    uint32_t all = 0;
#pragma unroll
    for (int warp = 0; warp < UNIT_WARPS; ++warp) all = max(all, partial[warp]);
    raise(args.group + tile.panel.group, all > INF_BITS ? NAN_BITS : all);
    finish_group<Kind::nvfp4, Format::e2m1>(args, tile.panel.group);
    return;
  }
  wait_until_ready(args.turns.of_groups + tile.panel.group);
  const SecondLevel* const made = of.row_levels + tile.panel.group;
  const SecondLevel level = {made_value(&made->sixth), made_value(&made->factor)};
  quantize_square_unit(of, tile, unit, values, most, level, by, panel);
}

}  // namespace octavo::cuda
