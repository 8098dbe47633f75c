// What a GEMM prepares in its workspace: operands and scales that the kernels do not read as they come.
//
//   bf16 copies of the codes of MXFP8 and NVFP4, which Hopper's tensor cores do not multiply
//   scales of columns from those of square blocks, where x in square blocks is the left operand
//   scales of columns in the order in which interleaved columns are read
#pragma once

#include <cuda_runtime.h>

#include "side.h"

namespace octavo::cuda {

size_t gemm_workspace_bytes(const GemmArgs& args);

// Writes them, and has `args` and the sides read them. Of a GEMM with rows, whose workspace is checked.
Error prepare_operands(GemmArgs& args, Side& left, Side& right, cudaStream_t stream);

}  // namespace octavo::cuda
