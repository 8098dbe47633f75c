// AdamW's step as its kernels get it, and which rows are whose. Kernels of each dtype of masters are compiled in a file
// of their own. A CTA takes one place and ends.
#pragma once

#include <cuda_runtime.h>

#include "octavo/adamw.h"

namespace octavo::cuda {

// What is written from the master.
enum class Written { nothing, values, codes };

constexpr int STEP_THREADS = 256, STEP_WARPS = STEP_THREADS / 32;
constexpr int TILE_SIDE = 128, WARP_ROWS = TILE_SIDE / STEP_WARPS;

// The keys of all rounds, made on the host: kernel parameters are in constant memory, from where an instruction takes
// an operand without a load.
struct PhiloxKeys {
  RoundKeys round[PHILOX_ROUNDS];
};

struct StepArgs {
  AdamWArgs step;
  PhiloxKeys keys;
  uint32_t strides[3];         // bytes between every second row's gradients, masters, and codes of moments
  uint64_t values_from_codes;  // the address of values less twice that of the first moment's codes
  uint32_t panels_each;        // of 128 rows, of a matrix whose codes are written
  uint32_t across;             // blocks of 128 columns side by side
  int64_t ctas;
  int64_t limit;  // elements in all: the last row may have fewer than `cols`
};

// The most neighbouring elements of a row that every array can be accessed by at once.
enum class Vector { one, four, eight };

// M: F32 or BF16 (cuda/device/packs.cuh).
template <class M>
void launch_steps(const StepArgs& args, Vector vector, cudaStream_t stream);

// The same for moments in blocks, fp32 or bf16 gradients, and vectors of eight.
template <class M>
void launch_block_steps(const StepArgs& args, cudaStream_t stream);

// `bytes` of dynamic shared memory.
template <class Kernel>
void launch_ctas(const Kernel& kernel, size_t bytes, const StepArgs& args, cudaStream_t stream) {
  if (bytes) cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  kernel<<<static_cast<unsigned>(args.ctas), STEP_THREADS, bytes, stream>>>(args);
}

// ---- where the rows of a CTA and of its warps are

// threadIdx.x, read anew: nvcc then recomputes what follows from it, and does not keep that in registers since its
// first use.
__device__ __forceinline__ uint32_t thread_again() {
  uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// A tile of 128 x 128, whose rows are of one matrix.
struct TilePlace {
  uint32_t panel, across;  // numbers of the tile's rows and columns of tiles
  int64_t first_row;
  int rows;  // up to 128 exist
};

// As stacked_panel, in 32 bits: a division of 64 is a subroutine.
__device__ __forceinline__ TilePlace tile_place(const StepArgs& args) {
  TilePlace place;
  place.panel = blockIdx.x / args.across, place.across = blockIdx.x - place.panel * args.across;
  const uint32_t matrix = place.panel / args.panels_each;
  const int64_t within = int64_t{place.panel - matrix * args.panels_each} * TILE_SIDE;
  place.first_row = matrix * args.step.codes.matrix_rows + within;
  place.rows = static_cast<int>(min(args.step.codes.matrix_rows - within, int64_t{TILE_SIDE}));
  return place;
}

// 16 rows of 128 columns.
struct WarpPlace {
  uint32_t across;  // number of the block of columns
  int64_t first_row;
  int rows;  // up to 16 exist; none if it is not above 0
};

// Of a tile whose codes are written, a warp has 16 rows. Otherwise the warps of a CTA are side by side, so that what
// they read and write at about the same time is next to each other in memory.
template <Written W>
__device__ __forceinline__ WarpPlace warp_place(const StepArgs& args, uint32_t warp) {
  WarpPlace place;
  if constexpr (W == Written::codes) {
    const TilePlace tile = tile_place(args);
    place.across = tile.across;
    place.first_row = tile.first_row + warp * WARP_ROWS;
    place.rows = min(tile.rows - static_cast<int>(warp) * WARP_ROWS, WARP_ROWS);
  } else {
    const uint32_t number = blockIdx.x * STEP_WARPS + warp, down = number / args.across;
    place.across = number - down * args.across;
    place.first_row = int64_t{down} * WARP_ROWS;
    place.rows = static_cast<int>(min(args.step.arrays.rows - place.first_row, int64_t{WARP_ROWS}));
  }
  return place;
}

}  // namespace octavo::cuda
