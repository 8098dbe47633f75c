// One step of AdamW.
#include "octavo/adamw.h"

#include <nanobind/stl/pair.h>

#include "arguments.h"
#include "bindings.h"

namespace octavo::bindings {

namespace {

template <typename T>
using Both = std::pair<T, T>;

void make_rule(AdamWRule* self, double lr, Both<double> betas, double eps, double weight_decay, Address lr_device) {
  AdamWRule rule;
  rule.lr = static_cast<float>(lr);
  rule.lr_device = pointer<const float>(lr_device);
  rule.weight_decay = static_cast<float>(weight_decay);
  rule.eps = static_cast<float>(eps);
  const double given[2] = {betas.first, betas.second};
  for (int i = 0; i < 2; ++i) {
    rule.kept[i] = static_cast<float>(given[i]);
    rule.added[i] = static_cast<float>(1.0 - given[i]);
    double power = given[i];
    for (float& correction : rule.corrections[i]) {
      correction = static_cast<float>(1.0 - power);
      power *= power;
    }
  }
  new (self) AdamWRule(rule);
}

void make_draws(AdamWDraws* self, uint64_t seed, uint32_t tensor, int64_t step, Address step_device,
                int64_t first_row) {
  new (self) AdamWDraws{seed, tensor, step, pointer<const float>(step_device), first_row};
}

void make_arrays(AdamWArrays* self, Both<int64_t> shape, Both<Address> master, Both<Address> grad,
                 Both<Address> moments, Both<Address> tops, Both<Address> values) {
  const auto dtype_of = [](const Both<Address>& array, const char* name) {
    return enum_of(static_cast<int>(array.second), DType::bf16, name);
  };
  new (self) AdamWArrays{shape.first,
                         shape.second,
                         pointer<void>(master.first),
                         dtype_of(master, "master's dtype"),
                         pointer<const void>(grad.first),
                         dtype_of(grad, "grad's dtype"),
                         {pointer<void>(moments.first), pointer<void>(moments.second)},
                         {pointer<int32_t>(tops.first), pointer<int32_t>(tops.second)},
                         pointer<void>(values.first),
                         dtype_of(values, "values' dtype")};
}

void make_codes(AdamWCodes* self, int64_t matrix_rows, const Plane& rowwise, const Plane& columnwise,
                float amax_epsilon, bool power_of_two) {
  new (self) AdamWCodes{matrix_rows, rowwise, columnwise, amax_epsilon, power_of_two};
}

void adamw_step(bool cuda, const AdamWArrays& arrays, const AdamWRule& rule, const AdamWDraws& draws,
                const AdamWCodes* codes, Address inverse_scale, Address skip, Address stream) {
  const AdamWArgs args = {arrays,
                          rule,
                          draws,
                          codes ? *codes : AdamWCodes{},
                          pointer<const float>(inverse_scale),
                          pointer<const uint8_t>(skip)};
  launch(
      cuda, [&] { return unsupported("AdamW's step has no kernel for CPUs; compose it of other operations"); },
      [&] { return adamw_cuda(args, cuda_stream(stream)); });
}

}  // namespace

void bind_adamw(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<AdamWRule>(m, "AdamWRule", nb::is_final(),
                        "Hyperparameters of AdamW; with `lr_device`, the address of one fp32 number, `lr` is not read.")
      .def("__init__", &make_rule, nb::kw_only(), "lr"_a, "betas"_a, "eps"_a, "weight_decay"_a, "lr_device"_a = 0);
  nb::class_<AdamWDraws>(m, "AdamWDraws", nb::is_final(),
                         "What a step's random bits depend on: the seed, the tensor's number, and the step's, from 1 "
                         "on.\n\nstep_device: the address of one fp32 number, which is read instead of `step`.\n"
                         "first_row: where the array is part of a tensor, the number of its first row there.")
      .def("__init__", &make_draws, nb::kw_only(), "seed"_a = 0, "tensor"_a = 0, "step"_a = 1, "step_device"_a = 0,
           "first_row"_a = 0);
  nb::class_<AdamWArrays>(m, "AdamWArrays", nb::is_final(),
                          "Arrays [rows, cols]: master, grad and values as (address, dtype of DTYPES).\n\n"
                          "moments are fp32; or 8-bit codes, where int32 tops [rows, ceil(cols / 128)] are given.\n"
                          "values, bf16 or fp16, gets the new master rounded to nearest.")
      .def("__init__", &make_arrays, nb::kw_only(), "shape"_a, "master"_a, "grad"_a, "moments"_a,
           "tops"_a = Both<Address>{0, 0}, "values"_a = Both<Address>{0, static_cast<Address>(DType::bf16)});
  nb::class_<AdamWCodes>(m, "AdamWCodes", nb::is_final(),
                         "Planes that get codes of the new master, cast to bf16: E4M3 in square blocks of 128 of\n"
                         "stacked matrices. A plane without codes is not written.")
      .def("__init__", &make_codes, nb::kw_only(), "matrix_rows"_a, "rowwise"_a, "columnwise"_a,
           "amax_epsilon"_a = 0.0f, "power_of_two"_a = false);
  m.def("adamw_step", &adamw_step, nb::kw_only(), "cuda"_a, "arrays"_a, "rule"_a, "draws"_a,
        nb::arg("codes").none() = nb::none(), "inverse_scale"_a = 0, "skip"_a = 0, "stream"_a = 0,
        "One step, in place: moments, master, and values or codes of it. On CUDA alone.\n\n"
        "inverse_scale: the address of one fp32 number that multiplies grad. skip: of one byte; where it is not 0,\n"
        "nothing is changed.");
}

}  // namespace octavo::bindings
