// Row statistics of RMSNorm and LayerNorm.
#pragma once

#include <cuda_runtime.h>

#include "octavo/types.h"

namespace octavo::cuda {

// mean [rows] and its rounding error (LayerNorm only), and rstd [rows] of x [rows, cols], whose rows are `row_stride`
// elements apart. With a plan, rows past its sum are neither read nor written. If `unchanged` is not null and not 0 on
// the device, nothing is written.
Error norm_statistics(const void* x, DType dtype, int64_t rows, int64_t cols, int64_t row_stride, Norm norm,
                      float epsilon, float* mean, float* rest, float* rstd, const int64_t* plan,
                      const int32_t* unchanged, cudaStream_t stream);

}  // namespace octavo::cuda
