// Grouped GEMMs on Hopper, host side: chooses the kernel, encodes the tensor maps, lays out the workspace.
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
#include "cuda/planes/dequantize.h"
#include "cuda/planes/interleave_scales.h"
#include "cuda/planes/spread_scales.h"
#include "kernels.h"
#include "octavo/dequantize.h"
#include "tensor_map.h"

namespace octavo {

namespace cuda {
namespace {

constexpr int64_t COPY_ALIGNMENT = 256;
constexpr int64_t FEW_BLOCKS = 6;

// An operand as the kernel reads it: codes, unquantized values, or bf16 values dequantized from codes.
struct Side {
  const void* data;
  int element_bytes;
  OperandWalk walk;
  int64_t cols;        // per row, or in a panel
  int64_t row_stride;  // elements; rows and matrices
  int64_t rows;        // ragged rows, or rows per matrix
  int64_t panels;
  int64_t interleave;  // panels whose columns, two halves, are read in turns of so many; 0: as they stand
};

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

// Panels whose columns are read in turns.
Error encode_turns(const Side& side, int span, CUtensorMap* map) {
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

// TMA tiles of `span` rows (or columns of a panel) and one K-block.
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
      if (side.interleave) return encode_turns(side, span, map);
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

// TMA tiles of the result, 128 bytes wide.
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

// Scales of 1 x 128 blocks: [K-blocks or panels][rows or columns, rounded up to 4] fp32.
Error encode_scales(const void* scales, int64_t width, int64_t blocks, int span, CUtensorMap* map) {
  const uint64_t pitch = round_up(width, 4);
  return encode(
      {scales, 4, 2, {pitch, static_cast<uint64_t>(blocks)}, {pitch * 4}, {static_cast<uint32_t>(span), 1}, false},
      map);
}

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

// Whether store warps make a difference: a tile needs stages that the last one lent to its results, and few K-blocks
// lie behind these. With 3 to 6 K-blocks a GEMM then takes 0.90 to 0.99 of the time, with fewer up to 1.09.
bool waits_for_lent(const GemmArgs& args, const GemmParams& params, const Side& left, const GemmKernel& kernel) {
  const int64_t each = SWIZZLE_BYTES / left.element_bytes;
  const int64_t k_blocks = params.k_grouped ? ceil_div(ceil_div(args.rows, args.groups), each) : params.k_blocks;
  return k_blocks > kernel.unlent_stages && k_blocks <= FEW_BLOCKS;
}

// Interleaved columns come in blocks of a power of two.
int32_t turn_of_side(const Side& side) {
  int32_t turn = 0;
  while (int64_t{1} << turn < 2 * side.interleave) ++turn;
  return turn;
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
  const bool k_grouped = args.spec.gemm == Gemm::wgrad;

  GemmParams params = {};
  params.plan = args.plan;
  params.rows = args.rows;
  params.groups = static_cast<int32_t>(args.groups);
  params.k_grouped = k_grouped;
  params.height = static_cast<int32_t>(args.n);
  params.width = static_cast<int32_t>(out_cols(args));
  params.k_blocks = static_cast<int32_t>(ceil_div(left.cols, SWIZZLE_BYTES / left.element_bytes));
  params.left_walk = left.walk;
  params.right_walk = right.walk;
  params.left_turn = turn_of_side(left);
  params.right_turn = turn_of_side(right);
  params.panels_each = right.walk == OperandWalk::stacked ? static_cast<int32_t>(ceil_div(args.n, PANEL_ROWS)) : 0;
  const Gathered gathered = gathered_of(args);
  set_tokens(args, gathered, params);
  set_epilogue(args, params);

  const int64_t down = k_grouped ? args.groups * ceil_div(args.n, tile.rows)
                                 : block_bound(args.rows, args.groups, tile.rows) + ceil_div(args.rows, tile.rows);
  const int64_t tiles = down * ceil_div(params.width, tile.cols);
  if (tiles > INT32_MAX - 65536) return unsupported("the result has more than 2^31 tiles; split the call");
  if (tiles == 0) return {};
  const GemmKernel kernel = kernel_of(args, number);
  if (kernel.entry == nullptr)
    return unsupported("the CUDA kernels have no tile of this number for these formats; give -1 to have one chosen");
  // Without rows there are no operands and every tile is zero: the maps stay undefined and are not used.
  if (args.rows > 0) {
    if (gathered != Gathered::left) {
      if (const Error error = encode_side(left, args, tile.rows, &params.left)) return error;
    }
    if (gathered != Gathered::right) {
      if (const Error error = encode_side(right, args, tile.cols, &params.right)) return error;
    }
    if (const Error error = set_scales(args, left, right, tile, params)) return error;
    params.out_by_tma =
        kernel.stores_by_tma &&
        (params.finish == Finish::adds || (params.finish <= Finish::columns && args.spec.out_dtype == DType::bf16));
    params.store_warps = params.finish == Finish::adds
                             ? kernel.adds_in_place
                             : params.out_by_tma && kernel.store_warps && waits_for_lent(args, params, left, kernel);
    if (params.out_by_tma) {
      if (const Error error = encode_out(args, params.store_warps ? 64 : 16, &params.out_map)) return error;
    }
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

// ---- bf16 copies of MXFP8 and NVFP4 operands

int64_t copy_elements(const Side& side, const GemmArgs& args) {
  switch (side.walk) {
    case OperandWalk::rows: return args.rows * side.cols;
    case OperandWalk::matrices: return args.groups * args.n * side.cols;
    default: return side.panels * side.cols * PANEL_ROWS;
  }
}

size_t copy_bytes_of(const Side& side, const GemmArgs& args) {
  return static_cast<size_t>(round_up(copy_elements(side, args) * 2, COPY_ALIGNMENT));
}

// Codes times their block scales. The second level is applied in the epilogue: with it bf16 would round.
Error copy_side(const GemmArgs& args, const Side& side, bool left, void* into, cudaStream_t stream) {
  const GemmSpec& spec = args.spec;
  const GemmOperand& operand = left ? args.left : args.right;
  DequantizeArgs copy;
  copy.spec.format = left ? spec.left_format : spec.right_format;
  copy.spec.scaling = spec.scaling;
  copy.spec.square = !left && spec.right_square;
  copy.spec.hadamard = spec.hadamard;
  const bool panels = side.walk == OperandWalk::panels || side.walk == OperandWalk::stacked;
  copy.direction = panels ? Direction::columnwise : Direction::rowwise;
  copy.plane = {const_cast<void*>(operand.data), const_cast<void*>(operand.scales), nullptr, Layout::native};
  copy.rows = ragged(side.walk) ? args.rows : args.groups * args.n;
  copy.cols = side.cols;
  copy.groups = args.groups;
  copy.matrix_rows = ragged(side.walk) ? 0 : args.n;
  copy.plan = args.plan;
  copy.out = into;
  copy.out_dtype = DType::bf16;
  copy.out_layout = panels ? Layout::native : Layout::plain;
  return launch_dequantize(copy, stream);
}

// Whether the side is copied: it has codes, and the product is not one of codes.
bool copies(const GemmSpec& spec, bool left) {
  return spec.quantized && !multiplies_fp8(spec) && !(left ? spec.left_values : spec.right_values);
}

size_t copied_bytes(const GemmArgs& args, bool left) {
  return copies(args.spec, left) ? copy_bytes_of(side_of(args, left), args) : 0;
}

// ---- scales of x's square blocks where x is the left operand, of which kernels read one for each column

int64_t spread_bytes(const GemmArgs& args) {
  return panel_bound(args.rows, args.groups, 0) * round_up(left_cols(args), 4) * 4;
}

// ---- scales of columns that are read in turns, as the kernels read them: of blocks, and of the result's columns

bool turns_scales(const GemmSpec& spec) {
  return (spec.left_interleave || spec.right_interleave) &&
         (spec.scaling == Scaling::block || spec.scaling == Scaling::row);
}

// Rows of scales, a panel's or a group's, and their floats.
int64_t scale_rows(const GemmArgs& args) {
  return args.spec.scaling == Scaling::block ? panel_bound(args.rows, args.groups, 0) : args.groups;
}
int64_t scale_pitch(const GemmArgs& args, int64_t cols) {
  return args.spec.scaling == Scaling::block ? round_up(cols, 4) : cols;
}

int64_t turned_bytes(const GemmArgs& args) {
  if (!turns_scales(args.spec)) return 0;
  return scale_rows(args) * scale_pitch(args, args.spec.left_interleave ? left_cols(args) : right_cols(args)) * 4;
}

void turn_scales(GemmArgs& args, float* into, cudaStream_t stream) {
  const GemmSpec& spec = args.spec;
  GemmOperand& operand = spec.left_interleave ? args.left : args.right;
  const int64_t cols = spec.left_interleave ? left_cols(args) : right_cols(args);
  const PlanView plan{args.plan, args.rows, args.groups};
  interleave_scales(static_cast<const float*>(operand.scales), scale_rows(args), scale_pitch(args, cols), cols,
                    spec.left_interleave + spec.right_interleave, spec.scaling == Scaling::block ? &plan : nullptr,
                    into, stream);
  operand.scales = into;
}

// Byte offsets into the workspace, of which the left operand's copy comes first.
struct Workspace {
  size_t right, spread, turned, bytes;
};

Workspace workspace_of(const GemmArgs& args) {
  Workspace space{};
  space.right = copied_bytes(args, true);
  space.spread = space.right + copied_bytes(args, false);
  const int64_t spread = args.spec.left_square ? spread_bytes(args) : 0;
  space.turned = space.spread + static_cast<size_t>(round_up(spread, COPY_ALIGNMENT));
  space.bytes = space.turned + static_cast<size_t>(turned_bytes(args));
  return space;
}

Error check_workspace(const GemmArgs& args, size_t bytes) {
  if (args.workspace_bytes < bytes || args.workspace == nullptr) {
    return {ErrorCode::workspace_too_small, "the workspace is smaller than gemm_workspace_cuda says"};
  }
  if (!aligned(args.workspace, COPY_ALIGNMENT)) {
    return invalid("the workspace is not aligned to 256 bytes; allocate it so");
  }
  return {};
}

}  // namespace
}  // namespace cuda

size_t gemm_workspace_cuda(const GemmArgs& given) {
  const GemmArgs args = with_strides(given);
  return cuda::workspace_of(args).bytes;
}

Error gemm_cuda(const GemmArgs& given, void* on) {
  if (const Error error = check_gemm(given, true)) return error;
  GemmArgs args = with_strides(given);
  const cudaStream_t stream = cuda::stream_of(on);
  cuda::Side left = cuda::side_of(args, true), right = cuda::side_of(args, false);
  const cuda::Workspace space = cuda::workspace_of(args);
  if (space.bytes > 0 && args.rows > 0) {
    if (const Error error = cuda::check_workspace(args, space.bytes)) return error;
    uint8_t* const workspace = static_cast<uint8_t*>(args.workspace);
    if (cuda::copies(args.spec, true)) {
      if (const Error error = cuda::copy_side(args, left, true, workspace, stream)) return error;
      left.data = workspace;
    }
    if (cuda::copies(args.spec, false)) {
      if (const Error error = cuda::copy_side(args, right, false, workspace + space.right, stream)) return error;
      right.data = workspace + space.right;
    }
    if (args.spec.left_square) {
      float* const columns = reinterpret_cast<float*>(workspace + space.spread);
      const PlanView plan{args.plan, args.rows, args.groups};
      cuda::spread_scales(static_cast<const float*>(args.left.scales), left.cols, left.panels, plan, columns, stream);
      args.left.scales = columns;
    }
    if (cuda::turns_scales(args.spec))
      cuda::turn_scales(args, reinterpret_cast<float*>(workspace + space.turned), stream);
  }
  return cuda::launch_gemm(args, left, right, stream);
}

}  // namespace octavo
