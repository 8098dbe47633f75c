// AdamW's step as its kernels get it. Those of each dtype of masters are compiled in a file of their own.
#pragma once

#include <cuda_runtime.h>

#include "octavo/adamw.h"

namespace octavo::cuda {

constexpr int STEP_THREADS = 256, STEP_WARPS = STEP_THREADS / 32;
constexpr int TILE_SIDE = 128, WARP_ROWS = TILE_SIDE / STEP_WARPS;

// Of all rounds, worked out on the host: operands in constant memory cost no instruction.
struct DrawKeys {
  RoundKeys round[PHILOX_ROUNDS];
};

struct StepArgs {
  AdamWArgs step;
  DrawKeys keys;
  int64_t tiles, across;  // of 128 x 128, and how many of them are side by side
  int64_t limit;          // elements in all: the last row may have fewer than `cols`
};

// `wide`: every four elements stand at an address of whole fours. M: F32 or BF16 (cuda/device/packs.cuh).
template <class M>
void launch_steps(const StepArgs& args, bool wide, cudaStream_t stream);

}  // namespace octavo::cuda
