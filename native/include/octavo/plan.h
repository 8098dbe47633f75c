// The plan: everything that a kernel needs to know about group sizes. Only the plan kernel reads the sizes.
#pragma once

#include "octavo/layouts.h"
#include "octavo/types.h"

namespace octavo {

constexpr int TILE_HEIGHTS[] = {16, 32, 64, 128, 256};
constexpr int TILE_HEIGHT_COUNT = 5;
constexpr int HEIGHT_16 = 0, HEIGHT_32 = 1, HEIGHT_64 = 2, HEIGHT_128 = 3;
constexpr int PLAN_HEADER_WORDS = 16;
constexpr int32_t BAD_SIZES = 1;  // flag in the status word and in PlanView::flags

// 128 rows of one group. `rows` real ones from row `row0` of the operand; 0 rows and group -1: the panel is not used.
struct Panel {
  int32_t group;
  int32_t rows;
  int64_t row0;
  int32_t local;  // number of the panel within its group
  int32_t reserved;
  int32_t first16;  // packed number of its first block of 16 rows: blocks restart at each group
  int32_t first32;
};
static_assert(sizeof(Panel) == 32);

// int64 words of a plan: header, row_start[G + 1], block_start[5][G + 1], order[G], Panel[P].
OCTAVO_HD int64_t plan_words(int64_t rows, int64_t groups) {
  const int64_t arrays = PLAN_HEADER_WORDS + (groups + 1) * (1 + TILE_HEIGHT_COUNT) + groups;
  return round_up(arrays, 4) + 4 * block_bound(rows, groups, PANEL_ROWS);
}

// A plan read in place. Header words: 0 rows in use, 1 flags, 2 groups, 3 rows, 4 to 8 blocks of each height in use.
struct PlanView {
  const int64_t* words;
  int64_t rows;
  int64_t groups;

  OCTAVO_HD int64_t rows_in_use() const { return words[0]; }
  OCTAVO_HD int64_t flags() const { return words[1]; }
  OCTAVO_HD int64_t blocks_in_use(int height) const { return words[4 + height]; }
  // Bounded first row of each group, and the end: non-decreasing, from 0 to at most `rows`.
  OCTAVO_HD const int64_t* row_start() const { return words + PLAN_HEADER_WORDS; }
  // First packed block of TILE_HEIGHTS[height] rows of each group, and the end.
  OCTAVO_HD const int64_t* block_start(int height) const {
    return words + PLAN_HEADER_WORDS + (groups + 1) * (1 + height);
  }
  // Groups by descending size, equal sizes by number.
  OCTAVO_HD const int64_t* order() const { return words + PLAN_HEADER_WORDS + (groups + 1) * (1 + TILE_HEIGHT_COUNT); }
  OCTAVO_HD const Panel* panels() const {
    const int64_t arrays = PLAN_HEADER_WORDS + (groups + 1) * (1 + TILE_HEIGHT_COUNT) + groups;
    return reinterpret_cast<const Panel*>(words + round_up(arrays, 4));
  }
};

// The panel of a stacked operand, whose sizes are all `matrix_rows`: no plan is needed.
OCTAVO_HD Panel stacked_panel(int64_t index, int64_t matrix_rows) {
  const int64_t each = ceil_div(matrix_rows, PANEL_ROWS), group = index / each, local = index % each;
  const int64_t left = matrix_rows - local * PANEL_ROWS;
  return {static_cast<int32_t>(group),
          static_cast<int32_t>(left < PANEL_ROWS ? left : PANEL_ROWS),
          group * matrix_rows + local * PANEL_ROWS,
          static_cast<int32_t>(local),
          0,
          static_cast<int32_t>(group * ceil_div(matrix_rows, 16) + local * 8),
          static_cast<int32_t>(group * ceil_div(matrix_rows, 32) + local * 4)};
}

struct PlanArgs {
  const void* sizes;  // [groups] int32 or int64, on the device of the call
  bool sizes_are_64;
  int64_t groups;              // 1 to 65 536
  int64_t rows;                // M, at most 2^30
  int64_t* plan;               // plan_words(rows, groups) words, 32-byte aligned
  int32_t* status;             // BAD_SIZES is OR-ed in where a size was cut; may be null
  int64_t* bounded = nullptr;  // [groups]: the sizes after they were cut; may be null
};

// A negative size counts as 0; from the group that passes `rows` on, rows are cut off. Nothing is read back.
Error check_plan(const PlanArgs& args);  // pointers, alignment, counts
Error plan_cpu(const PlanArgs& args);
Error plan_cuda(const PlanArgs& args, void* stream);

}  // namespace octavo
