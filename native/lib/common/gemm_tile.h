// The tiles that the CUDA kernels are compiled for, by the number that GemmArgs::tile takes.
#pragma once

#include "octavo/gemm.h"

namespace octavo {

// Those of 192 rows or columns are for wgrad with a scale per column.
constexpr GemmTile GEMM_TILES[] = {
    {"128x256", 128, 256, 4}, {"128x128", 128, 128, 4}, {"64x256", 64, 256, 5},
    {"128x192", 128, 192, 5}, {"192x128", 192, 128, 4},
};
constexpr int GEMM_TILE_COUNT = 5;

// True if the tensor cores multiply FP8. MXFP8 and NVFP4 are multiplied as bf16, which represents their values exactly.
inline bool multiplies_fp8(const GemmSpec& spec) {
  return spec.quantized && spec.scaling != Scaling::mxfp8 && spec.scaling != Scaling::nvfp4;
}

}  // namespace octavo
