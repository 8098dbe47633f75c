// Row statistics of RMSNorm and LayerNorm.
#pragma once

#include <cuda_runtime.h>

#include "octavo/quantize.h"

namespace octavo::cuda {

// [rows] fp32 each. LayerNorm has a mean, and what its rounding lost, which matters where x - mean cancels; rstd is 1 /
// sqrt(mean(x^2) + epsilon), of LayerNorm that of (x - mean)^2: the biased variance.
struct NormStatistics {
  float* mean;
  float* rest;
  float* rstd;
};

// The statistics of x under the norm of `prologue`. numerics.md allows them 4 ulp before the one rounding; they are not
// a set of bits. With a plan, rows past its sum are neither read nor written. If `unchanged` is not null and not 0 on
// the device, nothing is written.
Error norm_statistics(const Input& x, const Prologue& prologue, const NormStatistics& to, const int32_t* unchanged,
                      cudaStream_t stream);

}  // namespace octavo::cuda
