// The kernel parameters of a grouped GEMM, passed by value so that a captured graph holds all of them.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/device/rows_at.cuh"
#include "octavo/gemm.h"

namespace octavo::cuda {

// The coordinate of each group's end in the ragged tensor maps (tensor_map.h).
constexpr int32_t RAGGED_ROWS = 1 << 30;

// How an operand's tiles are found in its tensor map. E elements of K make one K-block, 128 bytes.
enum class OperandWalk : int32_t {
  rows = 0,        // ragged [M, C], K along C:     {c, 2^30 - size + row, start + size, 2^30} of the ragged map
  rows_t = 1,      // ragged [M, C], K along M:     the same map, TMA tiles of 64 x 64
  matrices = 2,    // stacked [G, R, C], K along C: {c, row, group}
  matrices_t = 3,  // stacked [G, R, C], K along R: the same order, TMA tiles of 64 x 64
  panels = 4,      // K-panels [P][D][128] of ragged rows:      {k, column, panel}, or interleaved
                   //                                           {k, column in a block, half, block, panel}
  stacked = 5,     // K-panels [P][D][128] of stacked matrices: {k, column, panel}
};

// The operand whose rows stand where a router's tokens do; its tensor map is not used.
enum class Gathered : int32_t { none = 0, left = 1, right = 2 };

// Decode scales that apply to whole dot products.
enum class Factor : int32_t {
  none = 0,
  group = 1,   // [G]
  row = 2,     // left: one per row of the result, counted over all groups
  column = 3,  // one per row (left) or column (right) of each group's result: [G, .]
};

// How accumulators become results; each variant is compiled separately.
enum class Finish : int32_t {
  plain = 0,    // row factors; stored
  columns = 1,  // row and column factors; stored
  adds = 2,     // row factors; added to an fp32 result
  general = 3,  // everything: factors, bias, accumulation, fp16
};

struct GemmParams {
  CUtensorMap left, right, left_scales, right_scales;
  CUtensorMap out_map;  // of a bf16 result, or of an fp32 one that is added to: TMA tiles 128 bytes wide, of 16 rows,
                        // or of 64 with store warps
  const int64_t* plan;
  int64_t rows;
  int32_t groups;
  bool k_grouped;
  bool accumulate;
  int32_t height;    // rows of each group's result where k_grouped
  int32_t width;     // columns of the result
  int32_t k_blocks;  // where not k_grouped
  OperandWalk left_walk, right_walk;
  // Panels of an operand whose columns, two halves, are read interleaved: log2 of the columns of a block of each half
  // together; 0: they are read as they stand.
  int32_t left_interleave, right_interleave;
  // The gathered operand: tokens [count, cols], and which of them each row is.
  const uint8_t* tokens;
  uint32_t token_bytes;  // from one token to the next
  int32_t token_cols;
  const float* token_scales;  // of codes: [count][K-blocks]
  RowsAt rows_at;
  int32_t panels_each;  // stacked: panels per matrix
  int32_t right_rows;   // columns of the result in a matrix of right_scales; 0: its rows are panels

  const float* square;  // scales of 128 x 128 blocks of the right operand: [G][..][..], or of panels where k_grouped
  int32_t square_group, square_column, square_k;

  Finish finish;
  bool out_by_tma;   // results are stored through `out_map`
  bool store_warps;  // by store warps, and not by the consumers
  void* out;
  DType out_dtype;
  int64_t out_row_stride, out_group_stride;
  const float* left_factor;
  const float* right_factor;
  Factor left_use, right_use;
  const void* bias;
  DType bias_dtype;
  const float* bias_scales;
};

}  // namespace octavo::cuda
