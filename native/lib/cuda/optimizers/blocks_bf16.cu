// AdamW's kernels for bf16 masters and moments of 8 bits.
#include "block_kernel.cuh"

namespace octavo::cuda {

template <>
void launch_block_steps<BF16>(const StepArgs& args, cudaStream_t stream) {
  args.step.arrays.grad_dtype == DType::f32 ? launch_block_written<BF16, F32>(args, stream)
                                            : launch_block_written<BF16, BF16>(args, stream);
}

}  // namespace octavo::cuda
