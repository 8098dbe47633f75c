// Shapes of the native layouts. octavo.GroupedTensorSpec defines the plain ones; octavo_native.layouts says both in
// Python.
//
// Rowwise, native: codes [M, C] as in plain, E2M1 two per byte [M, ceil(C / 2)], the even column in the low four bits.
//   Scales: `block` fp32 transposed, [ceil(C / 128)][M rounded up to 4]; all others plain.
//
// Columnwise, native ("K-panels"): codes [P][C][128], E2M1 [P][C][64]: each panel holds 128 rows of one group, column
//   after column, the rows of a column contiguous; rows past the group's end are zero codes. P = panel_bound for
//   ragged rows, G * ceil(N / 128) for stacked matrices, whose panels restart at each matrix. Unused panels are not
//   written.
//   Scales by scaling: delayed, current [G]; row [G, C]; block fp32 [P][C rounded up to 4]; mxfp8 [P][C][4];
//   nvfp4 [P][C][8] E4M3. Blocks past the group's end have scale codes of a zero block. Square blocks: the plain array.
//   Hadamard data pad each group to 16 rows, and the padded rows are written.
//
// Values, of MXFP8 and NVFP4: bf16 of code times block scale, rounded once, without NVFP4's second level; NaN is
// 0x7FC0.
//   Rowwise [M, C], columnwise [P][C][128] with zeros past a group's end. There are no scales but the second level.
#pragma once

#include "octavo/types.h"

namespace octavo {

constexpr int PANEL_ROWS = 128;

// An upper bound of the blocks of `size` rows that `rows` rows in `groups` groups can need when blocks restart at each
// group.
OCTAVO_HD int64_t block_bound(int64_t rows, int64_t groups, int64_t size) {
  return (rows + (size - 1) * groups) / size;
}

// Panels of a ragged ([M, C], matrix_rows 0) or stacked ([G, N, C], matrix_rows N) operand of `rows` rows in all.
OCTAVO_HD int64_t panel_bound(int64_t rows, int64_t groups, int64_t matrix_rows) {
  return matrix_rows ? groups * ceil_div(matrix_rows, PANEL_ROWS) : block_bound(rows, groups, PANEL_ROWS);
}

OCTAVO_HD int64_t round_up(int64_t value, int64_t to) { return ceil_div(value, to) * to; }

}  // namespace octavo
