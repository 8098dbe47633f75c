// Scales from amaxes that a launch itself has gathered, by the CTA whose tile was the last of them. Those of nothing,
// for groups and rows without a tile, are written before (order.cuh).
#pragma once

#include "turns.cuh"

namespace octavo::cuda {

template <Format F>
__device__ __forceinline__ float finished_scale(uint32_t* bits, uint32_t amax, const ScaleOptions& options) {
  const float encode = fp32_scale(amax, format_max(F), options.epsilon, options.power_of_two);
  *bits = bits_of(encode);
  return decode_scale(encode);
}

// A tile's amax of a group is there; by the thread that has raised it.
template <Kind K, Format F, class S>
__device__ __forceinline__ void finish_group(const TurnArgs<S>& args, int group) {
  uint32_t* const left = args.turns.of_groups + group;
  if (!count_down(left)) return;
  const uint32_t bits = __ldcg(args.group + group);
  float stored;
  if constexpr (K == Kind::known) {
    stored = finished_scale<F>(args.group + group, bits, args.tile.options);
  } else {
    const float global = nvfp4_global(bits);
    stored = decode_scale(global);
    args.levels[group] = {nvfp4_sixth(global), stored};
  }
  if (args.row_out) args.row_out[group] = stored;
  if (args.col_out) args.col_out[group] = stored;
  if (args.amax) args.amax[group] = canonical(float_of(bits));
  set_ready(left);
}

// The scales of up to 128 neighbours, by a warp.
template <Format F>
__device__ __forceinline__ void finish_scales_of(uint32_t* bits, float* stored, int count,
                                                 const ScaleOptions& options) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  uint32_t amax[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) amax[k] = lane + 32 * k < count ? __ldcg(bits + lane + 32 * k) : 0;
#pragma unroll
  for (int k = 0; k < 4; ++k)
    if (lane + 32 * k < count) stored[lane + 32 * k] = finished_scale<F>(bits + lane + 32 * k, amax[k], options);
}

// A tile's amaxes of rows and columns are there; by the CTA's first warp, after the barrier that follows them.
template <Format F, class S>
__device__ __forceinline__ void finish_rows_and_columns(const TurnArgs<S>& args, const Tile& tile) {
  static_assert(PANEL_ROWS <= 128 && TILE_COLS <= 128);
  uint32_t* const left = threadIdx.x ? count_of_columns(args.turns, tile) : args.turns.of_panels + tile.panel_index;
  const bool counts = threadIdx.x == 0 ? args.rows != nullptr : threadIdx.x == 1 && args.columns;
  const bool last = counts && count_down(left);
  const uint32_t lasts = __ballot_sync(~0u, last);
  __syncwarp();  // what the counting lane has acquired is read by all: a ballot alone orders no memory
  const ScaleOptions& options = args.tile.options;
  const int64_t row = tile.panel.row0, column = tile.panel.group * args.tile.cols + tile.col0;
  if (lasts & 1u) finish_scales_of<F>(args.rows + row, args.row_out + row, tile.panel.rows, options);
  if (lasts & 2u)
    finish_scales_of<F>(args.columns + column, args.col_out + column, min(tile.end - tile.col0, TILE_COLS), options);
  __syncwarp();
  if (last) set_ready(left);
}

}  // namespace octavo::cuda
