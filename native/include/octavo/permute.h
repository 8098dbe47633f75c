// Rows of tokens to rows in group order, and back. T tokens have k choices each; every choice has a row of its own.
#pragma once

#include "octavo/types.h"

namespace octavo {

// Sorts choices by group, stably; those without a group come last.
struct RouteArgs {
  const int64_t* index = nullptr;   // [choices]; a number outside 0 to groups - 1 is no group
  int64_t choices = 0, groups = 0;  // at most 2^30 and 65 536
  int64_t* group_sizes = nullptr;   // [groups]
  int64_t* order = nullptr;         // [choices]: the choice of each row
  int64_t* position = nullptr;      // [choices]: the row of each choice, the inverse of `order`
  uint8_t* routed = nullptr;        // [choices]: 1 if the choice has a group, otherwise 0
  int32_t* counts = nullptr;        // a workspace of route_workspace() bytes, or null; CPUs have no use for it
};

// Choices that a CTA counts.
constexpr int ROUTE_RUN = 2048;

// Bytes with which a GPU sorts so many choices in two launches of many CTAs; 0 where one launch without them is as
// fast.
constexpr int64_t route_workspace(int64_t choices, int64_t groups) {
  const int64_t runs = (choices + ROUTE_RUN - 1) / ROUTE_RUN;
  return choices > 12 * ROUTE_RUN && groups < 1024 && runs * (groups + 1) < (1 << 28) ? 4 * runs * (groups + 1) : 0;
}

Error check_route(const RouteArgs& args);
Error route_cpu(const RouteArgs& args);
Error route_cuda(const RouteArgs& args, void* stream);

// Where the rows of tokens are. A choice that is not routed has weight 0, whatever its row holds; a position outside
// 0 to rows - 1 is never followed: nothing is read or written there.
struct Choices {
  int64_t tokens = 0, each = 0;       // T and k; T k is at most 2^30
  int64_t rows = 0;                   // R, of the array that positions are rows of; at most 2^30
  const int64_t* position = nullptr;  // [T, k]
  const uint8_t* routed = nullptr;    // [T, k]
  const float* weights = nullptr;     // [T, k]; null: 1

  OCTAVO_HD bool row_for_each() const { return rows >= tokens * each; }
};

// permute   out[position[t, j]] = weight * from[t], from [T, cols], out [R, cols]
// combine   out[t] = sum over j of weight * from[position[t, j]], from [R, cols], out [T, cols]
//
// Permuted rows of choices that are not routed are zeros where every choice has a row of its own, R >= T k. With fewer
// rows many such choices share one, and nothing is written for them.
//
// Products and sums are fp32, sums in the order of j from +0 on, rounded once to dtype; without weights a permuted row
// is a copy of bits. Rows of `out` follow one another; those of `from` stand `stride` elements apart.
struct MoveArgs {
  Choices choices;
  DType dtype = DType::f32;
  int64_t cols = 0, stride = 0;
  const void* from = nullptr;
  void* out = nullptr;
};

Error check_move(const MoveArgs& args);
Error permute_cpu(const MoveArgs& args, int threads);
Error permute_cuda(const MoveArgs& args, void* stream);
Error combine_cpu(const MoveArgs& args, int threads);
Error combine_cuda(const MoveArgs& args, void* stream);

// out[t, j] = rows[position[t, j]] . dy[t], 0 where the choice is not routed: the gradient of combine's weights, summed
// in an order that depends on cols alone. No weights are read.
struct DotArgs {
  Choices choices;
  DType dtype = DType::f32;  // of rows and dy
  int64_t cols = 0, row_stride = 0, dy_stride = 0;
  const void* rows = nullptr;  // [R, cols]
  const void* dy = nullptr;    // [T, cols]
  float* out = nullptr;        // [T, k]
};

Error check_dot(const DotArgs& args);
Error dot_cpu(const DotArgs& args, int threads);
Error dot_cuda(const DotArgs& args, void* stream);

}  // namespace octavo
