// The compiled kernels, by operand types. Each .cu file of this folder instantiates some of them.
#pragma once

#include "common/gemm_tile.h"
#include "cuda/gemm/kernel.cuh"

namespace octavo::cuda {

struct GemmKernel {
  const void* entry = nullptr;  // null: there is no such kernel
  int threads = 0;              // of a CTA
  int smem_bytes = 0;
  bool stores_by_tma = false;  // bf16 results are stored through GemmParams::out_map
  bool store_warps = false;    // by store warps if the launch wants them
  bool adds_in_place = false;  // by store warps, too
  int first_borrowed = 0;      // K-blocks of a tile before the first that needs a borrowed stage (GemmConfig)
};

// `tile` is an index into GEMM_TILES. 16-bit kernels differ in which operands have their rows along K, and those of
// bf16 in which is gathered.
GemmKernel fp8_e4m3_kernel(Promotion promotion, int tile);      // e4m3 x e4m3
GemmKernel fp8_e5m2_kernel(Promotion promotion, int tile);      // e5m2 x e4m3
GemmKernel fp8_rare_kernel(Element left, Promotion promotion);  // x e5m2; tile 0
GemmKernel bf16_kernel(bool left_transposed, bool right_transposed, int tile);
GemmKernel gathered_kernel(bool left_transposed, bool right_transposed, Gathered gathered, int tile);
GemmKernel gathered_codes_kernel(int tile);                          // e4m3 x e4m3 in blocks, the left operand gathered
GemmKernel f16_kernel(bool left_transposed, bool right_transposed);  // tile 0

template <Element L, Element R, bool LT, bool RT, Promotion P, int TILE, Gathered G = Gathered::none>
GemmKernel gemm_kernel_as() {
  constexpr GemmTile tile = GEMM_TILES[TILE];
  using Config = GemmConfig<tile.rows, tile.cols, tile.stages, L, R, LT, RT, P, G>;
  constexpr size_t bytes = gemm_smem_bytes<Config>();
  static_assert(bytes <= 232448, "a Hopper CTA has 227 KiB of shared memory");
  return {reinterpret_cast<const void*>(&gemm_kernel<Config>),
          Config::THREADS,
          static_cast<int>(bytes),
          Config::OUT_TILES > 0,
          Config::STORE_WARPS,
          Config::ADDS_IN_PLACE,
          Config::FIRST_BORROWED};
}

template <Element L, Element R, bool LT, bool RT, Promotion P, Gathered G = Gathered::none>
GemmKernel gemm_kernel_of(int tile) {
  switch (tile) {
    case 0: return gemm_kernel_as<L, R, LT, RT, P, 0, G>();
    case 1: return gemm_kernel_as<L, R, LT, RT, P, 1, G>();
    case 2: return gemm_kernel_as<L, R, LT, RT, P, 2, G>();
    case 3:
      if constexpr (P == Promotion::vectors) return gemm_kernel_as<L, R, LT, RT, P, 3, G>();
      return {};
    case 4:
      if constexpr (P == Promotion::vectors) return gemm_kernel_as<L, R, LT, RT, P, 4, G>();
      return {};
    default: return {};
  }
}

template <Element L, Element R>
GemmKernel fp8_kernel_of(Promotion promotion, int tile) {
  switch (promotion) {
    case Promotion::none: return gemm_kernel_of<L, R, false, false, Promotion::none>(tile);
    case Promotion::plain: return gemm_kernel_of<L, R, false, false, Promotion::plain>(tile);
    case Promotion::square: return gemm_kernel_of<L, R, false, false, Promotion::square>(tile);
    default: return gemm_kernel_of<L, R, false, false, Promotion::vectors>(tile);
  }
}

}  // namespace octavo::cuda
