// The rows of an operand as panels, ragged or stacked, and the addresses of its planes' codes and scales.
#pragma once

#include "octavo/plan.h"
#include "octavo/quantize.h"

namespace octavo::cpu {

// Panels in use, in the order of the columnwise layouts; number i is also the packed number of its block of 128 rows.
class Panels {
 public:
  Panels(int64_t rows, int64_t groups, int64_t matrix_rows, const int64_t* plan)
      : matrix_rows_(matrix_rows), bound_(panel_bound(rows, groups, matrix_rows)), plan_{plan, rows, groups} {}

  // Does not read the plan: workspace sizes are computed before there is one.
  int64_t bound() const { return bound_; }
  int64_t used() const {
    if (matrix_rows_) return bound_;
    return plan_.words != nullptr ? plan_.blocks_in_use(HEIGHT_128) : 0;
  }
  Panel at(int64_t index) const { return matrix_rows_ ? stacked_panel(index, matrix_rows_) : plan_.panels()[index]; }

 private:
  int64_t matrix_rows_, bound_;
  PlanView plan_;
};

// Packed number of a panel's first block of `size` (16, 32 or 128) rows.
inline int64_t first_block(const Panel& panel, int64_t index, int size) {
  return size == 16 ? panel.first16 : size == 32 ? panel.first32 : index;
}

// True if scales belong to blocks of `block_size` elements, not to rows, columns or groups.
inline bool has_blocks(const QuantizerSpec& spec) { return block_size(spec.scaling) != 0; }
inline bool has_group_scales(const QuantizerSpec& spec) {
  return spec.scaling == Scaling::delayed || spec.scaling == Scaling::current;
}

// Rows of the codes that a panel holds in columnwise data: Hadamard data reach up to 16 past the group's last one.
inline int plane_rows(const QuantizerSpec& spec, Direction direction, int rows) {
  return spec.hadamard && direction == Direction::columnwise ? static_cast<int>(round_up(rows, 16)) : rows;
}

// First row of a panel in a plain payload.
inline int64_t plane_row0(const QuantizerSpec& spec, Direction direction, const Panel& panel) {
  return spec.hadamard && direction == Direction::columnwise ? int64_t{panel.first16} * 16 : panel.row0;
}

// Where one-dimensional block scales lie: element number of (row or column `outer`, block) in each layout.
struct ScaleIndex {
  int64_t base, per_outer, per_block;
  int64_t operator()(int64_t outer, int64_t block) const { return base + outer * per_outer + block * per_block; }
};

// Rowwise blocks: outer counts rows of the operand, blocks run along the columns.
inline ScaleIndex row_scale_index(const QuantizerSpec& spec, Layout layout, int64_t rows, int64_t cols) {
  if (layout == Layout::native && spec.scaling == Scaling::block) return {0, 1, round_up(rows, 4)};
  return {0, ceil_div(cols, block_size(spec.scaling)), 1};
}

// Columnwise blocks of one panel: outer counts columns, blocks run along the panel's rows.
inline ScaleIndex column_scale_index(const QuantizerSpec& spec, Layout layout, const Panel& panel, int64_t index,
                                     int64_t cols) {
  const int size = block_size(spec.scaling);
  if (layout == Layout::plain) return {first_block(panel, index, size) * cols, 1, cols};
  const int64_t each = PANEL_ROWS / size;
  if (each == 1) return {index * round_up(cols, 4), 1, 0};
  return {index * cols * each, each, 1};
}

}  // namespace octavo::cpu
