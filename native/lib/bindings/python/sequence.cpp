#include "sequence.h"

#include <nanobind/stl/vector.h>

#include <algorithm>
#include <iterator>
#include <limits>

#include "bindings.h"

namespace octavo::bindings {

namespace {

constexpr uint64_t OFFSET = (uint64_t{1} << PLACE_BITS) - 1;

// Calls `use` with every array pointer of a launch, by reference.

template <typename Use>
void each_array(PlanArgs& args, Use&& use) {
  use(args.sizes), use(args.plan), use(args.status), use(args.bounded);
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

template <typename Use>
void each_array(RouteArgs& args, Use&& use) {
  use(args.index), use(args.group_sizes), use(args.order), use(args.position), use(args.routed), use(args.counts);
}

template <typename Use>
void each_array(Choices& choices, Use&& use) {
  use(choices.position), use(choices.routed), use(choices.weights);
}

template <typename Use>
void each_array(MoveArgs& args, Use&& use) {
  each_array(args.choices, use);
  use(args.from), use(args.out);
}

template <typename Use>
void each_array(PermuteRows& launch, Use&& use) {
  each_array(launch.args, use);
}

template <typename Use>
void each_array(CombineRows& launch, Use&& use) {
  each_array(launch.args, use);
}

template <typename Use>
void each_array(DotArgs& args, Use&& use) {
  each_array(args.choices, use);
  use(args.rows), use(args.dy), use(args.out);
}

template <typename Use>
void each_array(DequantizeArgs& args, Use&& use) {
  each_array(args.plane, use);
  use(args.plan), use(args.out);
}

uint64_t place_of(const void* array) { return reinterpret_cast<uintptr_t>(array); }

}  // namespace

uint64_t Sequence::name(Address start, uint64_t bytes, bool replaces) {
  if (start == 0 || bytes == 0) throw nb::value_error("an array is empty; name arrays with bytes");
  auto first = named_.upper_bound(start);
  if (first != named_.begin() && std::prev(first)->second.end > start) --first;
  const auto end = named_.lower_bound(start + bytes);
  if (first != end && !replaces) {
    throw nb::value_error("an array shares bytes with one that has a number; name each array once");
  }
  named_.erase(first, end);
  named_[start] = {start + bytes, ++arrays_};
  return arrays_;
}

void Sequence::add(bool cuda, Launch launch) {
  if (cuda != cuda_) throw nb::value_error("cuda is not the sequence's; record launches of one device");
  uint64_t most = arrays_;
  const auto place = [&]<typename T>(T*& array) {
    const uint64_t given = place_of(array), number = given >> PLACE_BITS;
    if (number > most) most = number;
    if (given == 0 || number != 0) return;
    const auto after = named_.upper_bound(given);
    if (after == named_.begin() || std::prev(after)->second.end <= given) {
      throw nb::value_error(
          "an array of a recorded launch is an address in no named array; give octavo_native.place(number, offset), or "
          "name the array first");
    }
    const auto& [start, named] = *std::prev(after);
    array = pointer<T>((named.number << PLACE_BITS) | (given - start));
  };
  std::visit([&place](auto& args) { each_array(args, place); }, launch);
  launches_.push_back(launch);
  arrays_ = most;
}

std::vector<std::vector<uint64_t>> Sequence::arrays() const {
  std::vector<std::vector<uint64_t>> all;
  for (Launch launch : launches_) {
    std::vector<uint64_t>& numbers = all.emplace_back();
    const auto note = [&numbers](const auto* array) {
      if (array != nullptr) numbers.push_back(place_of(array) >> PLACE_BITS);
    };
    std::visit([&note](auto& args) { each_array(args, note); }, launch);
  }
  return all;
}

void Sequence::run(const std::vector<Address>& arrays, Address stream, int threads, size_t first, size_t end) const {
  if (arrays.size() < arrays_) throw nb::value_error("arrays are fewer than the recorded launches name; give them all");
  const auto find = [&arrays]<typename T>(T*& array) {
    const uint64_t place = place_of(array);
    if (place == 0) return;
    const Address start = arrays[(place >> PLACE_BITS) - 1];
    array = start == 0 ? nullptr : pointer<T>(start + (place & OFFSET));
  };
  const auto run_all = [&](auto&& run_one) -> Error {
    for (size_t number = first; number < std::min(end, launches_.size()); ++number) {
      Launch launch = launches_[number];
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
  nb::class_<Sequence>(
      m, "Sequence", nb::is_final(),
      "Launches recorded once and run with other arrays each time, in one call.\n\n"
      "What takes `into` appends itself to the sequence that it gets as such. The arrays of a recorded\n"
      "launch are places, octavo_native.place(number, offset), 0 where there is none, or addresses in\n"
      "arrays that were named before; everything else is as it was recorded.")
      .def(nb::init<bool>(), nb::kw_only(), "cuda"_a)
      .def("name", &Sequence::name, "start"_a, "bytes"_a, "replaces"_a = false,
           "The number of the array at this address, which is the next. Launches that are recorded from now on may\n"
           "have addresses in it for places. Arrays that share bytes with it are gone if it replaces them, as memory\n"
           "that was freed and allocated again does; else a ValueError.")
      .def(
          "run", &Sequence::run, "arrays"_a, "stream"_a = 0, "threads"_a = 1, "first"_a = 0,
          "end"_a = std::numeric_limits<size_t>::max(),
          "The launches from number `first` to before `end`, in order: on the arrays at these addresses, of which the\n"
          "first has number 1. An address of 0 means a null array, whatever the offset. ValueError and RuntimeError "
          "as\n"
          "the launches themselves raise them; those before have run.")
      .def("arrays", &Sequence::arrays, "The numbers of each launch's arrays, in the order of the launches.")
      .def("__len__", &Sequence::size);
}

}  // namespace octavo::bindings
