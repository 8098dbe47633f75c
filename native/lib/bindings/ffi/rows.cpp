// octavo_permute_rows, octavo_combine_rows, octavo_dot_rows: rows of tokens that move with a router's choices
// (octavo/permute.h).
//
// All of them take position s32[2 T k], int64 in words, and routed pred[T k], of attribute `each`, k choices of a
// token.
//
// permute_rows   from [T, C]; weights f32[T, k] where given -> out [R, C]
// combine_rows   from [R, C]; weights f32[T, k] where given -> out [T, C]
// dot_rows       rows [R, C], dy [T, C] -> out f32[T, k]
#include "handler.h"
#include "octavo/permute.h"

namespace octavo {

struct RowsAttributes {
  std::string_view operands;
  std::string_view results;
  int64_t each;
  int64_t threads;
};

}  // namespace octavo

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(octavo::RowsAttributes, ::xla::ffi::StructMember<std::string_view>("operands"),
                                      ::xla::ffi::StructMember<std::string_view>("results"),
                                      ::xla::ffi::StructMember<int64_t>("each"),
                                      ::xla::ffi::StructMember<int64_t>("threads"));

namespace octavo {
namespace {

constexpr const char* PERMUTE = "octavo_permute_rows";
constexpr const char* COMBINE = "octavo_combine_rows";
constexpr const char* DOT = "octavo_dot_rows";

// A matrix of floats; without rows where its shape says nothing.
struct Matrix {
  void* data = nullptr;
  ffi::DataType type = ffi::DataType::INVALID;
  DType dtype = DType::f32;
  int64_t rows = 0, cols = 0;
};

Matrix read_matrix(Buffers& buffers, std::string_view name) {
  Matrix matrix;
  buffers.need(name);
  const ffi::AnyBuffer* given = buffers.take(name);
  if (given == nullptr) return matrix;
  matrix.type = given->element_type();
  const auto dims = given->dimensions();
  if (!dtype_of(matrix.type, matrix.dtype) || dims.size() != 2) {
    buffers.refuse(std::string(name) + " is " + text(*given) + " and must be f32, f16 or bf16 with two axes");
    return matrix;
  }
  matrix.data = Buffers::address(*given);
  matrix.rows = dims[0];
  matrix.cols = dims[1];
  return matrix;
}

// The choices of so many tokens, each of which has a row of `rows`.
Choices read_choices(const RowsAttributes& given, Buffers& operands, int64_t tokens, int64_t rows) {
  Choices choices;
  if (given.each < 1 || tokens > MAX_ROWS / given.each) {
    operands.refuse("attribute each is " + std::to_string(given.each) + " for " + std::to_string(tokens) +
                    " tokens; tokens have tokens * each choices, at most 2^30");
    return choices;
  }
  choices.tokens = tokens;
  choices.each = given.each;
  choices.rows = rows;
  for (const char* needed : {"position", "routed"}) operands.need(needed);
  choices.position = operands.take<const int64_t>("position", ffi::S32, {2 * tokens * given.each});
  choices.routed = operands.take<const uint8_t>("routed", ffi::PRED, {tokens * given.each});
  choices.weights = operands.take<const float>("weights", ffi::F32, {tokens, given.each});
  return choices;
}

template <bool to_rows>
ffi::Error move(const Launch& launch, ffi::RemainingArgs given_operands, ffi::RemainingRets given_results,
                const RowsAttributes& given) {
  constexpr const char* name = to_rows ? PERMUTE : COMBINE;
  Buffers operands(name, "operand"), results(name, "result");
  operands.read(given.operands, given_operands);
  results.read(given.results, given_results);
  const Matrix from = read_matrix(operands, "from"), out = read_matrix(results, "out");
  if (out.type != from.type || out.cols != from.cols) {
    results.refuse("from and out differ in their dtypes or columns; both are [rows, C] of one dtype");
  }
  const Matrix& tokens = to_rows ? from : out;
  MoveArgs args;
  args.choices = read_choices(given, operands, tokens.rows, to_rows ? out.rows : from.rows);
  args.dtype = from.dtype;
  args.cols = args.stride = from.cols;
  args.from = from.data;
  args.out = out.data;
  if (ffi::Error error = operands.finish(); error.failure()) return error;
  if (ffi::Error error = results.finish(); error.failure()) return error;
  const int threads = thread_count(given.threads);
  if constexpr (to_rows)
    return as_ffi(launch.cuda() ? permute_cuda(args, launch.stream) : permute_cpu(args, threads), name);
  return as_ffi(launch.cuda() ? combine_cuda(args, launch.stream) : combine_cpu(args, threads), name);
}

ffi::Error dot(const Launch& launch, ffi::RemainingArgs given_operands, ffi::RemainingRets given_results,
               const RowsAttributes& given) {
  Buffers operands(DOT, "operand"), results(DOT, "result");
  operands.read(given.operands, given_operands);
  results.read(given.results, given_results);
  const Matrix rows = read_matrix(operands, "rows"), dy = read_matrix(operands, "dy");
  if (rows.type != dy.type || rows.cols != dy.cols) {
    operands.refuse("rows and dy differ in their dtypes or columns; both are [rows, C] of one dtype");
  }
  DotArgs args;
  args.choices = read_choices(given, operands, dy.rows, rows.rows);
  args.dtype = rows.dtype;
  args.cols = args.row_stride = args.dy_stride = rows.cols;
  args.rows = rows.data;
  args.dy = dy.data;
  results.need("out");
  args.out = results.take<float>("out", ffi::F32, {dy.rows, given.each});
  if (ffi::Error error = operands.finish(); error.failure()) return error;
  if (ffi::Error error = results.finish(); error.failure()) return error;
  return as_ffi(launch.cuda() ? dot_cuda(args, launch.stream) : dot_cpu(args, thread_count(given.threads)), DOT);
}

}  // namespace

std::vector<Target> rows_targets() {
  return {target<RowsAttributes, move<true>>(PERMUTE), target<RowsAttributes, move<false>>(COMBINE),
          target<RowsAttributes, dot>(DOT)};
}

}  // namespace octavo
