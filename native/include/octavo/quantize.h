// Grouped quantization: one call produces every requested plane.
#pragma once

#include <optional>

#include "octavo/plan.h"
#include "octavo/types.h"

namespace octavo {

struct QuantizerSpec {
  Format format = Format::e4m3;
  Scaling scaling = Scaling::block;
  Operand operand = Operand::x;  // part of the Philox counter
  bool square = false;
  bool stochastic = false;
  bool hadamard = false;  // columnwise data only
  bool power_of_two = false;
  float amax_epsilon = 0.0f;
  // Values are first rounded to MXFP4's: E2M1, with a power of two for each 32 elements of a row, or of a column
  // (octavo_numerics.round_mxfp4). For E4M3 in square blocks of 128, of bf16 or fp32.
  std::optional<Direction> mxfp4 = {};
  // Columnwise data alone have square blocks, quantized again: one scale for 128 rows of a group x 128 columns of x.
  bool square_columns = false;

  // True where columnwise data are the transpose of the rowwise codes.
  bool shares_codes() const { return square || scaling == Scaling::delayed || scaling == Scaling::current; }

  // How the plane of one direction is quantized, for what reads it.
  QuantizerSpec of_plane(bool columnwise) const {
    QuantizerSpec plane = *this;
    plane.square = square || (square_columns && columnwise);
    plane.square_columns = false;
    return plane;
  }
};

// Rows of an operand that are read where they stand in a shorter array: row i is row of_rows[i] / each of the array's
// `count` rows, the token of the choice of_rows[i] (RouteArgs::order). A number outside 0 to count * each - 1 is never
// followed: such a row is zeros. The bits are those of the operand that permute would write.
struct RowIndex {
  const int64_t* of_rows = nullptr;  // [rows], on the device of the call; null: row i is the array's row i
  int64_t each = 1;
  int64_t count = 0;  // count * each is at most 2^30

  // The array's row that row `row` is, on the host; -1: nowhere, it is zeros.
  int64_t at(int64_t row) const {
    if (of_rows == nullptr) return row;
    const int64_t choice = of_rows[row];
    return choice < 0 || choice >= count * each ? -1 : choice / each;
  }
};

// Rows [rows, cols] of a ragged operand (matrix_rows 0; `plan` says where groups begin), or `groups` stacked matrices
// of matrix_rows rows each (rows = groups * matrix_rows; no plan).
struct Input {
  const void* data = nullptr;
  DType dtype = DType::bf16;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t row_stride = 0;  // elements
  int64_t groups = 0;
  int64_t matrix_rows = 0;
  const int64_t* plan = nullptr;
  RowIndex index = {};  // of ragged rows without a prologue
  // Not null: stacked matrices of MXFP4 (octavo/dequantize.h), of which `data` are the codes, two per byte, and these
  // the scales, [rows][cols / 32]; dtype is bf16, which holds their values. CUDA, E4M3 codes in square blocks of 128.
  const uint8_t* mxfp4_scales = nullptr;
  // Not 0: stacked matrices whose columns, or whose rows, are two halves that take turns in the array in blocks of so
  // many. What is quantized are the halves, the first one first. Without a prologue; one of the two.
  int64_t interleaved_cols = 0, interleaved_rows = 0;

  bool is_interleaved() const { return interleaved_cols || interleaved_rows; }
};

enum class PrologueKind : int32_t { none = 0, activation = 1, activation_grad = 2, norm = 3 };

// What is applied to the input before it is quantized: computed in fp32, rounded once to the input's dtype.
//
// activation       input [M, F], or [M, 2 F] with gate first where gated -> act(x) (* up) (* probs[row])
// activation_grad  input as above, dy [M, F] -> gradient of the input, [M, F] or [M, 2 F]
// norm             input [M, C] -> (x - mean) * rstd * gamma + beta; RMSNorm has neither mean nor beta
struct Prologue {
  PrologueKind kind = PrologueKind::none;
  Activation activation = Activation::silu;
  Norm norm = Norm::rms;
  const void* dy = nullptr;
  int64_t dy_stride = 0;
  const float* probs = nullptr;  // [M] or null
  float* dprobs = nullptr;       // [M] or null, written: sums of dy act(x) (* up) along rows, in a fixed order
  // Of activation_grad, [M, F] of the input's dtype or null, written: what a call with `activation` would quantize.
  void* forward = nullptr;
  const void* gamma = nullptr;  // [C], dtype of the input
  const void* beta = nullptr;   // [C] or null
  float epsilon = 0.0f;
  float* mean = nullptr;  // [M], written (LayerNorm)
  float* rstd = nullptr;  // [M], written
};

// The codes of one direction and their scales; or, with Layout::values, bf16 values in the place of codes.
struct Plane {
  void* codes = nullptr;    // null: the plane is not requested
  void* scales = nullptr;   // null with values, which have them multiplied in
  float* global = nullptr;  // [G], NVFP4's second-level decode factor
  Layout layout = Layout::plain;
};

// At least one plane is requested, or `activated` of an activation or its gradient.
struct QuantizeArgs {
  QuantizerSpec spec;
  Input input;
  Prologue prologue;
  Plane rowwise;
  Plane columnwise;
  const float* encode_scales = nullptr;  // [G], delayed scaling alone
  float* amax = nullptr;                 // [G] or null: max |.| of what was quantized, NaN winning
  void* dequantized = nullptr;           // bf16 [M, C] or null: rowwise codes times their scales, rounded to bf16
  void* activated = nullptr;             // [M, C] of the input's dtype or null: what was quantized
  float* dbias = nullptr;                // [G, C] or null: fp32 column sums of what was quantized, in a fixed order
  const uint32_t* seed = nullptr;        // two words, low first, on the device of the call
  uint32_t group_offset = 0;
  const uint32_t* group_offset_device = nullptr;  // added to group_offset where given
  const int32_t* unchanged = nullptr;             // on the device; not 0: every output is left as it is
  // Most CTAs of the kernels that stay on their multiprocessors for the whole call; 0: as many as fit. The bits do not
  // depend on it. Those are the kernels of activations but SwiGLU's, of their gradients, and of norms, with 16-byte
  // loads. All others have a CTA for each tile, which ends within microseconds: a call of these alone refuses a limit.
  // The CPU has no CTAs, and takes any.
  int ctas = 0;
  void* workspace = nullptr;  // 256-byte aligned, undefined at entry
  size_t workspace_bytes = 0;
};

// Columns of what is quantized, which the prologue may change.
inline int64_t output_cols(const QuantizeArgs& args) {
  const bool halves = args.prologue.kind == PrologueKind::activation && is_gated(args.prologue.activation);
  return halves ? args.input.cols / 2 : args.input.cols;
}

// The checks that both devices share: shapes, alignment, combinations. quantize_* call it first.
Error check_quantize(const QuantizeArgs& args);

// On the CPU the result does not depend on `threads`. threads 0: one, and the loops that every processor of the
// architecture runs, for tests to compare with those chosen at run time.
size_t quantize_workspace_cpu(const QuantizeArgs& args);
size_t quantize_workspace_cuda(const QuantizeArgs& args);
Error quantize_cpu(const QuantizeArgs& args, int threads);
Error quantize_cuda(const QuantizeArgs& args, void* stream);

}  // namespace octavo
