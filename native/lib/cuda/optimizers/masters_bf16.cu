// AdamW's kernels for bf16 masters.
#include "kernel.cuh"

namespace octavo::cuda {

template <>
void launch_steps<BF16>(const StepArgs& args, bool wide, cudaStream_t stream) {
  if (!wide) return launch_moments<BF16, AnyDType, false>(args, stream);
  if (args.step.arrays.grad_dtype == DType::f32) return launch_moments<BF16, F32, true>(args, stream);
  if (args.step.arrays.grad_dtype == DType::bf16) return launch_moments<BF16, BF16, true>(args, stream);
  launch_moments<BF16, AnyDType, true>(args, stream);
}

}  // namespace octavo::cuda
