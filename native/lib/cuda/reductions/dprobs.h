// Gradients of the rows' probabilities: the activation's output before it was multiplied by them, times dy, summed over
// each row in a fixed order.
#pragma once

#include "octavo/quantize.h"

namespace octavo::cuda {

// From sums over chunks of columns, [chunks][rows]; 0 for rows that belong to no group.
Error sum_chunks(const float* sums, int64_t chunks, const Input& input, float* out, const int32_t* unchanged,
                 void* stream);

// From the arrays themselves, for any dtype and activation; `features` is F.
Error sum_products(const Input& input, const Prologue& prologue, int64_t features, bool wide, float* out,
                   const int32_t* unchanged, void* stream);

}  // namespace octavo::cuda
