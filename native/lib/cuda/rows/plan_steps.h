// The arithmetic of the plan kernel without its threads, so that the host can run it, too.
#pragma once

#include "octavo/plan.h"

namespace octavo::cuda {

// a + b, at most `most`; both operands are at most 2^30, so the sum does not overflow.
OCTAVO_HD uint32_t saturating_sum(uint32_t a, uint32_t b, uint32_t most) { return a + b < most ? a + b : most; }

// A size clamped to 0 to `most` rows, before the groups in front of it are taken into account.
OCTAVO_HD uint32_t bounded_size(int64_t size, uint32_t most) {
  return size < 0 ? 0u : size < static_cast<int64_t>(most) ? static_cast<uint32_t>(size) : most;
}

// ---- sorting network: Batcher's bitonic merges with a mirrored first step, so that every comparator puts the smaller
// key first. Keys past the end then count as infinite and never move, and any count can be sorted in place.

struct Comparator {
  int64_t low, high;
};

// Comparator `index` of the step at `distance` (a power of two); a mirrored step compares the ends of runs of
// 2 * distance, inwards.
OCTAVO_HD Comparator comparator(int64_t index, int64_t distance, bool mirrored) {
  const int64_t within = index & (distance - 1), run = (index - within) * 2;
  return {run + within, mirrored ? run + 2 * distance - 1 - within : run + within + distance};
}

constexpr int ORDER_GROUP_BITS = 16;  // groups are at most 65 536

// Ascending keys are descending sizes, then ascending numbers.
OCTAVO_HD int64_t order_key(int64_t size, int64_t group) {
  return (((int64_t{1} << 30) - size) << ORDER_GROUP_BITS) | group;
}

OCTAVO_HD int64_t order_group(int64_t key) { return key & ((int64_t{1} << ORDER_GROUP_BITS) - 1); }

// ---- panels

// The group of a panel in use: the first whose panels end past it. `starts` has groups + 1 elements.
template <class Index>
OCTAVO_HD int64_t group_of_panel(const Index* starts, int64_t groups, int64_t panel) {
  int64_t low = 0, high = groups - 1;
  while (low < high) {
    const int64_t middle = (low + high) >> 1;
    if (static_cast<int64_t>(starts[middle + 1]) > panel) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// Starts of groups, [groups + 1] each: rows, and blocks of 16, 32 and 128 rows.
template <class Index>
struct Starts {
  const Index* rows;
  const Index* blocks16;
  const Index* blocks32;
  const Index* blocks128;
};

template <class Index>
OCTAVO_HD Panel panel_at(const Starts<Index>& starts, int64_t groups, int64_t panel) {
  if (panel >= static_cast<int64_t>(starts.blocks128[groups])) return {-1, 0, 0, 0, 0, 0, 0};
  const int64_t group = group_of_panel(starts.blocks128, groups, panel);
  const int64_t local = panel - static_cast<int64_t>(starts.blocks128[group]);
  const int64_t row0 = static_cast<int64_t>(starts.rows[group]) + local * PANEL_ROWS;
  const int64_t left = static_cast<int64_t>(starts.rows[group + 1]) - row0;
  return {static_cast<int32_t>(group),
          static_cast<int32_t>(left < PANEL_ROWS ? left : PANEL_ROWS),
          row0,
          static_cast<int32_t>(local),
          0,
          static_cast<int32_t>(static_cast<int64_t>(starts.blocks16[group]) + local * (PANEL_ROWS / 16)),
          static_cast<int32_t>(static_cast<int64_t>(starts.blocks32[group]) + local * (PANEL_ROWS / 32))};
}

}  // namespace octavo::cuda
