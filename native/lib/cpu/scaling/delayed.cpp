// Delayed scaling on the CPU: counterparts of the CUDA kernels.
#include "octavo/delayed.h"

#include <algorithm>
#include <cfloat>
#include <cmath>

#include "cpu/loops/threads.h"

namespace octavo {

namespace {

// The larger one; NaN wins over any number.
float maximum(float a, float b) { return std::isnan(a) || a > b ? a : b; }

void update_group(const UpdateArgs& args, int64_t operand, int64_t group) {
  const int64_t step = args.groups, end = args.slots * step;
  float* history = args.history + operand * end + group;
  float last = history[0];
  if (args.reduced != nullptr) {
    const float reduced = args.reduced[operand * args.groups + group];
    if (reduced != 0.0f && !std::isnan(reduced)) last = reduced;
  }
  if (last == 0.0f) return;
  float amax = last;
  if (!args.most_recent) {
    for (int64_t at = step; at < end; at += step) amax = maximum(amax, history[at]);
  }
  for (int64_t at = step; at + step < end; at += step) history[at] = history[at + step];
  history[0] = 0.0f;
  history[end - step] = last;
  if (amax > 0.0f && std::isfinite(amax)) {
    args.scale[operand * args.groups + group] = std::min(args.maxima[operand] / amax, FLT_MAX);
  }
}

}  // namespace

Error record_cpu(const RecordArgs& args) {
  if (const Error error = check_record(args)) return error;
  const cpu::FloatMode mode;
  for (int64_t operand = 0; operand < args.operands; ++operand) {
    const float* amax = args.amax + operand * args.groups;
    float* slot = args.history + operand * args.slots * args.groups;
    for (int64_t g = 0; g < args.groups; ++g) {
      if (amax[g] > slot[g]) slot[g] = amax[g];
    }
  }
  return {};
}

Error update_cpu(const UpdateArgs& args) {
  if (const Error error = check_update(args)) return error;
  const cpu::FloatMode mode;
  for (int64_t operand = 0; operand < args.operands; ++operand) {
    for (int64_t group = 0; group < args.groups; ++group) update_group(args, operand, group);
  }
  return {};
}

}  // namespace octavo
