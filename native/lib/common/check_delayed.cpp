// Argument checks of delayed scaling's state, shared by both devices.
#include "check.h"
#include "octavo/delayed.h"

namespace octavo {

namespace {

Error check_state(int64_t operands, int64_t slots, int64_t groups) {
  if (operands < 1 || operands > MOST_DELAYED_OPERANDS) return invalid("operands is not 1 to 3; give x, w, dy at most");
  if (slots < 2) return invalid("slots is less than 2; a history holds the running step and one before it");
  return check_counts(slots, groups);
}

}  // namespace

Error check_record(const RecordArgs& args) {
  if (const Error error = check_state(args.operands, args.slots, args.groups)) return error;
  if (args.amax == nullptr || args.history == nullptr) return invalid("amax or history is null; give both");
  if (!aligned(args.amax, 4) || !aligned(args.history, 4)) {
    return invalid("amax or history is not aligned to 4 bytes; they are fp32");
  }
  return {};
}

Error check_update(const UpdateArgs& args) {
  if (const Error error = check_state(args.operands, args.slots, args.groups)) return error;
  if (args.history == nullptr || args.scale == nullptr) return invalid("history or scale is null; give both");
  if (!aligned(args.history, 4) || !aligned(args.scale, 4) || !aligned(args.reduced, 4)) {
    return invalid("history, scale or reduced is not aligned to 4 bytes; they are fp32");
  }
  return {};
}

}  // namespace octavo
