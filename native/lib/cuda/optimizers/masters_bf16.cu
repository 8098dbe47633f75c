// AdamW's kernels for bf16 masters.
#include "kernel.cuh"

namespace octavo::cuda {

template <>
void launch_steps<BF16>(const StepArgs& args, Vector vector, cudaStream_t stream) {
  launch_pairs<BF16>(args, vector, stream);
}

}  // namespace octavo::cuda
