#include "check_operand.h"

#include <cmath>

#include "octavo/plan.h"

namespace octavo {

Error check_spec(const QuantizerSpec& spec) {
  if (!named(spec.format, Format::e2m1))
    return invalid("format is not a valid Format; give e4m3, e5m2 or e2m1 (0 to 2)");
  if (!named(spec.scaling, Scaling::nvfp4)) return invalid("scaling is not a valid Scaling; give a number from 0 to 5");
  if (!named(spec.operand, Operand::dy)) return invalid("operand is not a valid Operand; give x, w or dy (0 to 2)");
  if ((spec.format == Format::e2m1) != (spec.scaling == Scaling::nvfp4)) {
    return invalid("format and scaling do not go together; e2m1 goes with nvfp4 and nothing else does with either");
  }
  if (spec.square && block_size(spec.scaling) == 0) {
    return invalid("square needs blocks; leave it false where scaling is delayed, current or row");
  }
  if (spec.stochastic && spec.format != Format::e2m1) {
    return invalid("stochastic rounding is defined for e2m1; leave stochastic false with other formats");
  }
  if (spec.hadamard && spec.scaling != Scaling::nvfp4) {
    return invalid("hadamard is defined for nvfp4; leave it false with other scalings");
  }
  if (spec.hadamard && spec.square) {
    return invalid("hadamard transforms rows and square blocks are shared by both directions; drop one of them");
  }
  const Scaling scaling = spec.scaling;
  const bool fp32_scales = scaling == Scaling::current || scaling == Scaling::row || scaling == Scaling::block;
  if (spec.power_of_two && !fp32_scales) {
    return invalid("power_of_two is an option of current, row and block scaling; leave it out with others");
  }
  if (!(spec.amax_epsilon >= 0.0f) || !std::isfinite(spec.amax_epsilon)) {
    return invalid("amax_epsilon is negative, infinite or NaN; give 0 or a finite floor");
  }
  if (spec.amax_epsilon != 0.0f && !fp32_scales) {
    return invalid("amax_epsilon is an option of current, row and block scaling; give 0 with others");
  }
  if (spec.mxfp4 && !(scaling == Scaling::block && spec.square && spec.format == Format::e4m3)) {
    return invalid("mxfp4 rounds to values that E4M3 holds in square blocks of 128; leave it false with others");
  }
  if (spec.square_columns && (scaling != Scaling::block || spec.square)) {
    return invalid(
        "square_columns is for blocks of 128 whose rows have scales of their own; leave it false with others");
  }
  return {};
}

Error check_shape(int64_t rows, int64_t cols, int64_t groups, int64_t matrix_rows, const int64_t* plan) {
  if (const Error error = check_counts(rows, groups)) return error;
  if (cols < 0) return invalid("cols is negative; give the columns of the operand, 0 or more");
  if (cols > MAX_COLS) return invalid("cols is past 2^30; split the operand");
  if (matrix_rows < 0) return invalid("matrix_rows is negative; give 0 for ragged rows, or the rows of each matrix");
  if (matrix_rows > rows) {
    return invalid("matrix_rows is more than rows; stacked matrices have rows = groups * matrix_rows");
  }
  if (matrix_rows > 0 && rows != groups * matrix_rows) {
    return invalid("rows is not groups * matrix_rows; stacked matrices all have matrix_rows rows");
  }
  if (matrix_rows > 0 && plan != nullptr) {
    return invalid("plan was given with stacked matrices; leave it null, or give matrix_rows 0 for ragged rows");
  }
  if (matrix_rows == 0 && rows > 0 && plan == nullptr) {
    return invalid("plan is null and the rows are ragged; make one from the group sizes with plan_cpu or plan_cuda");
  }
  if (!aligned(plan, PLAN_ALIGNMENT)) return invalid("plan is not aligned to 32 bytes; allocate it so");
  return {};
}

Error check_second_level(const QuantizerSpec& spec, const Plane& plane, int64_t elements) {
  if (!aligned(plane.global, 4)) return invalid("a plane's global is not aligned to 4 bytes; it is fp32");
  if (elements > 0 && plane.codes != nullptr && spec.scaling == Scaling::nvfp4 && plane.global == nullptr) {
    return invalid("a plane of nvfp4 has no global; give [groups] fp32 for the second-level factors");
  }
  return {};
}

Error check_plane(const QuantizerSpec& spec, const Plane& plane, int64_t elements) {
  if (!named(plane.layout, Layout::native)) {
    return invalid("a plane's layout is not a valid Layout; give plain or native (0, 1)");
  }
  if (wide_scales(spec.scaling) && !aligned(plane.scales, 4)) {
    return invalid("a plane's scales are not aligned to 4 bytes; they are fp32");
  }
  if (elements == 0) return check_second_level(spec, plane, elements);
  if (plane.codes == nullptr && (plane.scales != nullptr || plane.global != nullptr)) {
    return invalid("a plane has scales and no codes; give both, or neither to leave the plane out");
  }
  if (plane.codes != nullptr && plane.scales == nullptr) {
    return invalid("a plane has codes and no scales; give both, or neither to leave the plane out");
  }
  return check_second_level(spec, plane, elements);
}

Error check_plan(const PlanArgs& args) {
  if (const Error error = check_counts(args.rows, args.groups)) return error;
  if (args.sizes == nullptr) return invalid("sizes is null; give the group sizes [groups], int32 or int64");
  if (!aligned(args.sizes, args.sizes_are_64 ? 8 : 4)) {
    return invalid("sizes is not aligned to its integers; give an address that is a multiple of their size");
  }
  if (args.plan == nullptr) return invalid("plan is null; give plan_words(rows, groups) words of 8 bytes");
  if (!aligned(args.plan, PLAN_ALIGNMENT)) return invalid("plan is not aligned to 32 bytes; allocate it so");
  if (!aligned(args.status, 4)) return invalid("status is not aligned to 4 bytes; it is one int32");
  if (!aligned(args.bounded, 8)) return invalid("bounded is not aligned to 8 bytes; it is int64 [groups]");
  return {};
}

Error check_row_index(const RowIndex& index) {
  if (index.each < 1 || index.each > MAX_ROWS) {
    return invalid("each is less than 1 or past 2^30; give the choices of each row of the input");
  }
  if (index.of_rows == nullptr) return {};
  if (!aligned(index.of_rows, 8)) return invalid("index is not aligned to 8 bytes; it is int64 [rows]");
  if (index.count < 0) return invalid("count is negative; give the rows of the input, 0 or more");
  if (index.count > MAX_ROWS / index.each) return invalid("count * each is past 2^30; split the input");
  return {};
}

}  // namespace octavo
