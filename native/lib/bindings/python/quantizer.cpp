// octavo_native.Quantizer: a QuantizerSpec and what can be done with it.
#include <nanobind/stl/optional.h>

#include <optional>

#include "arguments.h"
#include "bindings.h"
#include "octavo/dequantize.h"
#include "octavo/quantize.h"
#include "sequence.h"

namespace octavo::bindings {

namespace {

// A placeholder for an array that a call will be given, for workspace sizes; it is never dereferenced.
template <typename T>
T* placeholder(bool present) {
  return present ? pointer<T>(256) : nullptr;
}

class Quantizer {
 public:
  Quantizer(int format, int scaling, int operand, bool square, bool stochastic, bool hadamard, bool power_of_two,
            float amax_epsilon, std::optional<int> mxfp4, bool square_columns)
      : spec_{enum_of(format, Format::e2m1, "format"),
              enum_of(scaling, Scaling::nvfp4, "scaling"),
              enum_of(operand, Operand::dy, "operand"),
              square,
              stochastic,
              hadamard,
              power_of_two,
              amax_epsilon,
              {},
              square_columns} {
    if (mxfp4) spec_.mxfp4 = enum_of(*mxfp4, Direction::columnwise, "mxfp4");
  }

  size_t workspace_bytes(bool cuda, int dtype, int64_t rows, int64_t cols, int64_t groups, bool rowwise,
                         bool columnwise, int64_t matrix_rows, int prologue, int activation, int norm, bool amax,
                         bool dequantized, bool dbias, bool dprobs, int64_t count) const {
    QuantizeArgs args;
    args.spec = spec_;
    args.input = {placeholder<const void>(true),
                  enum_of(dtype, DType::bf16, "dtype"),
                  rows,
                  cols,
                  cols,
                  groups,
                  matrix_rows,
                  placeholder<const int64_t>(matrix_rows == 0)};
    args.prologue.kind = enum_of(prologue, PrologueKind::norm, "prologue");
    args.prologue.activation = enum_of(activation, Activation::clamped_swiglu, "activation");
    args.prologue.norm = enum_of(norm, Norm::layer, "norm");
    args.prologue.dy = placeholder<const void>(args.prologue.kind == PrologueKind::activation_grad);
    args.prologue.dy_stride = cols;
    args.prologue.gamma = placeholder<const void>(args.prologue.kind == PrologueKind::norm);
    args.rowwise = {placeholder<void>(rowwise), placeholder<void>(rowwise), placeholder<float>(rowwise)};
    args.columnwise = {placeholder<void>(columnwise), placeholder<void>(columnwise), placeholder<float>(columnwise)};
    args.encode_scales = placeholder<const float>(spec_.scaling == Scaling::delayed);
    args.seed = placeholder<const uint32_t>(spec_.stochastic);
    args.amax = placeholder<float>(amax);
    args.dequantized = placeholder<void>(dequantized);
    args.dbias = placeholder<float>(dbias);
    args.prologue.dprobs = placeholder<float>(dprobs);
    // alone, without planes, an activation has values
    args.activated = placeholder<void>(!rowwise && !columnwise);
    args.input.index = {placeholder<const int64_t>(count > 0), 1, count};
    raise_if(check_quantize(args));
    return cuda ? quantize_workspace_cuda(args) : quantize_workspace_cpu(args);
  }

  void run(bool cuda, const Input& input, const Plane* rowwise, const Plane* columnwise, const Prologue* prologue,
           Address encode_scales, Address amax, Address dequantized, Address activated, Address dbias, Address seed,
           uint32_t group_offset, Address group_offset_device, Address unchanged, int ctas, Address workspace,
           size_t workspace_bytes, Address stream, int threads, Sequence* into) const {
    QuantizeArgs args;
    args.spec = spec_;
    args.input = input;
    if (rowwise != nullptr) args.rowwise = *rowwise;
    if (columnwise != nullptr) args.columnwise = *columnwise;
    if (prologue != nullptr) args.prologue = *prologue;
    args.encode_scales = pointer<const float>(encode_scales);
    args.amax = pointer<float>(amax);
    args.dequantized = pointer<void>(dequantized);
    args.activated = pointer<void>(activated);
    args.dbias = pointer<float>(dbias);
    args.seed = pointer<const uint32_t>(seed);
    args.group_offset = group_offset;
    args.group_offset_device = pointer<const uint32_t>(group_offset_device);
    args.unchanged = pointer<const int32_t>(unchanged);
    args.ctas = ctas;
    args.workspace = pointer<void>(workspace);
    args.workspace_bytes = workspace_bytes;
    launch_or_record(into, cuda, args, stream, threads);
  }

  void dequantize(bool cuda, int direction, Address codes, Address scales, int64_t rows, int64_t cols, int64_t groups,
                  Address out, int out_dtype, Address global, int layout, int64_t matrix_rows, Address plan,
                  int out_layout, Address stream, int threads, Sequence* into) const {
    DequantizeArgs args;
    args.direction = enum_of(direction, Direction::columnwise, "direction");
    args.spec = of_plane(args.direction);
    args.plane = plane(codes, scales, global, layout, "layout");
    args.rows = rows;
    args.cols = cols;
    args.groups = groups;
    args.matrix_rows = matrix_rows;
    args.plan = pointer<const int64_t>(plan);
    args.out = pointer<void>(out);
    args.out_dtype = enum_of(out_dtype, DType::bf16, "out_dtype");
    args.out_layout = enum_of(out_layout, Layout::native, "out_layout");
    launch_or_record(into, cuda, args, stream, threads);
  }

