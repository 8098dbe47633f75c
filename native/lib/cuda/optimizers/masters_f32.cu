// AdamW's kernels for fp32 masters.
#include "kernel.cuh"

namespace octavo::cuda {

template <>
void launch_steps<F32>(const StepArgs& args, Together together, cudaStream_t stream) {
  launch_pairs<F32>(args, together, stream);
}

}  // namespace octavo::cuda
