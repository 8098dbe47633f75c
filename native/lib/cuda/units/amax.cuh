// The amax pass before NVFP4's codes whose columns are transformed: amaxes of groups, and of their Hadamard transforms.
#pragma once

#include "hadamard.cuh"
#include "rows.cuh"

namespace octavo::cuda {

// CTAs that share a multiprocessor: as many as fit without spilling.
constexpr int AMAX_UNIT_CTAS = 5;

template <class T>
__global__ void __launch_bounds__(UNIT_THREADS, AMAX_UNIT_CTAS)
    amax_units(const __grid_constant__ AmaxArgs<Plain<T>> args) {
  using P = Pack<T>;
  __shared__ uint32_t partial[2][UNIT_WARPS];
  if (args.unchanged && *args.unchanged) return;
  Tile tile;
  if (!locate_tile(args, false, tile)) return;
  const Unit unit = Unit::of(tile);
  const Multipliers by = Multipliers::unknown(UNIT_THREADS);
  P values[UNIT_ROWS];
  read_unit(args.source, tile, unit, values);
  uint32_t plain = 0;
  if (args.group) plain = __reduce_max_sync(~0u, P::fp32_bits(unit_maximum(values), 0));
  const uint32_t transformed = __reduce_max_sync(~0u, hadamard_maximum(values, by));
  if (threadIdx.x % 32 == 0) partial[0][threadIdx.x / 32] = plain, partial[1][threadIdx.x / 32] = transformed;
  __syncthreads();
  // One atomic per CTA: those on one address are serialised.
  if (threadIdx.x < 2) {
    uint32_t bits = 0;
#pragma unroll
    for (int warp = 0; warp < UNIT_WARPS; ++warp) bits = max(bits, partial[threadIdx.x][warp]);
    uint32_t* const most = threadIdx.x ? args.hadamard : args.group;
    if (most) raise(most + tile.panel.group, bits > INF_BITS ? NAN_BITS : bits);
  }
}

}  // namespace octavo::cuda
