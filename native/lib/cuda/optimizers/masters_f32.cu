// AdamW's kernels for fp32 masters.
#include "kernel.cuh"

namespace octavo::cuda {

template <>
void launch_steps<F32>(const StepArgs& args, bool wide, cudaStream_t stream) {
  if (!wide) return launch_moments<F32, AnyDType, false>(args, stream);
  if (args.step.arrays.grad_dtype == DType::f32) return launch_moments<F32, F32, true>(args, stream);
  if (args.step.arrays.grad_dtype == DType::bf16) return launch_moments<F32, BF16, true>(args, stream);
  launch_moments<F32, AnyDType, true>(args, stream);
}

}  // namespace octavo::cuda
