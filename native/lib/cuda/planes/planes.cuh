// Addresses of a plane's codes and scales for kernels that work panel by panel. Pure arithmetic, which the host runs,
// too.
#pragma once

#include "octavo/dequantize.h"

namespace octavo::cuda {

// The rows of an operand as panels of 128, ragged or stacked.
struct Panels {
  int64_t rows, groups, matrix_rows;
  const int64_t* plan;

  OCTAVO_HD int64_t bound() const { return panel_bound(rows, groups, matrix_rows); }
  OCTAVO_HD int64_t used() const { return blocks_in_use(PANEL_ROWS); }
  OCTAVO_HD Panel at(int64_t index) const {
    return matrix_rows ? stacked_panel(index, matrix_rows) : PlanView{plan, rows, groups}.panels()[index];
  }
  // An operand without rows may have no plan.
  OCTAVO_HD int64_t rows_in_use() const {
    return matrix_rows ? rows : plan ? PlanView{plan, rows, groups}.rows_in_use() : 0;
  }
  // Packed blocks of `size` rows (16, 32 or 128) in use.
  OCTAVO_HD int64_t blocks_in_use(int size) const {
    if (matrix_rows) return groups * ceil_div(matrix_rows, size);
    if (plan == nullptr) return 0;
    return PlanView{plan, rows, groups}.blocks_in_use(size == 16 ? HEIGHT_16 : size == 32 ? HEIGHT_32 : HEIGHT_128);
  }
};

// Scale of (panel, row within it, column): element base + (row >> row_shift) * per_row + (col >> col_shift) * per_col.
struct ScaleAt {
  int64_t base;
  int64_t per_row, per_col;
  int row_shift, col_shift;

  OCTAVO_HD int64_t operator()(int64_t row, int64_t col) const {
    return base + (row >> row_shift) * per_row + (col >> col_shift) * per_col;
  }
};

enum class ScaleBase : int32_t { group, row, panel, block16, block32 };

// The part of ScaleAt that all panels of a plane share: its base is the panel's group, first row, number or first
// block, times `per_base`.
struct ScaleMap {
  ScaleBase of = ScaleBase::group;
  int64_t per_base = 1;
  int64_t per_row = 0, per_col = 0;
  int row_shift = 7, col_shift = 0;

  OCTAVO_HD ScaleAt at(const Panel& panel, int64_t index) const {
    const int64_t first = of == ScaleBase::group     ? panel.group
                          : of == ScaleBase::row     ? panel.row0
                          : of == ScaleBase::panel   ? index
                          : of == ScaleBase::block16 ? panel.first16
                                                     : panel.first32;
    return {first * per_base, per_row, per_col, row_shift, col_shift};
  }
};

inline int log2_of(int size) {
  int shift = 0;
  while ((1 << shift) < size) ++shift;
  return shift;
}

// Packed blocks of 128 rows are the panels themselves.
inline ScaleBase blocks_of(int size) {
  return size == 16 ? ScaleBase::block16 : size == 32 ? ScaleBase::block32 : ScaleBase::panel;
}

inline ScaleMap scale_map(const QuantizerSpec& spec, Direction direction, Layout layout, int64_t rows, int64_t cols) {
  const int size = block_size(spec.scaling);
  ScaleMap map;
  if (spec.scaling == Scaling::delayed || spec.scaling == Scaling::current) return map;
  if (size == 0) {
    if (direction == Direction::rowwise) {
      map.of = ScaleBase::row, map.per_row = 1, map.row_shift = 0;
    } else {
      map.per_base = cols, map.per_col = 1;
    }
    return map;
  }
  const int shift = log2_of(size);
  const int64_t col_blocks = ceil_div(cols, size);
  const bool native = layout == Layout::native;
  if (spec.square) {
    map = {blocks_of(size), col_blocks, col_blocks, 1, shift, shift};
  } else if (direction == Direction::rowwise) {
    map = {ScaleBase::row, col_blocks, col_blocks, 1, 0, shift};
    if (native && spec.scaling == Scaling::block) map = {ScaleBase::row, 1, 1, round_up(rows, 4), 0, shift};
  } else if (native) {
    const int64_t each = PANEL_ROWS / size;
    map = {ScaleBase::panel, (each == 1 ? round_up(cols, 4) : cols) * each, 1, each, shift, 0};
  } else {
    map = {blocks_of(size), cols, cols, 1, shift, 0};
  }
  return map;
}

// The rows of a panel that its plane holds, and its first row in a plain payload: Hadamard data pad groups to 16 rows.
OCTAVO_HD int plane_rows(bool padded, const Panel& panel) {
  return padded ? static_cast<int>(round_up(panel.rows, 16)) : panel.rows;
}
OCTAVO_HD int64_t plane_row0(bool padded, const Panel& panel) {
  return padded ? int64_t{panel.first16} * 16 : panel.row0;
}

inline bool pads_groups(const QuantizerSpec& spec, Direction direction) {
  return spec.hadamard && direction == Direction::columnwise;
}

}  // namespace octavo::cuda
