// AdamW's kernels for fp32 masters.
#include "kernel.cuh"

namespace octavo::cuda {

template <>
void launch_steps<F32>(const StepArgs& args, Vector vector, cudaStream_t stream) {
  launch_pairs<F32>(args, vector, stream);
}

}  // namespace octavo::cuda
