// The tiles that the CUDA kernels come in. Their numbers are those of GemmArgs::tile.
#pragma once

#include "octavo/gemm.h"

namespace octavo {

constexpr GemmTile GEMM_TILES[] = {
    {"128x256", 128, 256, 4},
    {"128x128", 128, 128, 4},
    {"64x256", 64, 256, 5},
};
constexpr int GEMM_TILE_COUNT = 3;

// What the tensor cores multiply: MXFP8 and NVFP4 as bf16, which holds their values exactly.
inline bool multiplies_fp8(const GemmSpec& spec) {
  return spec.quantized && spec.scaling != Scaling::mxfp8 && spec.scaling != Scaling::nvfp4;
}

}  // namespace octavo
