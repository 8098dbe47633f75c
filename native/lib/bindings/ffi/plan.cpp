// octavo_plan: group sizes [G], s32 or s64, to a plan.
//
// The plan is s32 [2 * plan_words]: JAX has no 64-bit integers unless the user turns them on. XLA aligns every buffer
// that it allocates to 64 bytes or more whatever its element type, so the words inside are aligned as plan.h asks; the
// pointer is checked all the same.
#include "octavo/plan.h"
#include "common/check.h"
#include "handler.h"

namespace octavo {

struct PlanAttributes {
  int64_t rows;
};

}  // namespace octavo

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(octavo::PlanAttributes, ::xla::ffi::StructMember<int64_t>("rows"));

namespace octavo {
namespace {

ffi::Error plan(const Launch& launch, ffi::RemainingArgs args, ffi::RemainingRets rets, const PlanAttributes& given) {
  Buffers operands("octavo_plan", "operand"), results("octavo_plan", "result");
  operands.read("sizes", args);
  results.read("plan", rets);
  PlanArgs out{};
  const ffi::AnyBuffer* sizes = operands.take("sizes");
  if (sizes != nullptr) {
    const ffi::DataType type = sizes->element_type();
    out.sizes_are_64 = type == ffi::S64;
    if ((type != ffi::S32 && type != ffi::S64) || sizes->dimensions().size() != 1) {
      operands.refuse("operand sizes is " + text(*sizes) + " and must be s32[G] or s64[G]");
    } else {
      out.groups = sizes->dimensions()[0];
      out.sizes = Buffers::address(*sizes);
    }
  }
  out.rows = given.rows;
  if (out.rows < 0 || out.rows > MAX_ROWS) operands.refuse("rows is " + std::to_string(out.rows) + "; at most 2^30");
  if (ffi::Error error = operands.finish(); error.failure()) return error;
  out.plan = results.take<int64_t>("plan", ffi::S32, {2 * plan_words(out.rows, out.groups)});
  if (ffi::Error error = results.finish(); error.failure()) return error;
  return as_ffi(launch.cuda() ? plan_cuda(out, launch.stream) : plan_cpu(out), "octavo_plan");
}

}  // namespace

std::vector<Target> plan_targets() { return {target<PlanAttributes, plan>("octavo_plan")}; }

}  // namespace octavo
