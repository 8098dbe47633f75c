// plan_cpu: the CPU counterpart of the plan kernel. Integers only: the sizes are the only input, and any sizes are
// legal.
#include "octavo/plan.h"

#include <algorithm>
#include <cstring>

namespace octavo {

namespace {

int64_t size_at(const PlanArgs& args, int64_t group) {
  return args.sizes_are_64 ? static_cast<const int64_t*>(args.sizes)[group]
                           : static_cast<const int32_t*>(args.sizes)[group];
}

// Writes row_start, and the bounded sizes if they are asked for; true if no size had to be cut.
bool bound_sizes(const PlanArgs& args, int64_t* row_start) {
  bool good = true;
  int64_t end = 0;
  row_start[0] = 0;
  for (int64_t g = 0; g < args.groups; ++g) {
    const int64_t size = size_at(args, g), left = args.rows - end;
    const int64_t kept = size < 0 ? 0 : size < left ? size : left;
    good &= kept == size;
    row_start[g + 1] = end += kept;
    if (args.bounded != nullptr) args.bounded[g] = kept;
  }
  return good;
}

void count_blocks(const int64_t* row_start, int64_t groups, int height, int64_t* block_start) {
  block_start[0] = 0;
  for (int64_t g = 0; g < groups; ++g) {
    block_start[g + 1] = block_start[g] + ceil_div(row_start[g + 1] - row_start[g], height);
  }
}

// In place: a stable sort would allocate, and the number as a second key gives the same order.
void sort_groups(const int64_t* row_start, int64_t groups, int64_t* order) {
  for (int64_t g = 0; g < groups; ++g) order[g] = g;
  std::sort(order, order + groups, [row_start](int64_t a, int64_t b) {
    const int64_t size_a = row_start[a + 1] - row_start[a], size_b = row_start[b + 1] - row_start[b];
    return size_a != size_b ? size_a > size_b : a < b;
  });
}

void list_panels(const PlanView& plan, Panel* panels) {
  int64_t next = 0;
  for (int64_t g = 0; g < plan.groups; ++g) {
    const int64_t first = plan.row_start()[g], end = plan.row_start()[g + 1];
    const int64_t first16 = plan.block_start(HEIGHT_16)[g], first32 = plan.block_start(HEIGHT_32)[g];
    for (int64_t local = 0; first + local * PANEL_ROWS < end; ++local, ++next) {
      const int64_t row0 = first + local * PANEL_ROWS;
      panels[next] = {static_cast<int32_t>(g),
                      static_cast<int32_t>(std::min<int64_t>(end - row0, PANEL_ROWS)),
                      row0,
                      static_cast<int32_t>(local),
                      0,
                      static_cast<int32_t>(first16 + local * (PANEL_ROWS / 16)),
                      static_cast<int32_t>(first32 + local * (PANEL_ROWS / 32))};
    }
  }
  const int64_t bound = block_bound(plan.rows, plan.groups, PANEL_ROWS);
  for (; next < bound; ++next) panels[next] = {-1, 0, 0, 0, 0, 0, 0};
}

}  // namespace

Error plan_cpu(const PlanArgs& args) {
  if (const Error error = check_plan(args)) return error;
  int64_t* words = args.plan;
  const PlanView plan = {words, args.rows, args.groups};
  const auto at = [words](const int64_t* array) { return words + (array - words); };
  std::memset(words, 0, sizeof(int64_t) * PLAN_HEADER_WORDS);
  const bool good = bound_sizes(args, at(plan.row_start()));
  words[0] = plan.row_start()[args.groups];
  words[1] = good ? 0 : BAD_SIZES;
  words[2] = args.groups;
  words[3] = args.rows;
  for (int height = 0; height < TILE_HEIGHT_COUNT; ++height) {
    count_blocks(plan.row_start(), args.groups, TILE_HEIGHTS[height], at(plan.block_start(height)));
    words[4 + height] = plan.block_start(height)[args.groups];
  }
  sort_groups(plan.row_start(), args.groups, at(plan.order()));
  auto* panels = reinterpret_cast<Panel*>(at(reinterpret_cast<const int64_t*>(plan.panels())));
  std::fill(at(plan.order()) + args.groups, reinterpret_cast<int64_t*>(panels), 0);  // padding before the panels
  list_panels(plan, panels);
  if (args.status != nullptr && !good) *args.status |= BAD_SIZES;
  return {};
}

}  // namespace octavo
