// InputArgs, PlaneArgs, PrologueArgs: the parts of QuantizeArgs. One call with every field as a keyword of its own
// would take longer to match its keywords than to launch (docs/field-notes/builds.md).
#include <new>

#include "arguments.h"
#include "bindings.h"
#include "octavo/quantize.h"

namespace octavo::bindings {

namespace {

void make_input(Input* self, Address x, int dtype, int64_t rows, int64_t cols, int64_t row_stride, int64_t groups,
                int64_t matrix_rows, Address plan, Address index, int64_t each, int64_t count, Address mxfp4_scales,
                int64_t interleaved_cols, int64_t interleaved_rows) {
  new (self) Input{pointer<const void>(x),
                   enum_of(dtype, DType::bf16, "dtype"),
                   rows,
                   cols,
                   row_stride,
                   groups,
                   matrix_rows,
                   pointer<const int64_t>(plan),
                   {pointer<const int64_t>(index), each, count},
                   pointer<const uint8_t>(mxfp4_scales),
                   interleaved_cols,
                   interleaved_rows};
}

void make_plane(Plane* self, Address codes, Address scales, Address global, int layout) {
  new (self) Plane{pointer<void>(codes), pointer<void>(scales), pointer<float>(global),
                   enum_of(layout, Layout::values, "layout")};
}

void make_prologue(Prologue* self, int kind, int activation, int norm, Address dy, int64_t dy_stride, Address probs,
                   Address dprobs, Address forward, Address gamma, Address beta, float epsilon, Address mean,
                   Address rstd) {
  Prologue prologue;
  prologue.kind = enum_of(kind, PrologueKind::norm, "kind");
  prologue.activation = enum_of(activation, Activation::clamped_swiglu, "activation");
  prologue.norm = enum_of(norm, Norm::layer, "norm");
  prologue.dy = pointer<const void>(dy);
  prologue.dy_stride = dy_stride;
  prologue.probs = pointer<const float>(probs);
  prologue.dprobs = pointer<float>(dprobs);
  prologue.forward = pointer<void>(forward);
  prologue.gamma = pointer<const void>(gamma);
  prologue.beta = pointer<const void>(beta);
  prologue.epsilon = epsilon;
  prologue.mean = pointer<float>(mean);
  prologue.rstd = pointer<float>(rstd);
  new (self) Prologue(prologue);
}

}  // namespace

void bind_quantize_arguments(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<Input>(
      m, "InputArgs", nb::is_final(),
      "What is quantized: x [rows, cols], rows `row_stride` elements apart, of a dtype of DTYPES.\n\n"
      "Ragged rows need a plan; with matrix_rows N, x is `groups` matrices [N, cols], rows = groups * N.\n"
      "With `index` int64 [rows], x is [count, cols] and row i is its row index[i] // each; zeros where\n"
      "index[i] is outside 0 to count * each - 1. With `mxfp4_scales` uint8 [rows, cols / 32], matrices x are MXFP4's\n"
      "codes, two per byte, and dtype is bfloat16: for CUDA, and E4M3 codes in square blocks of 128.\n\n"
      "interleaved_cols, interleaved_rows: columns of matrices, or their rows, are two halves that take turns in x in\n"
      "blocks of so many; what is quantized are the halves. For CUDA: bfloat16, aligned to 16 bytes; delayed and\n"
      "current scaling and square blocks of 128; blocks of 1 or of a multiple of 8, in halves of a multiple of 8.")
      .def("__init__", &make_input, nb::kw_only(), "x"_a, "dtype"_a, "rows"_a, "cols"_a, "row_stride"_a, "groups"_a,
           "matrix_rows"_a = 0, "plan"_a = 0, "index"_a = 0, "each"_a = 1, "count"_a = 0, "mxfp4_scales"_a = 0,
           "interleaved_cols"_a = 0, "interleaved_rows"_a = 0);
  nb::class_<Plane>(
      m, "PlaneArgs", nb::is_final(),
      "The arrays of one plane, in a layout of LAYOUTS. global_: nvfp4's second-level factors [groups].\n\n"
      "values: bfloat16 of codes times block scales in the place of codes, and scales 0; of mxfp8, nvfp4.")
      .def("__init__", &make_plane, "codes"_a, "scales"_a, "global_"_a = 0, "layout"_a = 0);
  nb::class_<Prologue>(
      m, "PrologueArgs", nb::is_final(),
      "What is applied to the input before it is quantized: a kind of PROLOGUES.\n\n"
      "activation, activation_grad: an activation of ACTIVATIONS; dy of the gradient, rows dy_stride\n"
      "elements apart; probs [rows] and, written by the gradient, dprobs [rows] and forward [rows, F],\n"
      "the activation's values. norm: one of NORMS with gamma, beta and epsilon; mean and rstd [rows]\n"
      "are written.")
      .def("__init__", &make_prologue, nb::kw_only(), "kind"_a, "activation"_a = 0, "norm"_a = 0, "dy"_a = 0,
           "dy_stride"_a = 0, "probs"_a = 0, "dprobs"_a = 0, "forward"_a = 0, "gamma"_a = 0, "beta"_a = 0,
           "epsilon"_a = 0.0f, "mean"_a = 0, "rstd"_a = 0);
}

}  // namespace octavo::bindings
