// AdamW's kernels for fp32 masters and moments of 8 bits.
#include "block_kernel.cuh"

namespace octavo::cuda {

template <>
void launch_block_steps<F32>(const StepArgs& args, cudaStream_t stream) {
  args.step.arrays.grad_dtype == DType::f32 ? launch_block_written<F32, F32>(args, stream)
                                            : launch_block_written<F32, BF16>(args, stream);
}

}  // namespace octavo::cuda
