// The order of turns, from the plan or, of matrices, from their size, and all that has to be set before a launch that
// takes them.
#pragma once

#include "turns.cuh"

namespace octavo::cuda {

struct Fill {
  uint32_t* at;
  int64_t count;
  uint32_t word;
};

// fills: amaxes, the scales of nothing for both planes, and the caller's amax.
struct OrderArgs {
  Fill fills[4];
  Turns turns;
  uint32_t* order;
  const int64_t* panel_start;  // [G + 1] of a plan; null: matrices
  int64_t panels, count;       // `panels` is a bound; groups
  int64_t lag, most_forward;   // in panels
  const int32_t* unchanged;
};

// At each step one panel's amaxes, and before them one panel's codes of every group whose amaxes ended `lag` steps ago
// or earlier and whose codes have not; after the last step the codes that are left. Groups of more than `most_forward`
// panels begin with their last one, which is the likeliest to be in the L2 cache still. A warp places one panel.
__global__ void __launch_bounds__(256) order_turns(const __grid_constant__ OrderArgs args) {
  if (args.unchanged && *args.unchanged) return;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
#pragma unroll
  for (const Fill& fill : args.fills)
    if (i < fill.count) fill.at[i] = fill.word;
  const Turns& turns = args.turns;
  const int64_t each = ceil_div(turns.groups.matrix_rows, PANEL_ROWS);
  const auto start_of = [&](int64_t group) { return args.panel_start ? args.panel_start[group] : group * each; };
  const auto size_of = [&](int64_t group) { return start_of(group + 1) - start_of(group); };
  if (turns.of_groups && i < args.count) turns.of_groups[i] = static_cast<uint32_t>(size_of(i) * turns.a_panel);
  if (turns.of_columns && i < args.count * turns.across)
    turns.of_columns[i] = static_cast<uint32_t>(size_of(i / turns.across));
  if (turns.of_panels && i < args.panels) turns.of_panels[i] = turns.a_panel;

  const int64_t panel = i / 32;
  if (panel >= args.panels) return;
  const int lane = static_cast<int>(threadIdx.x % 32), live = static_cast<int>(start_of(args.count));
  if (panel >= live) {
    if (lane < 2) args.order[2 * panel + lane] = NO_PANEL;
    return;
  }
  const int own = static_cast<int>(panel), lag = static_cast<int>(args.lag);
  const int group = static_cast<int>(args.panel_start ? turns.groups.panels[panel].group : panel / each);
  const int start = static_cast<int>(start_of(group)), end = static_cast<int>(start_of(group + 1));
  const int step = end + lag + (end - start > args.most_forward ? end - 1 - own : own - start);  // of its codes
  // Turns of codes before the panel's amaxes, and before its codes.
  int codes[2] = {};
  for (int other = lane; other < args.count; other += 32) {
    const int next = static_cast<int>(start_of(other + 1)), size = next - static_cast<int>(start_of(other));
    codes[0] += min(max(own + 1 - next - lag, 0), size);
    codes[1] += min(max(step - next - lag + (other < group), 0), size);
  }
  const int before_amaxes = own + __reduce_add_sync(~0u, codes[0]);
  const int before_codes = min(step, live) + __reduce_add_sync(~0u, codes[1]);
  if (lane == 0) {
    args.order[before_amaxes] = static_cast<uint32_t>(2 * own);
    args.order[before_codes] = static_cast<uint32_t>(2 * own + 1);
  }
}

}  // namespace octavo::cuda
