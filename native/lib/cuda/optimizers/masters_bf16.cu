// AdamW's kernels for bf16 masters.
#include "kernel.cuh"

namespace octavo::cuda {

template <>
void launch_steps<BF16>(const StepArgs& args, Together together, cudaStream_t stream) {
  launch_pairs<BF16>(args, together, stream);
}

}  // namespace octavo::cuda
