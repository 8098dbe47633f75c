// Scales of columns that are two halves, brought into the order of interleaved columns.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "octavo/plan.h"

namespace octavo::cuda {

// From `halves` to `interleaved`, both [rows][pitch] with `cols` scales in a row; `block` columns of a half stay
// together. With a plan rows are panels, and only those in use: nobody has written scales of others.
void interleave_scales(const float* halves, int64_t rows, int64_t pitch, int64_t cols, int64_t block,
                       const PlanView* plan, float* interleaved, cudaStream_t stream);

}  // namespace octavo::cuda
