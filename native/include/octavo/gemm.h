// Grouped GEMMs of a linear layer: fprop, dgrad, wgrad of unquantized or quantized operands.
//
//   fprop  y[M, N]      = x[M, K]  w[g]^T     left x rowwise,     right w rowwise
//   dgrad  dx[M, K]     = dy[M, N] w[g]       left dy rowwise,    right w columnwise
//   wgrad  dw[G, N, K]  = dy_g^T x_g          left dy columnwise, right x columnwise
//
// A weight that lies as [G, K, N] is one of these with N and K exchanged: dgrad then makes y, with its bias, fprop dx,
// and wgrad of x on the left and dy on the right dw as it lies.
//
// Rows past the plan's sum are not read and come back as +0; a group without rows has dw +0, or the accumulator's bits.
#pragma once

#include "octavo/plan.h"
#include "octavo/quantize.h"
#include "octavo/types.h"

namespace octavo {

enum class Gemm : int32_t { fprop = 0, dgrad = 1, wgrad = 2 };

// Unquantized: `data` of GemmSpec::dtype, x [M, K], dy [M, N], w [G, N, K]; the rows of a matrix stand row_stride
// elements apart, the matrices of w N rows apart. Quantized: the codes and scales of the plane that the GEMM reads, in
// the native layout (layouts.h), which has no strides. Values: that plane's, and `scales` is null.
struct GemmOperand {
  const void* data = nullptr;
  const void* scales = nullptr;
  const float* global = nullptr;  // NVFP4's second level, [G]
  int64_t row_stride = 0;
  // Of ragged rows, of one operand at most: `data` are tokens, unquantized (CUDA: bf16), or of fprop's and dgrad's left
  // operand codes of block scaling, with their scales in the plain layout, [count][blocks of 128 columns] (CUDA: e4m3
  // on both sides, weights in square blocks).
  RowIndex index = {};
};

// What is known of a GEMM before there are tensors.
struct GemmSpec {
  Gemm gemm = Gemm::fprop;
  bool quantized = false;
  DType dtype = DType::bf16;         // of unquantized operands
  Scaling scaling = Scaling::block;  // of both quantized operands
  Format left_format = Format::e4m3;
  Format right_format = Format::e4m3;
  bool right_square = false;  // w in square blocks; of wgrad x, with block scaling
  bool hadamard = false;      // wgrad of NVFP4: each group is padded to 16 rows, which take part
  DType out_dtype = DType::bf16;
  bool accumulate = false;         // wgrad: added to `out` in fp32 and rounded once
  bool fast_accumulation = false;  // FP8 without block scales: no promotion of partial sums to fp32
  bool left_square = false;        // wgrad of x on the left, with block scaling: x in square blocks
  bool left_values = false;        // MXFP8 and NVFP4: `left` is a plane of Layout::values
  bool right_values = false;       // likewise
  // Of wgrad: two halves of dw's rows, which are the left operand's columns, or of its columns, which are the right
  // one's, take turns in `out` in blocks of so many; 0: none do. One of the two. Every sum has the bits of the halves.
  int64_t left_interleave = 0, right_interleave = 0;
};

struct GemmArgs {
  GemmSpec spec;
  int64_t rows = 0;  // M
  int64_t n = 0;     // out-features
  int64_t k = 0;     // in-features
  int64_t groups = 0;
  const int64_t* plan = nullptr;
  GemmOperand left;
  GemmOperand right;
  void* out = nullptr;
  int64_t out_row_stride = 0;    // elements between rows of y, dx, or of one dw[g]
  int64_t out_group_stride = 0;  // elements between the matrices of dw
  const void* bias = nullptr;    // fprop: [G, N] or null; dgrad: [G, K] or null
  DType bias_dtype = DType::bf16;
  const float* bias_scales = nullptr;  // [M] or null: y[r] = ... + bias_scales[r] * bias[g]
  int tile = -1;                       // number of a tile of gemm_tiles; -1: chosen by gemm_tile
  // Most CTAs of the product, each of which has a multiprocessor to itself; 0: one for each multiprocessor. The bits do
  // not depend on it. Copies of MXFP8 and NVFP4 operands are not limited: their CTAs end within microseconds. CUDA.
  int ctas = 0;
  void* workspace = nullptr;  // 256-byte aligned, undefined at entry
  size_t workspace_bytes = 0;
};

// A tile shape of the CUDA kernels: `rows` x `cols` outputs per tile, `stages` K-blocks of 128 bytes in flight.
struct GemmTile {
  const char* name;
  int rows, cols, stages;
};

// What the model of gemm_tile expects of a tile on a problem.
struct GemmTileChoice {
  int tile;       // number in gemm_tiles
  int64_t tiles;  // tiles that are computed, each group's last ones in part
  double waves;   // tiles per CTA
  double filled;  // fraction of the computed outputs that belongs to the result
  double microseconds;
};

// The tiles that the kernels of `spec` are compiled for; sets `count`. Static storage.
const GemmTile* gemm_tiles(const GemmSpec& spec, int* count);

// The model's expectation of tile `tile` (-1: of the tile with the least) for M rows in equal groups on `sms`
// multiprocessors. Host arithmetic alone, in builds without CUDA too.
GemmTileChoice gemm_tile(const GemmSpec& spec, int64_t rows, int64_t n, int64_t k, int64_t groups, int sms, int tile);

// Checks shapes, alignment and combinations, for both devices. `cuda` adds what the Hopper kernels need: K and N
// multiples of 16, 16-bit or quantized operands, arrays and strides aligned to 16 bytes.
Error check_gemm(const GemmArgs& args, bool cuda);

size_t gemm_workspace_cpu(const GemmArgs& args);
size_t gemm_workspace_cuda(const GemmArgs& args);

// On the CPU the result does not depend on `threads`; threads 0: one, and the loops that every processor runs.
Error gemm_cpu(const GemmArgs& args, int threads);
Error gemm_cuda(const GemmArgs& args, void* stream);

}  // namespace octavo
