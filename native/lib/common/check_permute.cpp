// Argument checks of routing and of moving rows, shared by both devices. Pointers are compared and never dereferenced.
#include "check.h"
#include "octavo/permute.h"

namespace octavo {

namespace {

Error check_choices(const Choices& choices) {
  if (choices.tokens < 0) return invalid("tokens is negative; give the number of tokens, 0 or more");
  if (choices.each < 1) return invalid("each is less than 1; give the choices of a token");
  if (choices.tokens > MAX_ROWS / choices.each) {
    return invalid("tokens * each is past 2^30, the most that row numbers hold; split the call");
  }
  if (choices.rows < 0) return invalid("row_count is negative; give the rows of the array that positions count");
  if (choices.rows > MAX_ROWS) return invalid("row_count is past 2^30, the most that row numbers hold; split the call");
  if (choices.tokens == 0) return {};
  if (choices.position == nullptr || choices.routed == nullptr) {
    return invalid("position or routed is null; give both [tokens, each], as route writes them");
  }
  if (!aligned(choices.position, 8)) return invalid("position is not aligned to 8 bytes; it is int64 [tokens, each]");
  if (!aligned(choices.weights, 4)) return invalid("weights is not aligned to 4 bytes; it is fp32 [tokens, each]");
  return {};
}

Error check_array(const void* array, int64_t stride, int64_t cols, DType dtype) {
  if (array == nullptr && cols > 0) return invalid("an array of rows is null; give its address");
  if (!aligned(array, dtype_bytes(dtype)))
    return invalid("an array of rows is not aligned to its elements; give an address that is a multiple of their size");
  if (stride < cols) return invalid("a row stride is less than cols; give the elements from one row to the next");
  if (stride > MAX_STRIDE) return invalid("a row stride is past 2^32 elements; copy the rows closer together");
  return {};
}

Error check_sides(const Choices& choices, DType dtype, int64_t cols) {
  if (!named(dtype, DType::bf16)) return invalid("dtype is not a valid DType; give f32, f16 or bf16 (0 to 2)");
  if (cols < 0) return invalid("cols is negative; give the columns of the rows, 0 or more");
  if (cols > MAX_COLS) return invalid("cols is past 2^30; split the rows");
  return check_choices(choices);
}

}  // namespace

Error check_route(const RouteArgs& args) {
  if (const Error error = check_counts(args.choices, args.groups)) return error;
  if (args.group_sizes == nullptr) return invalid("group_sizes is null; give int64 [groups]");
  const bool missing = args.index == nullptr || args.order == nullptr || args.position == nullptr;
  if (args.choices > 0 && (missing || args.routed == nullptr)) {
    return invalid("index, order, position or routed is null; give all of them, [choices] each");
  }
  if (!aligned(args.counts, 4)) return invalid("counts is not aligned to 4 bytes; it is a workspace of int32");
  if (!aligned(args.index, 8) || !aligned(args.group_sizes, 8) || !aligned(args.order, 8) ||
      !aligned(args.position, 8)) {
    return invalid("index, group_sizes, order or position is not aligned to 8 bytes; they are int64");
  }
  return {};
}

Error check_move(const MoveArgs& args) {
  if (const Error error = check_sides(args.choices, args.dtype, args.cols)) return error;
  if (args.choices.tokens == 0) return {};
  if (const Error error = check_array(args.from, args.stride, args.cols, args.dtype)) return error;
  return check_array(args.out, args.cols, args.cols, args.dtype);
}

Error check_dot(const DotArgs& args) {
  if (const Error error = check_sides(args.choices, args.dtype, args.cols)) return error;
  if (args.choices.weights != nullptr) return invalid("weights was given; their gradient does not depend on them");
  if (args.choices.tokens == 0) return {};
  if (const Error error = check_array(args.rows, args.row_stride, args.cols, args.dtype)) return error;
  if (const Error error = check_array(args.dy, args.dy_stride, args.cols, args.dtype)) return error;
  if (args.out == nullptr || !aligned(args.out, 4)) {
    return invalid("out is null or not aligned to 4 bytes; it is fp32 [tokens, each]");
  }
  return {};
}

}  // namespace octavo
