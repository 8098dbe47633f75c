// The dequantize launch without the argument checks of the entry point.
#pragma once

#include <cuda_runtime.h>

#include "octavo/dequantize.h"

namespace octavo::cuda {

// Like dequantize_cuda, but an NVFP4 plane may lack the second level, which is then 1.
Error launch_dequantize(const DequantizeArgs& args, cudaStream_t stream);

}  // namespace octavo::cuda
