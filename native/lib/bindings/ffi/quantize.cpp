// octavo_quantize_<scaling>: x, ragged [M, C] with a plan or stacked [G, N, C], to the planes that `results` lists.
//
// operands  x; plan; seed u32[2]; group_offset u32[]; encode_scales f32[G] (delayed);
//           order s32[2 M], int64 words: x is tokens [T, C], and row i of the operand is that of choice order[i], of
//           which each token has `each` (RowIndex in octavo/quantize.h);
//           of a prologue: dy, probs f32[M], gamma, beta; start_<result>s that results are aliased with
// results   row_codes, row_scales, row_global; col_codes, col_scales, col_global; amax f32[G]; dequantized bf16;
//           activated; dbias f32[G, C]; dprobs f32[M] and forward [M, F] of an activation's gradient; mean, rstd
//           f32[M]; workspace u8 of any size. Of an activation or its gradient activated may be there without planes.
//           Codes of a plane whose layout is values (2) are bf16 values, and it has no scales
#include "octavo/quantize.h"
#include "common/check.h"
#include "handler.h"
#include "workspace.h"

namespace octavo {

struct QuantizeAttributes {
  std::string_view operands;
  std::string_view results;
  int64_t format;
  int64_t operand;
  bool square;
  bool square_columns;
  int64_t mxfp4;  // a Direction, or -1
  bool stochastic;
  bool hadamard;
  bool power_of_two;
  float amax_epsilon;
  int64_t groups;
  int64_t row_layout;
  int64_t col_layout;
  int64_t prologue;
  int64_t activation;
  int64_t norm;
  float epsilon;
  int64_t threads;
  int64_t each;
};

}  // namespace octavo

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    octavo::QuantizeAttributes, ::xla::ffi::StructMember<std::string_view>("operands"),
    ::xla::ffi::StructMember<std::string_view>("results"), ::xla::ffi::StructMember<int64_t>("format"),
    ::xla::ffi::StructMember<int64_t>("operand"), ::xla::ffi::StructMember<bool>("square"),
    ::xla::ffi::StructMember<bool>("square_columns"), ::xla::ffi::StructMember<int64_t>("mxfp4"),
    ::xla::ffi::StructMember<bool>("stochastic"), ::xla::ffi::StructMember<bool>("hadamard"),
    ::xla::ffi::StructMember<bool>("power_of_two"), ::xla::ffi::StructMember<float>("amax_epsilon"),
    ::xla::ffi::StructMember<int64_t>("groups"), ::xla::ffi::StructMember<int64_t>("row_layout"),
    ::xla::ffi::StructMember<int64_t>("col_layout"), ::xla::ffi::StructMember<int64_t>("prologue"),
    ::xla::ffi::StructMember<int64_t>("activation"), ::xla::ffi::StructMember<int64_t>("norm"),
    ::xla::ffi::StructMember<float>("epsilon"), ::xla::ffi::StructMember<int64_t>("threads"),
    ::xla::ffi::StructMember<int64_t>("each"));

