// Random bits for stochastic rounding of a tile.
#pragma once

#include "args.cuh"

namespace octavo::cuda {

// The keys of all Philox rounds. Recomputing them for every eight draws would be a third of the generator's
// instructions.
struct DrawKeys {
  alignas(16) RoundKeys round[PHILOX_ROUNDS];
};

// Called by the whole CTA before anything draws.
template <class S>
__device__ __forceinline__ void make_keys(const TileArgs<S>& args, DrawKeys& keys) {
  if (threadIdx.x < PHILOX_ROUNDS)
    keys.round[threadIdx.x] = round_keys(__ldg(args.seed), __ldg(args.seed + 1), threadIdx.x);
  __syncthreads();
}

// The random draws of one group.
struct Draws {
  const DrawKeys* keys;
  uint32_t group;
  Operand operand;

  // The eight draws of half a block; `outer` and `block` are the counter's first words.
  __device__ Words operator()(uint32_t outer, uint32_t block, Direction direction, int half) const {
    // Keeps the compiler from interleaving the rounds of several blocks, for which there are no registers.
    asm volatile("" ::: "memory");
    const uint4* pairs = reinterpret_cast<const uint4*>(keys->round);
    uint4 pair;
    return philox(outer, block, draw_stream(direction, half, operand), group, [&](int round) {
      if (round % 2 == 0) pair = pairs[round / 2];
      return round % 2 == 0 ? RoundKeys{pair.x, pair.y} : RoundKeys{pair.z, pair.w};
    });
  }
};

template <bool STOCHASTIC, class S, class Keys>
__device__ __forceinline__ Draws draws_of(const TileArgs<S>& args, const Tile& tile, const Keys& keys) {
  if constexpr (STOCHASTIC) {
    const uint32_t offset = args.group_offset + (args.group_offset_device ? __ldg(args.group_offset_device) : 0u);
    return {&keys, static_cast<uint32_t>(tile.panel.group) + offset, args.operand};
  } else {
    return {};
  }
}

}  // namespace octavo::cuda
