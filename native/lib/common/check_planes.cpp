// Argument checks of what reads planes or moves them, shared by both devices. Pointers are compared and never
// dereferenced.
#include <algorithm>

#include "check_operand.h"
#include "octavo/dequantize.h"

namespace octavo {

Error check_dequantize(const DequantizeArgs& args) {
  if (const Error error = check_spec(args.spec)) return error;
  if (const Error error = check_shape(args.rows, args.cols, args.groups, args.matrix_rows, args.plan)) return error;
  if (!named(args.direction, Direction::columnwise)) return invalid("direction is not a valid Direction; give 0 or 1");
  if (!named(args.out_dtype, DType::bf16))
    return invalid("out_dtype is not a valid DType; give f32, f16 or bf16 (0 to 2)");
  if (!named(args.out_layout, Layout::native))
    return invalid("out_layout is not a valid Layout; give plain or native (0, 1)");
  if (args.spec.hadamard && args.direction == Direction::columnwise && args.matrix_rows > 0) {
    return invalid(HADAMARD_STACKED);
  }
  const int64_t elements = args.rows * args.cols;
  if (const Error error = check_plane(args.spec, args.plane, elements)) return error;
  if (elements > 0 && args.plane.codes == nullptr) return invalid("the plane is null; give its codes and scales");
  if (args.out_layout == Layout::native && args.direction == Direction::rowwise) {
    return invalid("out_layout is native and the plane is rowwise; values in panels are columnwise, so ask for plain");
  }
  // Hadamard columnwise data of no rows have values, too: those of the blocks that groups could need
  const bool padded = args.spec.hadamard && args.direction == Direction::columnwise && args.out_layout == Layout::plain;
  const int64_t values = padded ? block_bound(args.rows, args.groups, 16) * args.cols : elements;
  if (values > 0 && args.out == nullptr) return invalid("out is null; give the address of the values");
  if (!aligned(args.out, dtype_bytes(args.out_dtype))) {
    return invalid("out is not aligned to its elements; give an address that is a multiple of their size");
  }
  return {};
}

Error check_convert(const ConvertArgs& args) {
  if (const Error error = check_spec(args.spec)) return error;
  if (const Error error = check_shape(args.rows, args.cols, args.groups, args.matrix_rows, args.plan)) return error;
  if (!named(args.direction, Direction::columnwise)) return invalid("direction is not a valid Direction; give 0 or 1");
  if (!named(args.to, Layout::native)) return invalid("to is not a valid Layout; give plain or native (0, 1)");
  if (args.into.layout != args.to || args.from.layout == args.to) {
    return invalid("the planes' layouts do not fit `to`; into.layout is `to` and from.layout the other one");
  }
  if (args.spec.hadamard && args.direction == Direction::columnwise && args.matrix_rows > 0) {
    return invalid(HADAMARD_STACKED);
  }
  const int64_t elements = args.rows * args.cols;
  const Plane* const planes[] = {&args.from, &args.into};
  for (const Plane* plane : planes) {
    if (!aligned(plane->scales, wide_scales(args.spec.scaling) ? 4 : 1)) {
      return invalid("a plane's scales are not aligned to 4 bytes; they are fp32");
    }
    if (elements > 0 && (plane->codes == nullptr || plane->scales == nullptr)) {
      return invalid("a plane lacks codes or scales; give both of the plane read and both of the plane written");
    }
  }
  return {};
}

Error check_swizzle(const SwizzleArgs& args) {
  if (args.outer < 0 || args.blocks < 0) return invalid("outer or blocks is negative; give the shape [outer, blocks]");
  if (args.blocks > MAX_COLS || args.outer > (int64_t{1} << 40) / std::max<int64_t>(args.blocks, 1)) {
    return invalid("blocks is past 2^30, or there are more than 2^40 scales; split them");
  }
  if (args.outer * args.blocks > 0 && (args.from == nullptr || args.into == nullptr)) {
    return invalid("from or into is null; give the address of both arrays of scales");
  }
  return {};
}

Error check_pack(const PackArgs& args) {
  if (args.rows < 0 || args.cols < 0) return invalid("rows or cols is negative; give the codes' shape [rows, cols]");
  if (args.rows > (int64_t{1} << 32) || args.cols > MAX_COLS) {
    return invalid("rows is past 2^32 or cols past 2^30; split the codes");
  }
  if (args.rows * args.cols > 0 && (args.from == nullptr || args.into == nullptr)) {
    return invalid("from or into is null; give the address of both arrays of codes");
  }
  return {};
}

Error check_expand(const ExpandArgs& args) {
  if (args.blocks < 0) return invalid("blocks is negative; give the number of blocks of 32 elements, 0 or more");
  if (args.blocks > (int64_t{1} << 40)) return invalid("blocks is past 2^40; split the array");
  if (args.blocks > 0 && (args.codes == nullptr || args.scales == nullptr || args.out == nullptr)) {
    return invalid("codes, scales or out is null; give the address of all three arrays");
  }
  if (!aligned(args.codes, 4)) return invalid("codes is not aligned to 4 bytes; copy them to an aligned address");
  if (!aligned(args.out, 16)) return invalid("out is not aligned to 16 bytes; give an array at such an address");
  return {};
}

}  // namespace octavo
