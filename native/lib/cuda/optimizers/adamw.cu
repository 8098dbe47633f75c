// AdamW's step: how the arrays are seen, and which kernel.
#include "octavo/adamw.h"

#include <algorithm>

#include "common/check.h"
#include "cuda/device/launch.h"
#include "cuda/device/packs.cuh"
#include "steps.cuh"

namespace octavo {

namespace cuda {
namespace {

Vector vector_of(const StepArgs& args) {
  const AdamWArrays& arrays = args.step.arrays;
  const int moment_bytes = args.step.in_blocks() ? 1 : 4;
  const auto fits = [&](int count) {
    const auto is_aligned = [&](const void* pointer, int bytes) {
      return aligned(pointer, std::min(count * bytes, 16));  // one access has 16 bytes at most
    };
    return arrays.cols % count == 0 && args.limit % count == 0 &&
           is_aligned(arrays.master, dtype_bytes(arrays.master_dtype)) &&
           is_aligned(arrays.grad, dtype_bytes(arrays.grad_dtype)) && is_aligned(arrays.moment[0], moment_bytes) &&
           is_aligned(arrays.moment[1], moment_bytes) && is_aligned(arrays.values, 2);
  };
  return fits(8) ? Vector::eight : fits(4) ? Vector::four : Vector::one;
}

// The kernels for vectors of eight count the bytes between rows in 32 bits.
bool by_eights(const StepArgs& args, Vector vector) {
  return args.step.in_blocks() && vector == Vector::eight && args.step.arrays.grad_dtype != DType::f16 &&
         args.step.arrays.cols < int64_t{1} << 24;
}

template <class M>
void launch(const StepArgs& args, Vector vector, cudaStream_t stream) {
  by_eights(args, vector) ? launch_block_steps<M>(args, stream) : launch_steps<M>(args, vector, stream);
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
  const cuda::Vector vector = cuda::vector_of(step);
  if (args.writes_codes() && vector == cuda::Vector::one) {
    return unsupported("columns or addresses are not of whole fours, in which codes are written; quantize afterwards");
  }
  const cudaStream_t on = cuda::stream_of(stream);
  if (args.arrays.master_dtype == DType::f32) {
    cuda::launch<cuda::F32>(step, vector, on);
  } else {
    cuda::launch<cuda::BF16>(step, vector, on);
  }
  return cuda::launched();
}

}  // namespace octavo
