// SwiGLU, plain or clamped, and its gradient where nobody reads codes: values in, values out.
#pragma once

#include "cuda/tile/sources.cuh"
#include "octavo/quantize.h"

namespace octavo::cuda {

// What both take beside their source.
struct ValuesOut {
  void* to;                    // bf16 [M, F], of the gradient [M, 2 F]
  void* forward;               // of the gradient, bf16 [M, F] or null: what the forward gives
  int64_t rows;                // M
  const int64_t* rows_in_use;  // null: all
  const int32_t* unchanged;
};

void swiglu_values(const Swiglu<BF16>& source, const ValuesOut& out, cudaStream_t stream);
void swiglu_values(const SwigluGrad<BF16>& source, const ValuesOut& out, cudaStream_t stream);

}  // namespace octavo::cuda
