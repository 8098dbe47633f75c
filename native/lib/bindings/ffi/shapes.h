// Shapes that the buffers from XLA must have: those of octavo.GroupedTensorSpec (plain) and layouts.h (native). A test
// compares them with octavo_native.layouts.
#pragma once

#include <vector>

#include "octavo/quantize.h"

namespace octavo {

using Dims = std::vector<int64_t>;

// An operand's size: ragged [rows, cols] (matrix_rows 0), or stacked [groups, matrix_rows, cols].
struct Extent {
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t groups = 0;
  int64_t matrix_rows = 0;

  bool stacked() const { return matrix_rows != 0; }
  int64_t panels() const { return panel_bound(rows, groups, matrix_rows); }
};

inline Dims with_rows(const Extent& e, int64_t ragged_rows, int64_t stacked_rows, int64_t last) {
  return e.stacked() ? Dims{e.groups, stacked_rows, last} : Dims{ragged_rows, last};
}

inline Dims codes_dims(const QuantizerSpec& spec, Direction direction, Layout layout, const Extent& e) {
  const bool packed = spec.format == Format::e2m1 && layout == Layout::native;
  if (direction == Direction::rowwise)
    return with_rows(e, e.rows, e.matrix_rows, packed ? ceil_div(e.cols, 2) : e.cols);
  if (layout == Layout::native) return {e.panels(), e.cols, packed ? PANEL_ROWS / 2 : PANEL_ROWS};
  if (spec.hadamard) return {block_bound(e.rows, e.groups, 16) * 16, e.cols};
  return with_rows(e, e.rows, e.matrix_rows, e.cols);
}

// bf16 values of mxfp8 and nvfp4 in the order of native codes, unpacked (Layout::values).
inline Dims values_dims(Direction direction, const Extent& e) {
  if (direction == Direction::rowwise) return with_rows(e, e.rows, e.matrix_rows, e.cols);
  return {e.panels(), e.cols, PANEL_ROWS};
}

inline Dims scales_dims(const QuantizerSpec& spec, Direction direction, Layout layout, const Extent& e) {
  const int64_t size = block_size(spec.scaling);
  const bool native = layout == Layout::native, rowwise = direction == Direction::rowwise;
  if (spec.scaling == Scaling::delayed || spec.scaling == Scaling::current) return {e.groups};
  if (size == 0) {
    if (!rowwise) return {e.groups, e.cols};
    return e.stacked() ? Dims{e.groups, e.matrix_rows} : Dims{e.rows};
  }
  const int64_t row_blocks = block_bound(e.rows, e.groups, size);  // of ragged rows
  const int64_t matrix_blocks = ceil_div(e.matrix_rows, size), col_blocks = ceil_div(e.cols, size);
  if (spec.square) return with_rows(e, row_blocks, matrix_blocks, col_blocks);
  if (native && spec.scaling == Scaling::block) {
    return rowwise ? Dims{col_blocks, round_up(e.rows, 4)} : Dims{e.panels(), round_up(e.cols, 4)};
  }
  if (rowwise) return with_rows(e, e.rows, e.matrix_rows, col_blocks);
  if (native) return {e.panels(), e.cols, PANEL_ROWS / size};
  return with_rows(e, row_blocks, matrix_blocks, e.cols);
}

}  // namespace octavo
