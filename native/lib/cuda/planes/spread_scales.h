// Scales of square blocks as scales of columns, for kernels that read one for each.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "octavo/plan.h"

namespace octavo::cuda {

// squares [panels][ceil(cols / 128)] to columns [panels][cols rounded up to 4], of the panels that the plan has: nobody
// has written scales of others.
void spread_scales(const float* squares, int64_t cols, int64_t panels, const PlanView& plan, float* columns,
                   cudaStream_t stream);

}  // namespace octavo::cuda
