// Default strides of a GEMM's arrays.
#pragma once

#include "octavo/gemm.h"

namespace octavo {

// Columns of the arrays: of an unquantized left and right operand, and of the result.
inline int64_t left_cols(const GemmArgs& args) { return args.spec.gemm == Gemm::fprop ? args.k : args.n; }
inline int64_t right_cols(const GemmArgs& args) { return args.k; }
inline int64_t out_cols(const GemmArgs& args) { return args.spec.gemm == Gemm::fprop ? args.n : args.k; }

// The arguments with every stride of 0 replaced by that of a contiguous array. Quantized operands have no strides; y
// and dx have no group stride.
inline GemmArgs with_strides(GemmArgs args) {
  if (!args.spec.quantized) {
    if (args.left.row_stride == 0) args.left.row_stride = left_cols(args);
    if (args.right.row_stride == 0) args.right.row_stride = right_cols(args);
  }
  if (args.out_row_stride == 0) args.out_row_stride = out_cols(args);
  if (args.out_group_stride == 0 && args.spec.gemm == Gemm::wgrad) {
    // Unsigned, because check_gemm sees strides before they are validated and the product may overflow.
    args.out_group_stride =
        static_cast<int64_t>(static_cast<uint64_t>(args.n) * static_cast<uint64_t>(args.out_row_stride));
  }
  return args;
}

}  // namespace octavo
