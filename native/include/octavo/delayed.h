// Delayed scaling's state: amax that a step records, and the scales of the next one (Micikevicius et al., arXiv
// 2209.05433, section 4; docs/numerics).
#pragma once

#include "octavo/types.h"

namespace octavo {

constexpr int MOST_DELAYED_OPERANDS = 3;  // x, w, dy

// history[o][0] becomes the maximum of itself and amax[o]; NaN counts as not recorded.
struct RecordArgs {
  const float* amax = nullptr;  // [operands, groups]
  float* history = nullptr;     // [operands, slots, groups]: slot 0 collects the running step
  int64_t operands = 1;
  int64_t slots = 0;
  int64_t groups = 0;
};

// The end of a step. A group whose last amax is 0 keeps its history and its scale; others move up by a slot, and where
// their amax is finite and above 0 the scale becomes maximum / amax, at most FLT_MAX.
struct UpdateArgs {
  float* history = nullptr;        // [operands, slots, groups]
  float* scale = nullptr;          // [operands, groups]
  const float* reduced = nullptr;  // [operands, groups] or null: amax over all ranks, where not 0 or NaN for slot 0
  float maxima[MOST_DELAYED_OPERANDS] = {};  // largest values of the formats, less the margin
  int64_t operands = 1;
  int64_t slots = 0;  // at least 2
  int64_t groups = 0;
  bool most_recent = false;  // amax is the last one, not the maximum of all
};

Error check_record(const RecordArgs& args);
Error check_update(const UpdateArgs& args);

Error record_cpu(const RecordArgs& args);
Error record_cuda(const RecordArgs& args, void* stream);
Error update_cpu(const UpdateArgs& args);
Error update_cuda(const UpdateArgs& args, void* stream);

}  // namespace octavo
