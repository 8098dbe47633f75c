// octavo_gemm: one grouped GEMM of a linear layer (gemm.h), fprop, dgrad or wgrad.
//
// operands  left, right; plan; of quantized ones left_scales, right_scales; of nvfp4 left_global, right_global f32[G];
//           fprop, dgrad: bias [G, N], [G, K] of f32, f16 or bf16, and with it bias_scales f32[M];
//           wgrad with accumulate: out, what is added to, aliased with the result;
//           order s32[2 M], int64 words: the ragged operand that attribute gathered names (1 left, 2 right) is tokens
//           [T, C], and row i of it is that of choice order[i], of which each token has `each` (RowIndex in
//           octavo/quantize.h). Quantized tokens are codes of one matrix [1, T, C] in the plain layout
// results   out [M, N], [M, K] or [G, N, K] of f32, f16 or bf16; workspace u8 of any size
//
// Quantized operands are in the native layout; M, N and K do not follow from padded panels, so they are attributes. Of
// mxfp8 and nvfp4 an operand of bf16 is a plane of values (Layout::values), which has no scales.
// Attribute ctas: most CTAs of the product, 0 for one on each multiprocessor.
#include "octavo/gemm.h"

#include "common/check.h"
#include "common/gemm_strides.h"
#include "handler.h"
#include "workspace.h"

namespace octavo {

struct GemmAttributes {
  std::string_view operands;
  std::string_view results;
  int64_t gemm;
  bool quantized;
  int64_t scaling;
  int64_t left_format;
  int64_t right_format;
  bool right_square;
  bool hadamard;
  bool accumulate;
  bool fast_accumulation;
  bool left_square;
  int64_t rows;
  int64_t n;
  int64_t k;
  int64_t groups;
  int64_t gathered;
  int64_t tokens;
  int64_t each;
  int64_t ctas;
  int64_t threads;
};

}  // namespace octavo

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    octavo::GemmAttributes, ::xla::ffi::StructMember<std::string_view>("operands"),
    ::xla::ffi::StructMember<std::string_view>("results"), ::xla::ffi::StructMember<int64_t>("gemm"),
    ::xla::ffi::StructMember<bool>("quantized"), ::xla::ffi::StructMember<int64_t>("scaling"),
    ::xla::ffi::StructMember<int64_t>("left_format"), ::xla::ffi::StructMember<int64_t>("right_format"),
    ::xla::ffi::StructMember<bool>("right_square"), ::xla::ffi::StructMember<bool>("hadamard"),
    ::xla::ffi::StructMember<bool>("accumulate"), ::xla::ffi::StructMember<bool>("fast_accumulation"),
    ::xla::ffi::StructMember<bool>("left_square"), ::xla::ffi::StructMember<int64_t>("rows"),
    ::xla::ffi::StructMember<int64_t>("n"), ::xla::ffi::StructMember<int64_t>("k"),
    ::xla::ffi::StructMember<int64_t>("groups"), ::xla::ffi::StructMember<int64_t>("gathered"),
    ::xla::ffi::StructMember<int64_t>("tokens"), ::xla::ffi::StructMember<int64_t>("each"),
    ::xla::ffi::StructMember<int64_t>("ctas"), ::xla::ffi::StructMember<int64_t>("threads"));

