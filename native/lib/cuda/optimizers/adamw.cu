// AdamW's step: how the arrays are seen, and which kernel.
#include "octavo/adamw.h"

#include "cuda/device/launch.h"
#include "cuda/device/packs.cuh"
#include "steps.h"

namespace octavo {

namespace cuda {
namespace {

bool aligned_to(const void* pointer, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

// Whether every four elements stand at an address of whole fours.
bool is_wide(const StepArgs& args) {
  const AdamWArrays& arrays = args.step.arrays;
  const auto fours = [](const void* pointer, int bytes) {
    return aligned_to(pointer, 4u * static_cast<unsigned>(bytes));
  };
  const int moment_bytes = args.step.in_blocks() ? 1 : 4;
  return arrays.cols % 4 == 0 && args.limit % 4 == 0 && fours(arrays.master, dtype_bytes(arrays.master_dtype)) &&
         fours(arrays.grad, dtype_bytes(arrays.grad_dtype)) && fours(arrays.moment[0], moment_bytes) &&
         fours(arrays.moment[1], moment_bytes) && fours(arrays.values, 2);
}

StepArgs step_args(const AdamWArgs& args) {
  StepArgs step;
  step.step = args;
  for (uint32_t round = 0; round < PHILOX_ROUNDS; ++round)
    step.keys.round[round] =
        round_keys(static_cast<uint32_t>(args.draws.seed), static_cast<uint32_t>(args.draws.seed >> 32), round);
  AdamWArrays& arrays = step.step.arrays;
  step.limit = arrays.rows * arrays.cols;
  // Where no position counts, rows may have any length: those of a tile leave no lane idle.
  if (!args.draws_bits() && !args.writes_codes()) {
    arrays.cols = TILE_SIDE;
    arrays.rows = ceil_div(step.limit, TILE_SIDE);
  }
  const int64_t matrix_rows = args.writes_codes() ? args.codes.matrix_rows : arrays.rows;
  step.across = ceil_div(arrays.cols, TILE_SIDE);
  step.tiles = step.across * panel_bound(arrays.rows, arrays.rows / matrix_rows, matrix_rows);
  return step;
}

}  // namespace
}  // namespace cuda

Error adamw_cuda(const AdamWArgs& args, void* stream) {
  if (const Error error = check_adamw(args)) return error;
  if (args.arrays.rows == 0 || args.arrays.cols == 0) return {};
  const cuda::StepArgs step = cuda::step_args(args);
  const bool wide = cuda::is_wide(step);
  if (args.writes_codes() && !wide) {
    return unsupported("columns or addresses are not of whole fours, in which codes are written; quantize afterwards");
  }
  const cudaStream_t on = cuda::stream_of(stream);
  if (args.arrays.master_dtype == DType::f32) {
    cuda::launch_steps<cuda::F32>(step, wide, on);
  } else {
    cuda::launch_steps<cuda::BF16>(step, wide, on);
  }
  return cuda::launched();
}

}  // namespace octavo
