// The dequantizing launch without the checks of the entry point.
#pragma once

#include <cuda_runtime.h>

#include "octavo/dequantize.h"

namespace octavo::cuda {

// As dequantize_cuda, and NVFP4 without a second level where the plane has none.
Error launch_dequantize(const DequantizeArgs& args, cudaStream_t stream);

}  // namespace octavo::cuda
