// NVFP4 in square blocks of 16-bit values without a prologue: the second level's amaxes and the codes in one launch. It
// has the limits of `served_in_units`.
#pragma once

#include "cuda/units/square.cuh"
#include "finish.cuh"

namespace octavo::cuda {

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
  quantize_square_unit<false>(of, tile, unit, values, most, level, by, panel, PutOnce{});
}

}  // namespace octavo::cuda
