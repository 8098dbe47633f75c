// AdamW's step: how the arrays are seen, and which kernel.
#include "octavo/adamw.h"

#include "cuda/device/launch.h"
#include "cuda/device/packs.cuh"
#include "steps.cuh"

namespace octavo {

namespace cuda {
namespace {

bool aligned_to(const void* pointer, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

Together together_of(const StepArgs& args) {
  const AdamWArrays& arrays = args.step.arrays;
  const int moment_bytes = args.step.in_blocks() ? 1 : 4;
  const auto stand = [&](unsigned count) {
    // 16 bytes at a time are loaded and stored
    const auto whole = [&](const void* pointer, int bytes) {
      const unsigned together = count * static_cast<unsigned>(bytes);
      return aligned_to(pointer, together < 16 ? together : 16);
    };
    return arrays.cols % count == 0 && args.limit % count == 0 &&
           whole(arrays.master, dtype_bytes(arrays.master_dtype)) &&
           whole(arrays.grad, dtype_bytes(arrays.grad_dtype)) && whole(arrays.moment[0], moment_bytes) &&
           whole(arrays.moment[1], moment_bytes) && whole(arrays.values, 2);
  };
  return stand(8) ? Together::eight : stand(4) ? Together::four : Together::one;
}

// The kernels for eight together count the bytes between rows in 32 bits.
bool by_eights(const StepArgs& args, Together together) {
  return args.step.in_blocks() && together == Together::eight && args.step.arrays.grad_dtype != DType::f16 &&
         args.step.arrays.cols < int64_t{1} << 24;
}

template <class M>
void launch(const StepArgs& args, Together together, cudaStream_t stream) {
  by_eights(args, together) ? launch_block_steps<M>(args, stream) : launch_steps<M>(args, together, stream);
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
  step.panels_each = static_cast<uint32_t>(ceil_div(matrix_rows, TILE_SIDE));
  step.across = static_cast<uint32_t>(ceil_div(arrays.cols, TILE_SIDE));
  // where they are used, a row has fewer than 2^24 elements
  const int64_t sizes[] = {dtype_bytes(arrays.grad_dtype), dtype_bytes(arrays.master_dtype), 1};
  for (int i = 0; i < 3; ++i) step.strides[i] = static_cast<uint32_t>(2 * arrays.cols * sizes[i]);
  step.values_from_codes = reinterpret_cast<uint64_t>(arrays.values) - 2 * reinterpret_cast<uint64_t>(arrays.moment[0]);
  step.ctas = args.writes_codes()
                  ? step.across * panel_bound(arrays.rows, arrays.rows / matrix_rows, matrix_rows)
                  : ceil_div(step.across * ceil_div(arrays.rows, int64_t{WARP_ROWS}), int64_t{STEP_WARPS});
  return step;
}

}  // namespace
}  // namespace cuda

Error adamw_cuda(const AdamWArgs& args, void* stream) {
  if (const Error error = check_adamw(args)) return error;
  if (args.arrays.rows == 0 || args.arrays.cols == 0) return {};
  const cuda::StepArgs step = cuda::step_args(args);
  const cuda::Together together = cuda::together_of(step);
  if (args.writes_codes() && together == cuda::Together::one) {
    return unsupported("columns or addresses are not of whole fours, in which codes are written; quantize afterwards");
  }
  const cudaStream_t on = cuda::stream_of(stream);
  if (args.arrays.master_dtype == DType::f32) {
    cuda::launch<cuda::F32>(step, together, on);
  } else {
    cuda::launch<cuda::BF16>(step, together, on);
  }
  return cuda::launched();
}

}  // namespace octavo
