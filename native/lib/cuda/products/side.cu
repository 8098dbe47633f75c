#include "side.h"

#include "common/gemm_strides.h"
#include "common/gemm_tile.h"
#include "cuda/device/wgmma.cuh"
#include "tensor_map.h"

namespace octavo::cuda {
namespace {

// The columns [2 halves][blocks][interleave] of a panel, read as [blocks][2 halves][interleave].
Error encode_interleaved(const Side& side, int span, CUtensorMap* map) {
  const uint64_t cols = side.cols, column = PANEL_ROWS * side.element_bytes, half = cols / 2, each = side.interleave;
  return encode({side.data,
                 side.element_bytes,
                 5,
                 {PANEL_ROWS, each, 2, half / each, static_cast<uint64_t>(side.panels)},
                 {column, column * half, column * each, column * cols},
                 {static_cast<uint32_t>(SWIZZLE_BYTES / side.element_bytes), static_cast<uint32_t>(each), 2,
                  static_cast<uint32_t>(span / (2 * each)), 1},
                 true},
                map);
}

}  // namespace

bool ragged(OperandWalk walk) {
  return walk == OperandWalk::rows || walk == OperandWalk::rows_t || walk == OperandWalk::panels;
}

OperandWalk left_walk(const GemmSpec& spec) {
  if (spec.gemm != Gemm::wgrad) return OperandWalk::rows;
  return spec.quantized ? OperandWalk::panels : OperandWalk::rows_t;
}

OperandWalk right_walk(const GemmSpec& spec) {
  switch (spec.gemm) {
    case Gemm::fprop: return OperandWalk::matrices;
    case Gemm::dgrad: return spec.quantized ? OperandWalk::stacked : OperandWalk::matrices_t;
    default: return spec.quantized ? OperandWalk::panels : OperandWalk::rows_t;
  }
}

Side side_of(const GemmArgs& args, bool left) {
  const GemmSpec& spec = args.spec;
  const GemmOperand& operand = left ? args.left : args.right;
  Side side;
  side.data = operand.data;
  side.element_bytes = multiplies_fp8(spec) ? 1 : 2;
  side.walk = left ? left_walk(spec) : right_walk(spec);
  side.cols = left ? left_cols(args) : right_cols(args);
  side.row_stride = spec.quantized ? side.cols : operand.row_stride;
  side.rows = ragged(side.walk) ? args.rows : args.n;
  side.panels =
      panel_bound(ragged(side.walk) ? args.rows : args.groups * args.n, args.groups, ragged(side.walk) ? 0 : args.n);
  side.interleave = left ? spec.left_interleave : spec.right_interleave;
  return side;
}

int32_t interleave_bits(const Side& side) {
  int32_t bits = 0;
  while (int64_t{1} << bits < 2 * side.interleave) ++bits;
  return bits;
}

Error encode_side(const Side& side, const GemmArgs& args, int span, CUtensorMap* map) {
  const uint32_t block = SWIZZLE_BYTES / side.element_bytes;
  const uint64_t cols = side.cols, bytes = side.element_bytes;
  switch (side.walk) {
    case OperandWalk::rows:
      return encode(ragged_map(side.data, side.element_bytes, side.cols, side.row_stride, block, span), map);
    case OperandWalk::rows_t:
      return encode(ragged_map(side.data, side.element_bytes, side.cols, side.row_stride, block, 64), map);
    case OperandWalk::matrices:
    case OperandWalk::matrices_t: {
      const uint64_t stride = side.row_stride * bytes;
      const uint32_t rows = side.walk == OperandWalk::matrices ? span : 64;
      return encode({side.data,
                     side.element_bytes,
                     3,
                     {cols, static_cast<uint64_t>(side.rows), static_cast<uint64_t>(args.groups)},
                     {stride, stride * side.rows},
                     {block, rows, 1},
                     true},
                    map);
    }
    default:
      if (side.interleave) return encode_interleaved(side, span, map);
      return encode({side.data,
                     side.element_bytes,
                     3,
                     {PANEL_ROWS, cols, static_cast<uint64_t>(side.panels)},
                     {PANEL_ROWS * bytes, PANEL_ROWS * bytes * cols},
                     {block, static_cast<uint32_t>(span), 1},
                     true},
                    map);
  }
}

Error encode_out(const GemmArgs& args, uint32_t rows, CUtensorMap* map) {
  const int bytes = dtype_bytes(args.spec.out_dtype);
  const uint64_t cols = out_cols(args);
  if (args.spec.gemm != Gemm::wgrad) {
    return encode(ragged_map(args.out, bytes, cols, args.out_row_stride, SWIZZLE_BYTES / bytes, rows), map);
  }
  return encode(
      {args.out,
       bytes,
       3,
       {cols, static_cast<uint64_t>(args.n), static_cast<uint64_t>(args.groups)},
       {static_cast<uint64_t>(args.out_row_stride * bytes), static_cast<uint64_t>(args.out_group_stride * bytes)},
       {static_cast<uint32_t>(SWIZZLE_BYTES / bytes), rows, 1},
       true},
      map);
}

Error encode_scales(const void* scales, int64_t width, int64_t blocks, int span, CUtensorMap* map) {
  const uint64_t pitch = round_up(width, 4);
  return encode(
      {scales, 4, 2, {pitch, static_cast<uint64_t>(blocks)}, {pitch * 4}, {static_cast<uint32_t>(span), 1}, false},
      map);
}

}  // namespace octavo::cuda