namespace octavo {
namespace {

constexpr const char* GEMM = "octavo_gemm";

// How an operand is laid out: x [M, K], dy [M, N], w [G, N, K], or the tokens of which the first two are rows.
struct Side {
  const char* name;
  const char* scales;
  const char* global;
  Format format;
  bool square;
  Extent extent;
  Layout layout = Layout::native;  // of codes
};

constexpr int64_t GATHERED_LEFT = 1, GATHERED_RIGHT = 2;

void read_attributes(const GemmAttributes& given, Buffers& operands, GemmArgs& args) {
  args.spec.gemm = enum_from<Gemm>(given.gemm, Gemm::wgrad, "gemm", operands);
  args.spec.quantized = given.quantized;
  args.spec.scaling = enum_from<Scaling>(given.scaling, Scaling::nvfp4, "scaling", operands);
  args.spec.left_format = enum_from<Format>(given.left_format, Format::e2m1, "left_format", operands);
  args.spec.right_format = enum_from<Format>(given.right_format, Format::e2m1, "right_format", operands);
  args.spec.right_square = given.right_square;
  args.spec.hadamard = given.hadamard;
  args.spec.accumulate = given.accumulate;
  args.spec.fast_accumulation = given.fast_accumulation;
  args.spec.left_square = given.left_square;
  args.rows = given.rows;
  args.n = given.n;
  args.k = given.k;
  args.groups = given.groups;
  args.ctas = static_cast<int>(std::clamp<int64_t>(given.ctas, -1, MAX_CTAS));
  if (given.rows < 0 || given.rows > MAX_ROWS || given.n < 1 || given.n > MAX_COLS || given.k < 1 ||
      given.k > MAX_COLS || given.groups < 1 || given.groups > MAX_GROUPS) {
    operands.refuse("rows " + std::to_string(given.rows) + ", n " + std::to_string(given.n) + ", k " +
                    std::to_string(given.k) + " and groups " + std::to_string(given.groups) +
                    " are not the shape of a GEMM; rows is 0 to 2^30, n and k 1 to 2^30, groups 1 to 65536");
  }
}

Side left_side(const GemmArgs& args) {
  const Extent extent{args.rows, left_cols(args), args.groups, 0};
  return {"left", "left_scales", "left_global", args.spec.left_format, args.spec.left_square, extent};
}

Side right_side(const GemmArgs& args) {
  const bool ragged = args.spec.gemm == Gemm::wgrad;
  const Extent extent =
      ragged ? Extent{args.rows, args.k, args.groups, 0} : Extent{args.groups * args.n, args.k, args.groups, args.n};
  return {"right", "right_scales", "right_global", args.spec.right_format, args.spec.right_square, extent};
}

// The side of `tokens` tokens in the place of their rows: codes of them are of one matrix, in no group's order.
Side of_tokens(Side side, const GemmArgs& args, int64_t tokens) {
  side.extent.rows = tokens;
  if (!args.spec.quantized) return side;
  side.layout = Layout::plain;
  side.extent.groups = 1;
  side.extent.matrix_rows = tokens;
  return side;
}

// Whether the side is a plane of values.
bool has_values(Buffers& operands, const GemmArgs& args, const Side& side) {
  const ffi::AnyBuffer* given = operands.take(side.name);
  return given != nullptr && given->element_type() == ffi::BF16 && is_emulated(args.spec.scaling) &&
         side.layout == Layout::native;
}

void read_quantized(Buffers& operands, const GemmArgs& args, Direction direction, const Side& side, bool values,
                    GemmOperand& operand) {
  QuantizerSpec spec;
  spec.format = side.format;
  spec.scaling = args.spec.scaling;
  spec.square = side.square;
  if (values) {
    operand.data = operands.take(side.name, ffi::BF16, values_dims(direction, side.extent));
  } else {
    operand.data =
        operands.take(side.name, codes_type(side.format), codes_dims(spec, direction, side.layout, side.extent));
    operands.need(side.scales);
    operand.scales =
        operands.take(side.scales, scales_type(spec.scaling), scales_dims(spec, direction, side.layout, side.extent));
  }
  if (spec.scaling == Scaling::nvfp4) {
    operands.need(side.global);
    operand.global = operands.take<const float>(side.global, ffi::F32, {args.groups});
  }
}

// Both operands have the dtype of `left`.
void read_unquantized(Buffers& operands, ffi::DataType type, const Side& side, GemmOperand& operand) {
  const Extent& e = side.extent;
  operand.data = operands.take(side.name, type, with_rows(e, e.rows, e.matrix_rows, e.cols));
}

// The choice of each row of the operand that is tokens.
void read_index(Buffers& operands, const GemmAttributes& given, GemmArgs& args) {
  if (given.gathered == 0) return;
  if (given.gathered < 0 || given.gathered > GATHERED_RIGHT || given.each < 1 || given.tokens < 0 ||
      given.tokens > MAX_ROWS / given.each) {
    operands.refuse("attributes gathered, tokens and each are " + std::to_string(given.gathered) + ", " +
                    std::to_string(given.tokens) + " and " + std::to_string(given.each) +
                    "; gathered is 0, 1 (left) or 2 (right), and tokens have tokens * each choices, at most 2^30");
    return;
  }
  operands.need("order");
  RowIndex& index = given.gathered == GATHERED_LEFT ? args.left.index : args.right.index;
  index = {operands.take<const int64_t>("order", ffi::S32, {2 * args.rows}), given.each, given.tokens};
}

void read_operands(Buffers& operands, const GemmAttributes& given, GemmArgs& args) {
  const Gemm gemm = args.spec.gemm;
  operands.need("left");
  operands.need("right");
  read_index(operands, given, args);
  Side left_of = left_side(args), right_of = right_side(args);
  if (given.gathered == GATHERED_LEFT) left_of = of_tokens(left_of, args, given.tokens);
  if (given.gathered == GATHERED_RIGHT) right_of = of_tokens(right_of, args, given.tokens);
  const ffi::AnyBuffer* left = operands.take("left");
  if (args.spec.quantized) {
    const Direction left_direction = gemm == Gemm::wgrad ? Direction::columnwise : Direction::rowwise;
    const Direction right_direction = gemm == Gemm::fprop ? Direction::rowwise : Direction::columnwise;
    args.spec.left_values = has_values(operands, args, left_of);
    args.spec.right_values = has_values(operands, args, right_of);
    read_quantized(operands, args, left_direction, left_of, args.spec.left_values, args.left);
    read_quantized(operands, args, right_direction, right_of, args.spec.right_values, args.right);
  } else if (left != nullptr) {
    const ffi::DataType type = left->element_type();
    if (!dtype_of(type, args.spec.dtype)) {
      operands.refuse("operand left is " + text(*left) + " and must be f32, f16 or bf16");
    }
    read_unquantized(operands, type, left_of, args.left);
    read_unquantized(operands, type, right_of, args.right);
  }
  operands.need("plan");
  args.plan = operands.take<const int64_t>("plan", ffi::S32, {2 * plan_words(args.rows, args.groups)});
  if (gemm == Gemm::wgrad) return;
  if (const ffi::AnyBuffer* bias = operands.take("bias")) {
    if (!dtype_of(bias->element_type(), args.bias_dtype)) {
      operands.refuse("operand bias is " + text(*bias) + " and must be f32, f16 or bf16");
    }
    args.bias = operands.take("bias", bias->element_type(), {args.groups, out_cols(args)});
    args.bias_scales = operands.take<const float>("bias_scales", ffi::F32, {args.rows});
  }
}

void read_out(Buffers& operands, Buffers& results, GemmArgs& args) {
  const bool stacked = args.spec.gemm == Gemm::wgrad;
  const Dims dims = stacked ? Dims{args.groups, args.n, args.k} : Dims{args.rows, out_cols(args)};
  results.need("out");
  const ffi::AnyBuffer* out = results.take("out");
  if (out == nullptr) return;
  const ffi::DataType type = out->element_type();
  if (!dtype_of(type, args.spec.out_dtype)) {
    results.refuse("result out is " + text(*out) + " and must be f32, f16 or bf16");
  }
  args.out = results.take("out", type, dims);
  if (!args.spec.accumulate) return;
  operands.need("out");
  const void* accumulator = operands.take("out", type, dims);
  if (accumulator != nullptr && accumulator != args.out) {
    operands.refuse("operand out is not the memory of result out; alias the two with input_output_aliases");
  }
}

ffi::Error gemm(const Launch& launch, ffi::RemainingArgs given_operands, ffi::RemainingRets given_results,
                const GemmAttributes& given) {
  Buffers operands(GEMM, "operand"), results(GEMM, "result");
  operands.read(given.operands, given_operands);
  results.read(given.results, given_results);
  GemmArgs args;
  read_attributes(given, operands, args);
  if (ffi::Error error = operands.checked(); error.failure()) return error;
  read_operands(operands, given, args);
  read_out(operands, results, args);
  args = with_strides(args);
  Workspace workspace;
  workspace.read(results);
  if (ffi::Error error = results.finish(); error.failure()) return error;
  if (ffi::Error error = operands.finish(); error.failure()) return error;
  if (!launch.cuda()) {
    if (const Error error = check_gemm(args, false)) return as_ffi(error, GEMM);
    workspace.grow(gemm_workspace_cpu(args));
  }
  args.workspace = workspace.memory();
  args.workspace_bytes = workspace.bytes();
  if (launch.cuda()) return as_ffi(gemm_cuda(args, launch.stream), GEMM);
  return as_ffi(gemm_cpu(args, thread_count(given.threads)), GEMM);
}

}  // namespace

std::vector<Target> gemm_targets() { return {target<GemmAttributes, gemm>(GEMM)}; }

}  // namespace octavo
