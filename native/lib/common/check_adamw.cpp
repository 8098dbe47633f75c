// Argument checks of AdamW's step. Pointers are compared and never dereferenced.
#include <cmath>
#include <initializer_list>

#include "check.h"
#include "octavo/adamw.h"

namespace octavo {

namespace {

constexpr int64_t MOST_ELEMENTS = int64_t{1} << 40;
constexpr uint32_t MOST_TENSORS = 1u << 29;

bool given(const void* pointer, int64_t bytes) { return pointer != nullptr && aligned(pointer, bytes); }

Error check_rule(const AdamWRule& rule) {
  const auto fine = [](float value) { return value >= 0.0f && std::isfinite(value); };
  if (!fine(rule.lr) || !fine(rule.weight_decay) || !fine(rule.eps)) {
    return invalid("lr, weight_decay or eps is negative or not finite in fp32; give numbers of at least 0");
  }
  for (const float kept : rule.kept) {
    if (!(kept >= 0.0f && kept <= 1.0f)) return invalid("a beta is outside of 0 to 1; give decay rates below 1");
  }
  if (!aligned(rule.lr_device, 4)) return invalid("lr_device is not aligned to 4 bytes; it is one fp32 number");
  return {};
}

Error check_arrays(const AdamWArrays& arrays) {
  if (arrays.rows < 0 || arrays.cols < 0) return invalid("rows or cols is negative; give the sides of the array");
  if (arrays.rows > MAX_STRIDE || arrays.cols > MAX_STRIDE)
    return invalid("rows or cols is past 2^32; split the array");
  if (arrays.rows > 0 && arrays.cols > MOST_ELEMENTS / arrays.rows) {
    return invalid("the array has more than 2^40 elements; split it");
  }
  if (!named(arrays.master_dtype, DType::bf16) || arrays.master_dtype == DType::f16) {
    return invalid("master_dtype is not f32 or bf16 (0 or 2); give one of these");
  }
  if (!named(arrays.grad_dtype, DType::bf16))
    return invalid("grad_dtype is not a valid DType; give f32, f16 or bf16 (0 to 2)");
  if (!named(arrays.values_dtype, DType::bf16) || arrays.values_dtype == DType::f32) {
    return invalid("values_dtype is not f16 or bf16 (1 or 2); give one of these");
  }
  if ((arrays.tops[0] == nullptr) != (arrays.tops[1] == nullptr)) {
    return invalid("tops of one moment are given and of the other are not; give both or none");
  }
  if (arrays.rows == 0 || arrays.cols == 0) return {};
  if (!given(arrays.master, dtype_bytes(arrays.master_dtype)) || !given(arrays.grad, dtype_bytes(arrays.grad_dtype))) {
    return invalid("master or grad is null or not aligned to its elements; give addresses of [rows, cols]");
  }
  const int bytes = arrays.tops[0] ? 1 : 4;
  for (int i = 0; i < 2; ++i) {
    if (!given(arrays.moment[i], bytes) || !aligned(arrays.tops[i], 4)) {
      return invalid("a moment is null or not aligned to its elements, or its tops to 4 bytes; give [rows, cols]");
    }
  }
  if (!aligned(arrays.values, 2))
    return invalid("values is not aligned to 2 bytes; it is [rows, cols] of values_dtype");
  return {};
}

Error check_codes(const AdamWArrays& arrays, const AdamWCodes& codes) {
  if (arrays.values != nullptr) return invalid("both values and codes are to be written; give one of them");
  if (codes.matrix_rows < 1 || arrays.rows % codes.matrix_rows != 0) {
    return invalid("matrix_rows does not divide rows; codes are of stacked matrices of matrix_rows rows each");
  }
  if (arrays.rows > MAX_ROWS || arrays.cols > MAX_COLS) return invalid("rows or cols is past 2^30; split the matrices");
  if (!(codes.amax_epsilon >= 0.0f) || !std::isfinite(codes.amax_epsilon)) {
    return invalid("amax_epsilon is negative, infinite or NaN; give 0 or a finite floor");
  }
  for (const Plane* plane : {&codes.rowwise, &codes.columnwise}) {
    if (plane->codes == nullptr) continue;
    if (!named(plane->layout, Layout::native))
      return invalid("layout is not a valid Layout; give plain or native (0 or 1)");
    if (!aligned(plane->codes, 16) || !given(plane->scales, 4)) {
      return invalid("codes are not aligned to 16 bytes, or their scales are null or not aligned to 4; give both");
    }
  }
  return {};
}

}  // namespace

Error check_adamw(const AdamWArgs& args) {
  if (const Error error = check_rule(args.rule)) return error;
  if (const Error error = check_arrays(args.arrays)) return error;
  if (args.draws.tensor >= MOST_TENSORS) return invalid("tensor is past 2^29 - 1; number the tensors of an optimizer");
  if (args.draws.step < 1) return invalid("step is less than 1; the first step of an optimizer is 1");
  if (!aligned(args.draws.step_device, 4) || !aligned(args.inverse_scale, 4)) {
    return invalid("step_device or inverse_scale is not aligned to 4 bytes; each is one fp32 number");
  }
  return args.writes_codes() ? check_codes(args.arrays, args.codes) : Error{};
}

}  // namespace octavo
