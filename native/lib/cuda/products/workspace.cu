#include "workspace.h"

#include "common/check.h"
#include "common/gemm_strides.h"
#include "common/gemm_tile.h"
#include "cuda/planes/dequantize.h"
#include "cuda/planes/interleave_scales.h"
#include "cuda/planes/spread_scales.h"

namespace octavo::cuda {
namespace {

constexpr int64_t COPY_ALIGNMENT = 256;

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

// ---- scales of interleaved columns in the order of their reading: of blocks, and of the result's columns

bool interleaves_scales(const GemmSpec& spec) {
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

int64_t interleaved_bytes(const GemmArgs& args) {
  if (!interleaves_scales(args.spec)) return 0;
  return scale_rows(args) * scale_pitch(args, args.spec.left_interleave ? left_cols(args) : right_cols(args)) * 4;
}

void interleave_operand_scales(GemmArgs& args, float* into, cudaStream_t stream) {
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
struct GemmWorkspace {
  size_t right, spread, interleaved, bytes;
};

GemmWorkspace workspace_of(const GemmArgs& args) {
  GemmWorkspace space{};
  space.right = copied_bytes(args, true);
  space.spread = space.right + copied_bytes(args, false);
  const int64_t spread = args.spec.left_square ? spread_bytes(args) : 0;
  space.interleaved = space.spread + static_cast<size_t>(round_up(spread, COPY_ALIGNMENT));
  space.bytes = space.interleaved + static_cast<size_t>(interleaved_bytes(args));
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

size_t gemm_workspace_bytes(const GemmArgs& args) { return workspace_of(args).bytes; }

Error prepare_operands(GemmArgs& args, Side& left, Side& right, cudaStream_t stream) {
  const GemmWorkspace space = workspace_of(args);
  if (space.bytes == 0) return {};
  if (const Error error = check_workspace(args, space.bytes)) return error;
  uint8_t* const workspace = static_cast<uint8_t*>(args.workspace);
  if (copies(args.spec, true)) {
    if (const Error error = copy_side(args, left, true, workspace, stream)) return error;
    left.data = workspace;
  }
  if (copies(args.spec, false)) {
    if (const Error error = copy_side(args, right, false, workspace + space.right, stream)) return error;
    right.data = workspace + space.right;
  }
  if (args.spec.left_square) {
    float* const columns = reinterpret_cast<float*>(workspace + space.spread);
    const PlanView plan{args.plan, args.rows, args.groups};
    spread_scales(static_cast<const float*>(args.left.scales), left.cols, left.panels, plan, columns, stream);
    args.left.scales = columns;
  }
  if (interleaves_scales(args.spec))
    interleave_operand_scales(args, reinterpret_cast<float*>(workspace + space.interleaved), stream);
  return {};
}

}  // namespace octavo::cuda
