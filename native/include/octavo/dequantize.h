// From codes back to values, and from one layout to another.
#pragma once

#include "octavo/plan.h"
#include "octavo/quantize.h"
#include "octavo/types.h"

namespace octavo {

// One plane's values: fl(code * scale), NVFP4's scale being fl(d * global); every NaN 0x7FC00000; rounded once to
// out_dtype (bf16's canonical NaN is 0x7FC0, fp16's 0x7E00).
//
// out, plain    [rows, cols], rows past the sum +0; Hadamard columnwise data [block_bound(M, G, 16) * 16, cols]
// out, native   columnwise planes alone: panels [P][cols][128] of out_dtype, zeros past a group's end
struct DequantizeArgs {
  QuantizerSpec spec;
  Direction direction = Direction::rowwise;
  Plane plane;  // read
  int64_t rows = 0, cols = 0, groups = 0, matrix_rows = 0;
  const int64_t* plan = nullptr;
  void* out = nullptr;
  DType out_dtype = DType::f32;
  Layout out_layout = Layout::plain;
};

Error check_dequantize(const DequantizeArgs& args);
Error dequantize_cpu(const DequantizeArgs& args, int threads);
Error dequantize_cuda(const DequantizeArgs& args, void* stream);

// One plane from the plain layout to the native one (`to` native), or back. Codes and scales alike; `global` is not
// touched. Where both layouts are the same array it is copied.
struct ConvertArgs {
  QuantizerSpec spec;
  Direction direction = Direction::rowwise;
  Layout to = Layout::native;
  Plane from;
  Plane into;
  int64_t rows = 0, cols = 0, groups = 0, matrix_rows = 0;
  const int64_t* plan = nullptr;
};

Error check_convert(const ConvertArgs& args);
Error convert_cpu(const ConvertArgs& args, int threads);
Error convert_cuda(const ConvertArgs& args, void* stream);

// One-byte block scales [outer, blocks] to the tiles of 128 x 4 that Blackwell's tensor cores read, or back; outer and
// blocks are padded to multiples of 128 and 4 with zero bytes. PTX ISA, "Scale factor layout" of tcgen05.mma.
struct SwizzleArgs {
  const uint8_t* from = nullptr;
  uint8_t* into = nullptr;
  int64_t outer = 0, blocks = 0;
  bool to_swizzled = true;
};

Error check_swizzle(const SwizzleArgs& args);
Error swizzle_scales_cpu(const SwizzleArgs& args);
Error swizzle_scales_cuda(const SwizzleArgs& args, void* stream);

// One-byte E2M1 codes [rows, cols] to two per byte [rows, ceil(cols / 2)], the even column low, or back.
struct PackArgs {
  const uint8_t* from = nullptr;
  uint8_t* into = nullptr;
  int64_t rows = 0, cols = 0;
  bool pack = true;
};

Error check_pack(const PackArgs& args);
Error pack_e2m1_cpu(const PackArgs& args);
Error pack_e2m1_cuda(const PackArgs& args, void* stream);

// MXFP4 (OCP Microscaling Formats v1.0) to values: fl(E2M1 code * 2^(scale - 127)), exact in fp32, rounded once to
// out_dtype. A scale of 0xFF makes its block NaN.
//
// codes   [blocks][16], two per byte, the even element low
// scales  [blocks], E8M0
// out     [blocks][32]
constexpr int MXFP4_BLOCK = 32;

struct ExpandArgs {
  const uint8_t* codes = nullptr;
  const uint8_t* scales = nullptr;
  int64_t blocks = 0;
  void* out = nullptr;
  DType out_dtype = DType::bf16;
};

Error check_expand(const ExpandArgs& args);
Error expand_mxfp4_cpu(const ExpandArgs& args);
Error expand_mxfp4_cuda(const ExpandArgs& args, void* stream);

}  // namespace octavo
