// AdamW's step as its kernels get it. Those of each dtype of masters are compiled in a file of their own.
#pragma once

#include <cuda_runtime.h>

#include "octavo/adamw.h"

namespace octavo::cuda {

// What is written from the master.
enum class Written { nothing, values, codes };

constexpr int STEP_THREADS = 256, STEP_WARPS = STEP_THREADS / 32;
constexpr int TILE_SIDE = 128, WARP_ROWS = TILE_SIDE / STEP_WARPS;

// Of all rounds, worked out on the host: operands in constant memory cost no instruction.
struct DrawKeys {
  RoundKeys round[PHILOX_ROUNDS];
};

struct StepArgs {
  AdamWArgs step;
  DrawKeys keys;
  uint32_t strides[4];         // bytes between every second row's gradients, masters, codes of moments, and their tops
  uint64_t values_from_codes;  // the address of values less twice that of the first moment's codes, modulo 2^64
  int64_t tops_apart;          // bytes from the first moment's tops to the second's
  uint32_t panels_each;        // of a matrix whose codes are written
  int64_t tiles, across;       // of 128 x 128, and how many of them are side by side
  int64_t limit;               // elements in all: the last row may have fewer than `cols`
};

// How many neighbouring elements always stand together at an address of whole such ones.
enum class Together { one, four, eight };

// M: F32 or BF16 (cuda/device/packs.cuh).
template <class M>
void launch_steps(const StepArgs& args, Together together, cudaStream_t stream);

// The same for moments in blocks, fp32 or bf16 gradients, and eight together.
template <class M>
void launch_block_steps(const StepArgs& args, cudaStream_t stream);

// As many CTAs as fit at once, which take the tiles in turns.
template <class Kernel>
void launch_tiles(const Kernel& kernel, const StepArgs& args, cudaStream_t stream) {
  int device = 0, processors = 1, ctas = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, kernel, STEP_THREADS, 0);
  const int64_t most = int64_t{processors} * (ctas > 0 ? ctas : 1);
  kernel<<<static_cast<unsigned>(args.tiles < most ? args.tiles : most), STEP_THREADS, 0, stream>>>(args);
}

}  // namespace octavo::cuda
