#include "octavo/plan.h"

#include "arguments.h"
#include "bindings.h"
#include "common/check.h"
#include "sequence.h"

namespace octavo::bindings {

namespace {

int64_t words_of_plan(int64_t rows, int64_t groups) {
  if (rows < 0 || groups < 1) {
    throw nb::value_error("plan_words takes rows of 0 or more and groups of 1 or more");
  }
  raise_if(check_counts(rows, groups));
  return plan_words(rows, groups);
}

void make_plan(bool cuda, Address sizes, bool sizes_are_64, int64_t groups, int64_t rows, Address plan, Address stream,
               Address status, Address bounded, Sequence* into) {
  const PlanArgs args = {
      pointer<const void>(sizes), sizes_are_64, groups, rows, pointer<int64_t>(plan), pointer<int32_t>(status),
      pointer<int64_t>(bounded)};
  launch_or_record(into, cuda, args, stream, 1);
}

}  // namespace

void bind_plan(nb::module_& m) {
  using namespace nb::literals;
  m.def("plan_words", &words_of_plan, "rows"_a, "groups"_a,
        "int64 words of the plan of `rows` rows in `groups` groups.");
  m.def("plan", &make_plan, nb::kw_only(), "cuda"_a, "sizes"_a, "sizes_are_64"_a, "groups"_a, "rows"_a, "plan"_a,
        "stream"_a = 0, "status"_a = 0, "bounded"_a = 0, nb::arg("into").none() = nb::none(),
        "Write the plan of these group sizes: int64[plan_words(rows, groups)] at `plan`, 32-byte aligned.\n\n"
        "A negative size counts as 0 and rows past `rows` are cut off; either sets bit 0 of the int32 at `status`.\n"
        "`bounded`: int64 [groups], where the sizes that are left are written, too.");
}

}  // namespace octavo::bindings
