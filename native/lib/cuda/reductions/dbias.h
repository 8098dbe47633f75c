// The second stage of dbias: column sums of panels to column sums of groups.
#pragma once

#include <cuda_runtime.h>

#include "octavo/quantize.h"

namespace octavo::cuda {

// out [G, C] = sums of partial [P][C], fp32, one row per panel of x, added in the order of the panels; 0 for a group
// without panels. Ragged rows take their panels from the plan, stacked matrices (matrix_rows) need none. If `unchanged`
// is not null and not 0 on the device, nothing is written.
Error sum_panels(const float* partial, float* out, const Input& x, int64_t cols, const int32_t* unchanged,
                 cudaStream_t stream);

}  // namespace octavo::cuda