  void convert(bool cuda, int direction, int to, Address codes, Address scales, Address into_codes, Address into_scales,
               int64_t rows, int64_t cols, int64_t groups, int64_t matrix_rows, Address plan, Address stream,
               int threads) const {
    ConvertArgs args;
    args.direction = enum_of(direction, Direction::columnwise, "direction");
    args.spec = of_plane(args.direction);
    args.to = enum_of(to, Layout::native, "to");
    const bool to_native = args.to == Layout::native;
    args.from = {pointer<void>(codes), pointer<void>(scales), nullptr, to_native ? Layout::plain : Layout::native};
    args.into = {pointer<void>(into_codes), pointer<void>(into_scales), nullptr, args.to};
    args.rows = rows;
    args.cols = cols;
    args.groups = groups;
    args.matrix_rows = matrix_rows;
    args.plan = pointer<const int64_t>(plan);
    launch(cuda, [&] { return convert_cpu(args, threads); }, [&] { return convert_cuda(args, cuda_stream(stream)); });
  }

 private:
  // How the plane of a direction is quantized; a spec that does not go together stays as it is, and is refused.
  QuantizerSpec of_plane(Direction direction) const {
    const bool fits = spec_.scaling == Scaling::block && !spec_.square;
    return fits ? spec_.of_plane(direction == Direction::columnwise) : spec_;
  }

  static Plane plane(Address codes, Address scales, Address global, int layout, const char* name) {
    return {pointer<void>(codes), pointer<void>(scales), pointer<float>(global), enum_of(layout, Layout::native, name)};
  }

  QuantizerSpec spec_;
};

}  // namespace

void bind_quantizer(nb::module_& m) {
  using namespace nb::literals;
  bind_quantize_arguments(m);
  nb::class_<Quantizer>(m, "Quantizer", nb::is_final(),
                        "One way to quantize: octavo.QuantizerSpec in numbers of FORMATS, SCALINGS and OPERANDS.\n\n"
                        "mxfp4: `run` rounds values to MXFP4's first, in blocks of 32 along rows or down columns, by\n"
                        "a number of DIRECTIONS; for E4M3 codes in square blocks of 128, of bfloat16 or float32,\n"
                        "and planes alone. None: it does not.\n\n"
                        "square_columns: columnwise data of x have square blocks, and rowwise data have not; for\n"
                        "blocks of 128.\n\n"
                        "Immutable. Arrays are addresses, 0 where there is none; with cuda=True they are on the\n"
                        "current device, work is put on `stream`, and nothing waits or allocates. ValueError says\n"
                        "what of the arguments does not fit; RuntimeError is CUDA's own.")
      .def(nb::init<int, int, int, bool, bool, bool, bool, float, std::optional<int>, bool>(), nb::kw_only(),
           "format"_a, "scaling"_a, "operand"_a = 0, "square"_a = false, "stochastic"_a = false, "hadamard"_a = false,
           "power_of_two"_a = false, "amax_epsilon"_a = 0.0f, nb::arg("mxfp4").none() = nb::none(),
           "square_columns"_a = false)
      .def("workspace_bytes", &Quantizer::workspace_bytes, nb::kw_only(), "cuda"_a, "dtype"_a, "rows"_a, "cols"_a,
           "groups"_a, "rowwise"_a, "columnwise"_a, "matrix_rows"_a = 0, "prologue"_a = 0, "activation"_a = 0,
           "norm"_a = 0, "amax"_a = false, "dequantized"_a = false, "dbias"_a = false, "dprobs"_a = false,
           "count"_a = 0,
           "Bytes of the workspace that `run` needs with these arguments; 256-byte aligned, undefined at entry.\n"
           "count: that of an input with an index, 0 without one.")
      .def(
          "run", &Quantizer::run, nb::kw_only(), "cuda"_a, "input"_a, nb::arg("rowwise").none() = nb::none(),
          nb::arg("columnwise").none() = nb::none(), nb::arg("prologue").none() = nb::none(), "encode_scales"_a = 0,
          "amax"_a = 0, "dequantized"_a = 0, "activated"_a = 0, "dbias"_a = 0, "seed"_a = 0, "group_offset"_a = 0,
          "group_offset_device"_a = 0, "unchanged"_a = 0, "ctas"_a = 0, "workspace"_a = 0, "workspace_bytes"_a = 0,
          "stream"_a = 0, "threads"_a = 1, nb::arg("into").none() = nb::none(),
          "Quantize the input, after the prologue if there is one, into the planes that are given.\n\n"
          "ctas: most CTAs of the kernels that stay on their multiprocessors for the whole call, with the same bits;\n"
          "0: as many as fit. Those are the kernels of activations but SwiGLU's, of their gradients and of norms. All\n"
          "others have a CTA for each tile, which ends within microseconds: ValueError where a call has these alone.\n"
          "The CPU takes any and has none.")
      .def("dequantize", &Quantizer::dequantize, nb::kw_only(), "cuda"_a, "direction"_a, "codes"_a, "scales"_a,
           "rows"_a, "cols"_a, "groups"_a, "out"_a, "out_dtype"_a, "global_"_a = 0, "layout"_a = 0, "matrix_rows"_a = 0,
           "plan"_a = 0, "out_layout"_a = 0, "stream"_a = 0, "threads"_a = 1, nb::arg("into").none() = nb::none(),
           "Values of one plane, rounded once to out_dtype: [rows, cols], or panels [P][cols][128].")
      .def("convert", &Quantizer::convert, nb::kw_only(), "cuda"_a, "direction"_a, "to"_a, "codes"_a, "scales"_a,
           "into_codes"_a, "into_scales"_a, "rows"_a, "cols"_a, "groups"_a, "matrix_rows"_a = 0, "plan"_a = 0,
           "stream"_a = 0, "threads"_a = 1, "One plane from the other layout to `to`, a number of LAYOUTS.");
}

}  // namespace octavo::bindings
