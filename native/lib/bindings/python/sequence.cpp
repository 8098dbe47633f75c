#include "sequence.h"

#include <nanobind/stl/vector.h>

#include "bindings.h"

namespace octavo::bindings {

namespace {

constexpr uint64_t OFFSET = (uint64_t{1} << PLACE_BITS) - 1;

// Calls `use` with every array pointer of a launch, by reference.

template <typename Use>
void each_array(PlanArgs& args, Use&& use) {
  use(args.sizes), use(args.plan), use(args.status);
}

template <typename Use>
void each_array(Plane& plane, Use&& use) {
  use(plane.codes), use(plane.scales), use(plane.global);
}

template <typename Use>
void each_array(QuantizeArgs& args, Use&& use) {
  Prologue& prologue = args.prologue;
  use(args.input.data), use(args.input.plan), use(args.input.index.of_rows), use(args.input.mxfp4_scales);
  use(prologue.dy), use(prologue.probs), use(prologue.dprobs), use(prologue.forward), use(prologue.gamma),
      use(prologue.beta);
  use(prologue.mean), use(prologue.rstd);
  each_array(args.rowwise, use), each_array(args.columnwise, use);
  use(args.encode_scales), use(args.amax), use(args.dequantized), use(args.activated), use(args.dbias);
  use(args.seed), use(args.group_offset_device), use(args.unchanged), use(args.workspace);
}

template <typename Use>
void each_array(GemmOperand& operand, Use&& use) {
  use(operand.data), use(operand.scales), use(operand.global), use(operand.index.of_rows);
}

template <typename Use>
void each_array(GemmArgs& args, Use&& use) {
  each_array(args.left, use), each_array(args.right, use);
  use(args.plan), use(args.out), use(args.bias), use(args.bias_scales), use(args.workspace);
}

template <typename Use>
void each_array(RecordArgs& args, Use&& use) {
  use(args.amax), use(args.history);
}

uint64_t place_of(const void* array) { return reinterpret_cast<uintptr_t>(array); }

}  // namespace

void Sequence::add(bool cuda, Launch launch) {
  if (cuda != cuda_) throw nb::value_error("cuda is not the sequence's; record launches of one device");
  uint64_t most = arrays_;
  const auto count = [&most](const auto* array) {
    const uint64_t place = place_of(array), number = place >> PLACE_BITS;
    if (place != 0 && number == 0) {
      throw nb::value_error("an array of a recorded launch is an address; give octavo_native.place(number, offset)");
    }
    if (number > most) most = number;
  };
  std::visit([&count](auto& args) { each_array(args, count); }, launch);
  launches_.push_back(launch);
  arrays_ = most;
}

void Sequence::run(const std::vector<Address>& arrays, Address stream, int threads) const {
  if (arrays.size() < arrays_) throw nb::value_error("arrays are fewer than the recorded launches name; give them all");
  const auto find = [&arrays]<typename T>(T*& array) {
    const uint64_t place = place_of(array);
    if (place == 0) return;
    const Address start = arrays[(place >> PLACE_BITS) - 1];
    array = start == 0 ? nullptr : pointer<T>(start + (place & OFFSET));
  };
  const auto run_all = [&](auto&& run_one) -> Error {
    for (Launch launch : launches_) {
      const Error error = std::visit(
          [&](auto& args) {
            each_array(args, find);
            return run_one(args);
          },
          launch);
      if (error) return error;
    }
    return {};
  };
  bindings::launch(
      cuda_, [&] { return run_all([&](const auto& args) { return on_cpu(args, threads); }); },
      [&] { return run_all([&](const auto& args) { return on_cuda(args, cuda_stream(stream)); }); });
}

void bind_sequence(nb::module_& m) {
  using namespace nb::literals;
  m.attr("PLACE_BITS") = PLACE_BITS;
  nb::class_<Sequence>(m, "Sequence", nb::is_final(),
                       "Launches recorded once and run with other arrays each time, in one call.\n\n"
                       "`plan`, `Quantizer.run`, `Gemm.run` and `record_amax` append themselves to the sequence that\n"
                       "they get as `into`. The arrays of a recorded launch are places, octavo_native.place(number,\n"
                       "offset), 0 where there is none; everything else is as it was recorded.")
      .def(nb::init<bool>(), nb::kw_only(), "cuda"_a)
      .def("run", &Sequence::run, "arrays"_a, "stream"_a = 0, "threads"_a = 1,
           "Every launch in order: on the arrays at these addresses, of which the first has number 1. An address of 0\n"
           "means a null array, whatever the offset. ValueError and RuntimeError as the launches themselves raise\n"
           "them; those before have run.")
      .def("__len__", &Sequence::size);
}

}  // namespace octavo::bindings
