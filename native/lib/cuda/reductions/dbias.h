// The second stage of dbias: column sums of panels to column sums of groups.
#pragma once

#include <cuda_runtime.h>

#include "octavo/types.h"

namespace octavo::cuda {

// out [G, C] = sums of partial [P][C], fp32, one row per panel, added in the order of the panels; 0 for a group without
// panels. Ragged rows take their panels from the plan, stacked matrices (matrix_rows) need none. If `unchanged` is not
// null and not 0 on the device, nothing is written.
Error sum_panels(const float* partial, float* out, int64_t rows, int64_t cols, int64_t groups, int64_t matrix_rows,
                 const int64_t* plan, const int32_t* unchanged, cudaStream_t stream);

}  // namespace octavo::cuda
