// Shared by the calls on one plane of codes: reading its quantizer, its logical shape (from attributes, because the
// native layouts pad the buffers), codes, scales and plan.
#pragma once

#include <string>

#include "buffers.h"
#include "common/check.h"
#include "shapes.h"

namespace octavo {

// Into the shape of `args`, too.
template <typename Args, typename Attributes>
Extent read_extent(const Attributes& given, Buffers& operands, Args& args) {
  constexpr int64_t MOST_COLS = int64_t{1} << 31;
  const bool fits = given.rows >= 0 && given.cols >= 0 && given.cols <= MOST_COLS && given.groups >= 1 &&
                    given.groups <= MAX_GROUPS && given.matrix_rows >= 0;
  const bool agrees = given.matrix_rows == 0 ? given.rows <= MAX_ROWS
                                             : given.matrix_rows <= given.rows && given.rows % given.matrix_rows == 0 &&
                                                   given.rows / given.matrix_rows == given.groups;
  if (!fits || !agrees) {
    operands.refuse("rows " + std::to_string(given.rows) + ", cols " + std::to_string(given.cols) + ", groups " +
                    std::to_string(given.groups) + " and matrix_rows " + std::to_string(given.matrix_rows) +
                    " are not the shape of an operand; rows is 0 to 2^30, or groups * matrix_rows");
  }
  args.rows = given.rows;
  args.cols = given.cols;
  args.groups = given.groups;
  args.matrix_rows = given.matrix_rows;
  return {given.rows, given.cols, given.groups, given.matrix_rows};
}

// The quantizer and the direction of `args`.
template <typename Args, typename Attributes>
void read_spec(const Attributes& given, Buffers& operands, Args& args) {
  args.spec.format = enum_from<Format>(given.format, Format::e2m1, "format", operands);
  args.spec.scaling = enum_from<Scaling>(given.scaling, Scaling::nvfp4, "scaling", operands);
  args.spec.square = given.square;
  args.spec.hadamard = given.hadamard;
  args.direction = enum_from<Direction>(given.direction, Direction::columnwise, "direction", operands);
}

// Codes and scales, in the plane's layout.
inline void read_codes(Buffers& buffers, const QuantizerSpec& spec, Direction direction, const Extent& extent,
                       Plane& plane) {
  for (const char* needed : {"codes", "scales"}) buffers.need(needed);
  plane.codes = buffers.take("codes", codes_type(spec.format), codes_dims(spec, direction, plane.layout, extent));
  plane.scales = buffers.take("scales", scales_type(spec.scaling), scales_dims(spec, direction, plane.layout, extent));
}

// Stacked operands need none.
inline const int64_t* read_plan(Buffers& operands, const Extent& extent) {
  if (extent.stacked()) return nullptr;
  operands.need("plan");
  return operands.take<const int64_t>("plan", ffi::S32, {2 * plan_words(extent.rows, extent.groups)});
}

}  // namespace octavo
