// The logical shape that a call's attributes give, where its buffers, padded by the native layouts, do not.
#pragma once

#include <string>

#include "ffi_buffers.h"
#include "ffi_shapes.h"

namespace octavo {

template <typename Attributes>
Extent extent_of(const Attributes& given, Buffers& operands) {
  constexpr int64_t MAX_COLS = int64_t{1} << 31;
  const bool fits = given.rows >= 0 && given.cols >= 0 && given.cols <= MAX_COLS && given.groups >= 1 &&
                    given.groups <= MAX_GROUPS && given.matrix_rows >= 0;
  const bool agrees = given.matrix_rows == 0 ? given.rows <= MAX_ROWS
                                             : given.matrix_rows <= given.rows &&
                                                   given.rows % given.matrix_rows == 0 &&
                                                   given.rows / given.matrix_rows == given.groups;
  if (!fits || !agrees) {
    operands.refuse("rows " + std::to_string(given.rows) + ", cols " + std::to_string(given.cols) + ", groups " +
                    std::to_string(given.groups) + " and matrix_rows " + std::to_string(given.matrix_rows) +
                    " are no operand; rows is 0 to 2^30, or groups * matrix_rows");
  }
  return {given.rows, given.cols, given.groups, given.matrix_rows};
}

}  // namespace octavo
