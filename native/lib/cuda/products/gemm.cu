// Grouped GEMMs on Hopper, host side: chooses the kernel, sets its parameters, launches it.
//
//                left                             right                              K-blocks of
//   fprop        x rows                           w rows, stacked                    in-features
//   dgrad        dy rows                          w: K-panels, or rows along K       out-features
//   wgrad        dy: K-panels, or rows along K    x: the same                        the group's tokens
//
// FP8 wgmma takes K-major operands only, which columnwise data in K-panels are; unquantized operands stay as they are
// and are multiplied with their rows along K. MXFP8 values, and NVFP4 values without their second level, are exact in
// bf16: each operand that does not come as values is dequantized once into the workspace, and the product is a bf16
// GEMM.
#include "common/check.h"
#include "common/gemm_strides.h"
#include "cuda/device/launch.h"
#include "kernels.h"
#include "side.h"
#include "workspace.h"

namespace octavo {

namespace cuda {
namespace {

// The most K-blocks of a tile with which store warps pay, see store_warps_pay.
constexpr int64_t FEW_BLOCKS = 6;

// A CTA leaves the schedule at an index past the last tile, by at most the number of CTAs: all indices are int32.
constexpr int64_t MOST_TILES = INT32_MAX - 65536;

Promotion promotion_of(const GemmSpec& spec) {
  if (!multiplies_fp8(spec) || spec.fast_accumulation) return Promotion::none;
  if (spec.scaling != Scaling::block) return Promotion::plain;
  return spec.right_square ? Promotion::square : Promotion::vectors;
}

Gathered gathered_of(const GemmArgs& args) {
  return args.left.index.of_rows ? Gathered::left : args.right.index.of_rows ? Gathered::right : Gathered::none;
}

GemmKernel kernel_of(const GemmArgs& args, int tile) {
  const GemmSpec& spec = args.spec;
  const bool left_transposed = left_walk(spec) == OperandWalk::rows_t;
  const bool right_transposed = left_transposed || right_walk(spec) == OperandWalk::matrices_t;
  if (const Gathered gathered = gathered_of(args); gathered != Gathered::none) {
    return spec.quantized ? gathered_codes_kernel(tile)
                          : gathered_kernel(left_transposed, right_transposed, gathered, tile);
  }
  if (!multiplies_fp8(spec)) {
    return !spec.quantized && spec.dtype == DType::f16 ? f16_kernel(left_transposed, right_transposed)
                                                       : bf16_kernel(left_transposed, right_transposed, tile);
  }
  const Promotion promotion = promotion_of(spec);
  if (spec.right_format == Format::e5m2) {
    return fp8_rare_kernel(spec.left_format == Format::e5m2 ? Element::e5m2 : Element::e4m3, promotion);
  }
  return spec.left_format == Format::e5m2 ? fp8_e5m2_kernel(promotion, tile) : fp8_e4m3_kernel(promotion, tile);
}

Factor factor_of(const GemmSpec& spec, bool left) {
  if (!spec.quantized) return Factor::none;
  switch (spec.scaling) {
    case Scaling::delayed:
    case Scaling::current:
    case Scaling::nvfp4: return Factor::group;
    case Scaling::row: return left && spec.gemm != Gemm::wgrad ? Factor::row : Factor::column;
    default: return Factor::none;
  }
}

const float* factors_of(const GemmSpec& spec, const GemmOperand& operand) {
  return spec.scaling == Scaling::nvfp4 ? operand.global : static_cast<const float*>(operand.scales);
}

void set_square(const GemmArgs& args, GemmParams& params) {
  const int32_t across = static_cast<int32_t>(ceil_div(args.k, 128)),
                down = static_cast<int32_t>(ceil_div(args.n, 128));
  params.square = static_cast<const float*>(args.right.scales);
  params.square_group = across * down;
  params.square_column = args.spec.gemm == Gemm::fprop ? across : 1;
  params.square_k = args.spec.gemm == Gemm::fprop ? 1 : across;
}

void set_tokens(const GemmArgs& args, Gathered gathered, GemmParams& params) {
  if (gathered == Gathered::none) return;
  const GemmOperand& operand = gathered == Gathered::left ? args.left : args.right;
  params.tokens = static_cast<const uint8_t*>(operand.data);
  const int64_t cols = gathered == Gathered::left ? left_cols(args) : right_cols(args);
  params.token_bytes = static_cast<uint32_t>(args.spec.quantized ? cols : operand.row_stride * 2);
  params.token_cols = static_cast<int32_t>(cols);
  if (args.spec.quantized) params.token_scales = static_cast<const float*>(operand.scales);
  params.rows_at = RowsAt::of(operand.index);
}

void set_epilogue(const GemmArgs& args, GemmParams& params) {
  params.out = args.out;
  params.out_dtype = args.spec.out_dtype;
  params.out_row_stride = args.out_row_stride;
  params.out_group_stride = args.out_group_stride;
  params.accumulate = args.spec.accumulate;
  params.left_use = factor_of(args.spec, true);
  params.right_use = factor_of(args.spec, false);
  params.left_factor = factors_of(args.spec, args.left);
  params.right_factor = factors_of(args.spec, args.right);
  params.bias = args.bias;
  params.bias_dtype = args.bias_dtype;
  params.bias_scales = args.bias_scales;
  const bool columns = params.right_use == Factor::column;
  params.finish = args.bias                                                               ? Finish::general
                  : args.spec.accumulate && args.spec.out_dtype == DType::f32 && !columns ? Finish::adds
                  : args.spec.accumulate                                                  ? Finish::general
                  : columns                                                               ? Finish::columns
                                                                                          : Finish::plain;
}

// The block scales of a promoted product: tensor maps of vectors, or the array of square blocks.
Error set_scales(const GemmArgs& args, const Side& left, const Side& right, const GemmTile& tile, GemmParams& params) {
  const Promotion promotion = promotion_of(args.spec);
  if (promotion < Promotion::square) return {};
  const bool panels = left.walk == OperandWalk::panels;
  if (gathered_of(args) != Gathered::left) {
    if (const Error error = encode_scales(args.left.scales, panels ? left.cols : args.rows,
                                          panels ? left.panels : ceil_div(left.cols, 128), tile.rows + SCALE_TILE_EXTRA,
                                          &params.left_scales)) {
      return error;
    }
  }
  if (promotion == Promotion::square) {
    set_square(args, params);
    return {};
  }
  const bool rows = right.walk == OperandWalk::matrices;
  params.right_rows = rows ? static_cast<int32_t>(args.n) : 0;
  return encode_scales(args.right.scales, rows ? args.groups * args.n : right.cols,
                       rows ? ceil_div(right.cols, 128) : right.panels, tile.cols, &params.right_scales);
}

// The operands' and the result's order, without tensor maps: those are made for operands that have rows.
GemmParams params_of(const GemmArgs& args, const Side& left, const Side& right) {
  GemmParams params = {};
  params.plan = args.plan;
  params.rows = args.rows;
  params.groups = static_cast<int32_t>(args.groups);
  params.k_grouped = args.spec.gemm == Gemm::wgrad;
  params.height = static_cast<int32_t>(args.n);
  params.width = static_cast<int32_t>(out_cols(args));
  params.k_blocks = static_cast<int32_t>(ceil_div(left.cols, SWIZZLE_BYTES / left.element_bytes));
  params.left_walk = left.walk;
  params.right_walk = right.walk;
  params.left_interleave = interleave_bits(left);
  params.right_interleave = interleave_bits(right);
  params.panels_each = right.walk == OperandWalk::stacked ? static_cast<int32_t>(ceil_div(args.n, PANEL_ROWS)) : 0;
  set_tokens(args, gathered_of(args), params);
  set_epilogue(args, params);
  return params;
}

// Whether store warps make a difference: a tile needs stages that the last one's results borrowed, and few K-blocks
// follow to hide the wait for them. With 3 to 6 K-blocks a GEMM then takes 0.90 to 0.99 of the time, with fewer up to
// 1.09 (docs/decisions/0012).
bool store_warps_pay(const GemmArgs& args, const GemmParams& params, const Side& left, const GemmKernel& kernel) {
  const int64_t each = SWIZZLE_BYTES / left.element_bytes;
  const int64_t k_blocks = params.k_grouped ? ceil_div(ceil_div(args.rows, args.groups), each) : params.k_blocks;
  return k_blocks > kernel.first_borrowed && k_blocks <= FEW_BLOCKS;
}

// The tensor maps of operands, scales and result, and who stores the result.
Error set_maps(const GemmArgs& args, const Side& left, const Side& right, const GemmTile& tile,
               const GemmKernel& kernel, GemmParams& params) {
  const Gathered gathered = gathered_of(args);
  if (gathered != Gathered::left) {
    if (const Error error = encode_side(left, args, tile.rows, &params.left)) return error;
  }
  if (gathered != Gathered::right) {
    if (const Error error = encode_side(right, args, tile.cols, &params.right)) return error;
  }
  if (const Error error = set_scales(args, left, right, tile, params)) return error;
  const bool adds = params.finish == Finish::adds, bf16 = args.spec.out_dtype == DType::bf16;
  params.out_by_tma = kernel.stores_by_tma && (adds || (params.finish <= Finish::columns && bf16));
  params.store_warps = adds ? kernel.adds_in_place
                            : params.out_by_tma && kernel.store_warps && store_warps_pay(args, params, left, kernel);
  if (!params.out_by_tma) return {};
  return encode_out(args, params.store_warps ? WARPGROUP_ROWS : WARP_ROWS, &params.out_map);
}

Error launch_gemm(const GemmArgs& args, const Side& left, const Side& right, cudaStream_t stream) {
  int device = 0, sms = 0;
  if (const Error error = failed(cudaGetDevice(&device))) return error;
  // this thread may have no current context yet, and encoding a tensor map needs one
  if (const Error error = failed(cudaSetDevice(device))) return error;
  if (const Error error = failed(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device))) return error;
  const int number =
      args.tile >= 0 ? args.tile : gemm_tile(args.spec, args.rows, args.n, args.k, args.groups, sms, -1).tile;
  const GemmTile& tile = GEMM_TILES[number];
  GemmParams params = params_of(args, left, right);
  const int64_t down = params.k_grouped
                           ? args.groups * ceil_div(args.n, tile.rows)
                           : block_bound(args.rows, args.groups, tile.rows) + ceil_div(args.rows, tile.rows);
  const int64_t tiles = down * ceil_div(params.width, tile.cols);
  if (tiles > MOST_TILES) return unsupported("the result has more than 2^31 tiles; split the call");
  if (tiles == 0) return {};
  const GemmKernel kernel = kernel_of(args, number);
  if (kernel.entry == nullptr)
    return unsupported("the CUDA kernels have no tile of this number for these formats; give -1 to have one chosen");
  // Without rows there are no operands and every tile is zero: the maps stay undefined and are not used.
  if (args.rows > 0) {
    if (const Error error = set_maps(args, left, right, tile, kernel, params)) return error;
  }
  cudaFuncSetAttribute(kernel.entry, cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.smem_bytes);
  void* arguments[] = {&params};
  // The tile was chosen for all multiprocessors, so that a limit changes no bit: only tiles of one shape treat
  // subnormal sums that are added to main_grad alike.
  const int64_t most = args.ctas > 0 && args.ctas < sms ? args.ctas : sms;
  const unsigned ctas = static_cast<unsigned>(tiles < most ? tiles : most);
  cudaLaunchKernel(kernel.entry, dim3(ctas), dim3(kernel.threads), arguments, kernel.smem_bytes, stream);
  return launched();
}

}  // namespace
}  // namespace cuda

size_t gemm_workspace_cuda(const GemmArgs& given) { return cuda::gemm_workspace_bytes(with_strides(given)); }

Error gemm_cuda(const GemmArgs& given, void* on) {
  if (const Error error = check_gemm(given, true)) return error;
  GemmArgs args = with_strides(given);
  const cudaStream_t stream = cuda::stream_of(on);
  cuda::Side left = cuda::side_of(args, true), right = cuda::side_of(args, false);
  if (args.rows > 0) {
    if (const Error error = cuda::prepare_operands(args, left, right, stream)) return error;
  }
  return cuda::launch_gemm(args, left, right, stream);
}

}  // namespace octavo
