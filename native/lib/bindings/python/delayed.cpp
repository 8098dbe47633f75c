// Delayed scaling's state.
#include "octavo/delayed.h"

#include <nanobind/stl/vector.h>

#include "arguments.h"
#include "bindings.h"
#include "sequence.h"

namespace octavo::bindings {

namespace {

void record_amax(bool cuda, Address amax, Address history, int64_t operands, int64_t slots, int64_t groups,
                 Address stream, Sequence* into) {
  const RecordArgs args = {pointer<const float>(amax), pointer<float>(history), operands, slots, groups};
  launch_or_record(into, cuda, args, stream, 1);
}

void update_scales(bool cuda, Address history, Address scale, const std::vector<double>& maxima, int64_t slots,
                   int64_t groups, bool most_recent, Address reduced, Address stream) {
  UpdateArgs args;
  if (maxima.size() > MOST_DELAYED_OPERANDS) throw nb::value_error("maxima are more than 3; give x's, w's and dy's");
  args.history = pointer<float>(history);
  args.scale = pointer<float>(scale);
  args.reduced = pointer<const float>(reduced);
  args.operands = static_cast<int64_t>(maxima.size());
  for (size_t i = 0; i < maxima.size(); ++i) args.maxima[i] = static_cast<float>(maxima[i]);
  args.slots = slots;
  args.groups = groups;
  args.most_recent = most_recent;
  launch(cuda, [&] { return update_cpu(args); }, [&] { return update_cuda(args, cuda_stream(stream)); });
}

}  // namespace

void bind_delayed(nb::module_& m) {
  using namespace nb::literals;
  m.def("record_amax", &record_amax, nb::kw_only(), "cuda"_a, "amax"_a, "history"_a, "operands"_a, "slots"_a,
        "groups"_a, "stream"_a = 0, nb::arg("into").none() = nb::none(),
        "Raise slot 0 of a float32 history [operands, slots, groups] to amax [operands, groups]; NaN is not recorded.");
  m.def("update_scales", &update_scales, nb::kw_only(), "cuda"_a, "history"_a, "scale"_a, "maxima"_a, "slots"_a,
        "groups"_a, "most_recent"_a, "reduced"_a = 0, "stream"_a = 0,
        "End a step of delayed scaling: history [operands, slots, groups] and scale [operands, groups], in place.\n\n"
        "maxima: of each operand's format, less the margin. reduced: amax [operands, groups] over all ranks, which\n"
        "stands for slot 0 where it is not 0 or NaN.");
}

}  // namespace octavo::bindings
