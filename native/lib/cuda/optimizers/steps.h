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
  uint32_t strides[3];         // bytes between every second row's gradients, masters, and codes of moments
  uint64_t values_from_codes;  // the address of values less twice that of the first moment's codes two rows below
  uint32_t panels_each;        // of 128 rows, of a matrix whose codes are written
  uint32_t across;             // blocks of 128 columns side by side
  int64_t ctas;
  int64_t limit;  // elements in all: the last row may have fewer than `cols`
};

// How many neighbouring elements always stand together at an address of whole such ones.
enum class Together { one, four, eight };

// M: F32 or BF16 (cuda/device/packs.cuh).
template <class M>
void launch_steps(const StepArgs& args, Together together, cudaStream_t stream);

// The same for moments in blocks, fp32 or bf16 gradients, and eight together.
template <class M>
void launch_block_steps(const StepArgs& args, cudaStream_t stream);

// `bytes` of dynamic shared memory.
template <class Kernel>
void launch_ctas(const Kernel& kernel, size_t bytes, const StepArgs& args, cudaStream_t stream) {
  if (bytes) cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  kernel<<<static_cast<unsigned>(args.ctas), STEP_THREADS, bytes, stream>>>(args);
}

}  // namespace octavo::cuda
