// Scales of square blocks as scales of columns, for kernels that read one for each.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace octavo::cuda {

// squares [panels][ceil(cols / 128)] to columns [panels][cols rounded up to 4].
void spread_scales(const float* squares, int64_t cols, int64_t panels, float* columns, cudaStream_t stream);

}  // namespace octavo::cuda