namespace octavo {
namespace {

constexpr const char* NAMES[] = {"octavo_quantize_delayed", "octavo_quantize_current", "octavo_quantize_row",
                                 "octavo_quantize_block",   "octavo_quantize_mxfp8",   "octavo_quantize_nvfp4"};

template <Scaling scaling>
constexpr const char* name() {
  return NAMES[static_cast<int>(scaling)];
}

// The attributes' numbers as the library's enums.
void read_attributes(const QuantizeAttributes& given, Buffers& operands, QuantizeArgs& args) {
  args.spec.format = enum_from<Format>(given.format, Format::e2m1, "format", operands);
  args.spec.operand = enum_from<Operand>(given.operand, Operand::dy, "operand", operands);
  args.spec.square = given.square;
  args.spec.square_columns = given.square_columns;
  if (given.mxfp4 != -1) args.spec.mxfp4 = enum_from<Direction>(given.mxfp4, Direction::columnwise, "mxfp4", operands);
  args.spec.stochastic = given.stochastic;
  args.spec.hadamard = given.hadamard;
  args.spec.power_of_two = given.power_of_two;
  args.spec.amax_epsilon = given.amax_epsilon;
  args.rowwise.layout = enum_from<Layout>(given.row_layout, Layout::values, "row_layout", operands);
  args.columnwise.layout = enum_from<Layout>(given.col_layout, Layout::values, "col_layout", operands);
  args.prologue.kind = enum_from<PrologueKind>(given.prologue, PrologueKind::norm, "prologue", operands);
  args.prologue.activation =
      enum_from<Activation>(given.activation, Activation::clamped_swiglu, "activation", operands);
  args.prologue.norm = enum_from<Norm>(given.norm, Norm::layer, "norm", operands);
  args.prologue.epsilon = given.epsilon;
  if (given.groups < 1 || given.groups > MAX_GROUPS) {
    operands.refuse("groups is " + std::to_string(given.groups) + "; it takes 1 to 65536");
  }
  args.input.groups = given.groups;
}

// x itself; false where its shape says nothing about the others.
bool read_x(Buffers& operands, QuantizeArgs& args, ffi::DataType& type) {
  operands.need("x");
  const ffi::AnyBuffer* x = operands.take("x");
  if (x == nullptr) return false;
  type = x->element_type();
  const auto dims = x->dimensions();
  Input& input = args.input;
  if (!dtype_of(type, input.dtype) || (dims.size() != 2 && dims.size() != 3)) {
    operands.refuse("operand x is " + text(*x) + " and must be f32, f16 or bf16 of shape [M, C] or [G, N, C]");
    return false;
  }
  const bool stacked = dims.size() == 3;
  if (stacked && (dims[0] != input.groups || dims[1] == 0)) {
    operands.refuse("operand x is " + text(*x) + " and groups is " + std::to_string(input.groups) +
                    "; stacked matrices are [groups, N, C] with N of 1 or more");
    return false;
  }
  input.data = Buffers::address(*x);
  input.rows = stacked ? dims[0] * dims[1] : dims[0];
  input.matrix_rows = stacked ? dims[1] : 0;
  input.cols = input.row_stride = dims[dims.size() - 1];
  if (!stacked && input.rows > MAX_ROWS) {
    operands.refuse("operand x is " + text(*x) + "; ragged operands have at most 2^30 rows");
    return false;
  }
  return true;
}

// Rows of tokens: `input` is of the tokens, and from now on of the rows that their choices make.
void read_index(Buffers& operands, int64_t each, Input& input) {
  const ffi::AnyBuffer* order = operands.take("order");
  if (order == nullptr) return;
  const auto dims = order->dimensions();
  if (order->element_type() != ffi::S32 || dims.size() != 1 || dims[0] % 2 != 0 || dims[0] / 2 > MAX_ROWS) {
    operands.refuse("operand order is " + text(*order) + " and must be s32[2 M], at most 2^30 rows of int64");
    return;
  }
  if (input.matrix_rows != 0 || each < 1 || input.rows > MAX_ROWS / each) {
    operands.refuse("attribute each is " + std::to_string(each) + " for " + std::to_string(input.rows) +
                    " rows; order is of tokens [T, C], which have T * each choices, 1 to 2^30");
    return;
  }
  input.index = {static_cast<const int64_t*>(Buffers::address(*order)), each, input.rows};
  input.rows = dims[0] / 2;
}

// Columns of the activation whose gradient is made.
int64_t gradient_features(const QuantizeArgs& args) {
  return is_gated(args.prologue.activation) ? args.input.cols / 2 : args.input.cols;
}

void read_operands(Buffers& operands, QuantizeArgs& args, ffi::DataType type, const Extent& out) {
  Input& input = args.input;
  if (input.matrix_rows == 0) {
    operands.need("plan");
    input.plan = operands.take<const int64_t>("plan", ffi::S32, {2 * plan_words(input.rows, input.groups)});
  }
  if (args.spec.stochastic) {
    operands.need("seed");
    args.seed = operands.take<const uint32_t>("seed", ffi::U32, {2});
    args.group_offset_device = operands.take<const uint32_t>("group_offset", ffi::U32, {});
  }
  if (args.spec.scaling == Scaling::delayed) {
    operands.need("encode_scales");
    args.encode_scales = operands.take<const float>("encode_scales", ffi::F32, {input.groups});
  }
  Prologue& prologue = args.prologue;
  if (prologue.kind == PrologueKind::activation || prologue.kind == PrologueKind::activation_grad) {
    prologue.probs = operands.take<const float>("probs", ffi::F32, {input.rows});
  }
  if (prologue.kind == PrologueKind::activation_grad) {
    const int64_t features = gradient_features(args);
    operands.need("dy");
    prologue.dy = operands.take("dy", type, {input.rows, features});
    prologue.dy_stride = features;
  }
  if (prologue.kind == PrologueKind::norm) {
    operands.need("gamma");
    prologue.gamma = operands.take("gamma", type, {out.cols});
    prologue.beta = operands.take("beta", type, {out.cols});
  }
}

void read_plane(Buffers& results, const QuantizerSpec& whole, Direction direction, const Extent& out, Plane& plane) {
  const bool rowwise = direction == Direction::rowwise;
  const QuantizerSpec spec = whole.of_plane(!rowwise);
  const char* codes = rowwise ? "row_codes" : "col_codes";
  const char* scales = rowwise ? "row_scales" : "col_scales";
  const char* global = rowwise ? "row_global" : "col_global";
  if (!results.has(codes)) return;
  if (plane.layout == Layout::values) {
    plane.codes = results.take(codes, ffi::BF16, values_dims(direction, out));
  } else {
    results.need(scales);
    plane.codes = results.take(codes, codes_type(spec.format), codes_dims(spec, direction, plane.layout, out));
    plane.scales = results.take(scales, scales_type(spec.scaling), scales_dims(spec, direction, plane.layout, out));
  }
  if (spec.scaling == Scaling::nvfp4) {
    results.need(global);
    plane.global = results.take<float>(global, ffi::F32, {out.groups});
  }
}

void read_results(Buffers& results, QuantizeArgs& args, ffi::DataType type, const Extent& out) {
  read_plane(results, args.spec, Direction::rowwise, out, args.rowwise);
  read_plane(results, args.spec, Direction::columnwise, out, args.columnwise);
  const Dims shape = with_rows(out, out.rows, out.matrix_rows, out.cols);
  args.amax = results.take<float>("amax", ffi::F32, {out.groups});
  args.dequantized = results.take("dequantized", ffi::BF16, shape);
  if (args.prologue.kind == PrologueKind::none) return;
  args.activated = results.take("activated", type, shape);
  args.dbias = results.take<float>("dbias", ffi::F32, {out.groups, out.cols});
  if (args.prologue.kind == PrologueKind::activation_grad) {
    args.prologue.dprobs = results.take<float>("dprobs", ffi::F32, {out.rows});
    args.prologue.forward = results.take("forward", type, {out.rows, gradient_features(args)});
  }
  if (args.prologue.kind == PrologueKind::norm) {
    if (args.prologue.norm == Norm::layer) args.prologue.mean = results.take<float>("mean", ffi::F32, {out.rows});
    args.prologue.rstd = results.take<float>("rstd", ffi::F32, {out.rows});
  }
}

template <Scaling scaling>
ffi::Error quantize(const Launch& launch, ffi::RemainingArgs given_operands, ffi::RemainingRets given_results,
                    const QuantizeAttributes& given) {
  QuantizeArgs args;
  args.spec.scaling = scaling;
  Buffers operands(name<scaling>(), "operand"), results(name<scaling>(), "result");
  operands.read(given.operands, given_operands);
  results.read(given.results, given_results);
  read_attributes(given, operands, args);
  ffi::DataType type = ffi::DataType::INVALID;
  if (read_x(operands, args, type)) {
    read_index(operands, given.each, args.input);
    const Extent out{args.input.rows, output_cols(args), args.input.groups, args.input.matrix_rows};
    read_operands(operands, args, type, out);
    read_results(results, args, type, out);
  }
  operands.take_starts();
  Workspace workspace;
  workspace.read(results);
  if (ffi::Error error = operands.finish(); error.failure()) return error;
  if (ffi::Error error = results.finish(); error.failure()) return error;
  if (!launch.cuda()) workspace.grow(quantize_workspace_cpu(args));
  args.workspace = workspace.memory();
  args.workspace_bytes = workspace.bytes();
  if (launch.cuda()) return as_ffi(quantize_cuda(args, launch.stream), name<scaling>());
  return as_ffi(quantize_cpu(args, thread_count(given.threads)), name<scaling>());
}

template <Scaling scaling>
Target quantize_target() {
  return target<QuantizeAttributes, quantize<scaling>>(name<scaling>());
}

}  // namespace

std::vector<Target> quantize_targets() {
  return {quantize_target<Scaling::delayed>(), quantize_target<Scaling::current>(), quantize_target<Scaling::row>(),
          quantize_target<Scaling::block>(),   quantize_target<Scaling::mxfp8>(),   quantize_target<Scaling::nvfp4>()};
}

}  // namespace octavo
