// An operand of a GEMM as the kernel reads it, and the tensor maps of a GEMM's arrays.
#pragma once

#include "cuda/gemm/params.h"
#include "octavo/gemm.h"

namespace octavo::cuda {

// Codes, unquantized values, or bf16 values that workspace.cu has dequantized from codes.
struct Side {
  const void* data;
  int element_bytes;
  OperandWalk walk;
  int64_t cols;        // per row, or in a panel
  int64_t row_stride;  // elements; rows and matrices
  int64_t rows;        // ragged rows, or rows per matrix
  int64_t panels;
  int64_t interleave;  // panels: their columns are two halves, which are read in alternating blocks of so many; 0: not
};

// Whether tiles are found by the groups' rows, and not by matrices of equal size.
bool ragged(OperandWalk walk);

OperandWalk left_walk(const GemmSpec& spec);
OperandWalk right_walk(const GemmSpec& spec);

Side side_of(const GemmArgs& args, bool left);

// GemmParams::left_interleave, right_interleave of an operand.
int32_t interleave_bits(const Side& side);

// TMA tiles of `span` rows (or columns of a panel) and one K-block.
Error encode_side(const Side& side, const GemmArgs& args, int span, CUtensorMap* map);

// TMA tiles of the result, 128 bytes wide.
Error encode_out(const GemmArgs& args, uint32_t rows, CUtensorMap* map);

// Scales of 1 x 128 blocks: [K-blocks or panels][rows or columns, rounded up to 4] fp32.
Error encode_scales(const void* scales, int64_t width, int64_t blocks, int span, CUtensorMap* map);

}  // namespace octavo::cuda
