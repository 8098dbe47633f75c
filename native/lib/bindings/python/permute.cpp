// Routing, and moving rows accordingly.
#include "octavo/permute.h"

#include "arguments.h"
#include "bindings.h"
#include "common/check.h"
#include "sequence.h"

namespace octavo::bindings {

namespace {

int64_t workspace_of_route(int64_t choices, int64_t groups) {
  raise_if(check_counts(choices, groups));
  return route_workspace(choices, groups);
}

void route_choices(bool cuda, Address index, int64_t choices, int64_t groups, Address group_sizes, Address order,
                   Address position, Address routed, Address counts, Address stream, Sequence* into) {
  const RouteArgs args = {pointer<const int64_t>(index),
                          choices,
                          groups,
                          pointer<int64_t>(group_sizes),
                          pointer<int64_t>(order),
                          pointer<int64_t>(position),
                          pointer<uint8_t>(routed),
                          pointer<int32_t>(counts)};
  launch_or_record(into, cuda, args, stream, 1);
}

Choices choices_of(int64_t tokens, int64_t each, int64_t row_count, Address position, Address routed, Address weights) {
  return {tokens,
          each,
          row_count,
          pointer<const int64_t>(position),
          pointer<const uint8_t>(routed),
          pointer<const float>(weights)};
}

template <typename Move>
void move_rows(bool cuda, int64_t tokens, int64_t each, int64_t row_count, Address position, Address routed,
               Address weights, int dtype, int64_t cols, Address from, int64_t stride, Address out, Address stream,
               int threads, Sequence* into) {
  const MoveArgs args = {choices_of(tokens, each, row_count, position, routed, weights),
                         enum_of(dtype, DType::bf16, "dtype"),
                         cols,
                         stride,
                         pointer<const void>(from),
                         pointer<void>(out)};
  launch_or_record(into, cuda, Move{args}, stream, threads);
}

void dot_rows(bool cuda, int64_t tokens, int64_t each, int64_t row_count, Address position, Address routed, int dtype,
              int64_t cols, Address rows, int64_t row_stride, Address dy, int64_t dy_stride, Address out,
              Address stream, int threads, Sequence* into) {
  const DotArgs args = {choices_of(tokens, each, row_count, position, routed, 0),
                        enum_of(dtype, DType::bf16, "dtype"),
                        cols,
                        row_stride,
                        dy_stride,
                        pointer<const void>(rows),
                        pointer<const void>(dy),
                        pointer<float>(out)};
  launch_or_record(into, cuda, args, stream, threads);
}

}  // namespace

void bind_permute(nb::module_& m) {
  using namespace nb::literals;
  m.def(
      "route", &route_choices, nb::kw_only(), "cuda"_a, "index"_a, "choices"_a, "groups"_a, "group_sizes"_a, "order"_a,
      "position"_a, "routed"_a, "counts"_a = 0, "stream"_a = 0, nb::arg("into").none() = nb::none(),
      "Sort int64 `index` [choices] stably by group: int64 sizes [groups], order and its inverse position [choices],\n"
      "one byte per choice in `routed`. A number outside 0 to groups - 1 names no group and is sorted last.\n"
      "`counts` is a workspace of route_workspace bytes, or 0, with which a GPU takes less time.");
  m.def("route_workspace", &workspace_of_route, "choices"_a, "groups"_a,
        "Bytes of route's workspace on a GPU; 0 where it has no use for one.");
  m.def("permute_rows", &move_rows<PermuteRows>, nb::kw_only(), "cuda"_a, "tokens"_a, "each"_a, "row_count"_a,
        "position"_a, "routed"_a, "weights"_a, "dtype"_a, "cols"_a, "from_"_a, "stride"_a, "out"_a, "stream"_a = 0,
        "threads"_a = 1, nb::arg("into").none() = nb::none(),
        "out[position[t, j]] = weights[t, j] * from[t], from [tokens, cols] and out [row_count, cols] of `dtype`.\n\n"
        "Zeros where routed[t, j] is 0, or nothing with fewer rows than choices; copies of bits where fp32 `weights` "
        "is 0.");
  m.def(
      "combine_rows", &move_rows<CombineRows>, nb::kw_only(), "cuda"_a, "tokens"_a, "each"_a, "row_count"_a,
      "position"_a, "routed"_a, "weights"_a, "dtype"_a, "cols"_a, "from_"_a, "stride"_a, "out"_a, "stream"_a = 0,
      "threads"_a = 1, nb::arg("into").none() = nb::none(),
      "out[t] = the sum over j of weights[t, j] * from[position[t, j]] where routed[t, j], in fp32 in the order of j.");
  m.def("dot_rows", &dot_rows, nb::kw_only(), "cuda"_a, "tokens"_a, "each"_a, "row_count"_a, "position"_a, "routed"_a,
        "dtype"_a, "cols"_a, "rows"_a, "row_stride"_a, "dy"_a, "dy_stride"_a, "out"_a, "stream"_a = 0, "threads"_a = 1,
        nb::arg("into").none() = nb::none(),
        "out[t, j] = rows[position[t, j]] . dy[t] in fp32, 0 where routed[t, j] is 0: the gradient of combine's "
        "weights.");
}

}  // namespace octavo::bindings
