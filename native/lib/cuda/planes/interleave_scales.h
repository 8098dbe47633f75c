// Scales of columns, two halves, as scales of columns that take interleaved.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "octavo/plan.h"

namespace octavo::cuda {

// `rows` rows, `pitch` apart, of which a plan has as many as panels: nobody has written scales of others. `block`
// columns of a half stay together.
void interleave_scales(const float* halves, int64_t rows, int64_t pitch, int64_t cols, int64_t block,
                       const PlanView* plan, float* interleaved, cudaStream_t stream);

}  // namespace octavo::cuda
