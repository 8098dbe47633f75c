// The grouped GEMM kernel: persistent CTAs, one warp that copies, two warpgroups that multiply.
//
//   reads   both operands' codes through L2, each once a tile; block scales beside them
//   writes  the result once
//   bound   tensor cores; device memory where groups are small
//
// The producer warp walks the schedule and keeps STAGES K-blocks of bulk tensor copies in flight, across tiles. Rows
// past a group's end come as zeros from the copy engine (gemm.cu says how its maps do it), so nobody pads groups and no
// tensor map is edited on the device.
#pragma once

#include "../common/gemm_tile.h"
#include "gemm_epilogue.cuh"
#include "gemm_mainloop.cuh"
#include "gemm_pipeline.cuh"

namespace octavo::cuda {

constexpr int PRODUCER_REGISTERS = 56, MATH_REGISTERS = 224;  // 128 and 256 threads: 64 512 of 65 536
constexpr int32_t RAGGED_ROWS = 1 << 30;

// One kernel. The warpgroups share a tile, 64 rows or half of the columns each, or take turns with a tile each: one
// stores while the other multiplies.
template <int M, int N, int STAGE_COUNT, bool TURNS, Element L, Element R, bool LT, bool RT, Promotion P>
struct GemmConfig {
  static constexpr int TILE_M = M, TILE_N = N, STAGES = STAGE_COUNT;
  static constexpr bool TAKES_TURNS = TURNS;
  static constexpr Element LEFT = L, RIGHT = R;
  static constexpr bool LEFT_TRANSPOSED = LT, RIGHT_TRANSPOSED = RT;
  static constexpr Promotion PROMOTION = P;
  static constexpr bool SPLITS_ROWS = !TURNS && M == 128, SPLITS_COLS = !TURNS && M == 64;
  // a warpgroup's parts: 64 x 256 without promotion, else 64 x 128, beside or below each other
  static constexpr int PART_COLS = SPLITS_ROWS && P == Promotion::none ? N : 128;
  static constexpr int PARTS = (TURNS ? M * N : M * N / MATH_WARPGROUPS) / (64 * PART_COLS);
  static constexpr int PART_ROW_STEP = TURNS ? 64 : 0, PART_COL_STEP = TURNS ? 0 : PART_COLS;
  static constexpr bool LEFT_SCALES = P >= Promotion::square, RIGHT_SCALES = P == Promotion::vectors;
  static constexpr uint32_t STAGE_BYTES =
      (M + N) * SWIZZLE_BYTES + (LEFT_SCALES ? 4 * (M + SCALE_BOX_EXTRA) : 0) + (RIGHT_SCALES ? 4 * N : 0);
  static_assert(P == Promotion::none || (L <= Element::e5m2 && R <= Element::e5m2));
  static_assert(TURNS ? M == 128 && N == 128 : N == 256);
};

// The copies of one K-block of an operand: ROWS rows of 128 bytes, or boxes of 64 x 64 of a transposed one.
template <int ROWS, bool TRANSPOSED>
__device__ __forceinline__ void copy_operand(const GemmParams& params, const CUtensorMap& map, Walk walk,
                                             const GemmTileAt& tile, int first, int block, uint8_t* into,
                                             uint64_t* barrier) {
  const int32_t before = RAGGED_ROWS - tile.rows, end = tile.start + tile.rows;
  if constexpr (TRANSPOSED) {
#pragma unroll
    for (int box = 0; box < ROWS / 64; ++box) {
      uint8_t* const at = into + box * BLOCK_BYTES;
      if (walk == Walk::rows_t) {
        copy_box(map, at, barrier, first + 64 * box, before + 64 * block, end, RAGGED_ROWS);
      } else {
        copy_box(map, at, barrier, first + 64 * box, 64 * block, tile.group);
      }
    }
  } else if (walk == Walk::rows) {
    copy_box(map, into, barrier, block * params.k_elements, before + first, end, RAGGED_ROWS);
  } else if (walk == Walk::matrices) {
    copy_box(map, into, barrier, block * params.k_elements, first, tile.group);
  } else {
    const int half = params.halves == 2 ? block & 1 : 0;
    copy_box(map, into, barrier, half * params.k_elements, first, tile.panel + block / params.halves);
  }
}

template <class Config>
__device__ void produce(const GemmParams& params, GemmPipeline<Config>& pipeline) {
  GemmSchedule<Config::TILE_M, Config::TILE_N> schedule(params);
  const bool asks = threadIdx.x % 32 == 0;
  uint32_t number = 0;
  for (int32_t index = blockIdx.x;; index += gridDim.x, ++number) {
    const GemmTileAt tile = schedule.at(index);
    pipeline.put_tile(number, tile);
    if (tile.k_blocks < 0) return;
    for (int block = 0; asks && block < tile.k_blocks; ++block) {
      int stage;
      uint64_t* const full = pipeline.begin_fill(stage, Config::STAGE_BYTES);
      copy_operand<Config::TILE_M, Config::LEFT_TRANSPOSED>(params, params.left, params.left_walk, tile, tile.m, block,
                                                            pipeline.left(stage), full);
      copy_operand<Config::TILE_N, Config::RIGHT_TRANSPOSED>(params, params.right, params.right_walk, tile, tile.n,
                                                             block, pipeline.right(stage), full);
      if constexpr (Config::LEFT_SCALES) {
        const bool panels = params.left_walk == Walk::panels;
        const int32_t row = panels ? tile.m : tile.start + tile.m;
        copy_box(params.left_scales, pipeline.left_scales(stage), full, row - row % SCALE_BOX_EXTRA,
                 panels ? tile.panel + block : block);
      }
      if constexpr (Config::RIGHT_SCALES) {
        const bool panels = params.right_rows == 0;
        copy_box(params.right_scales, pipeline.right_scales(stage), full,
                 panels ? tile.n : tile.group * params.right_rows + tile.n, panels ? tile.panel + block : block);
      }
    }
    __syncwarp();  // a lane that fell two tiles behind would wait for a phase that is over
  }
}

template <class Config, Finish F, DType D>
__device__ __forceinline__ void store(const GemmParams& params, const GemmTileAt& tile, const GemmMath<Config>& math,
                                      const GemmFactors<Config>& factors, const float* columns,
                                      typename GemmMath<Config>::Sums& sums) {
#pragma unroll
  for (int part = 0; part < Config::PARTS; ++part) {
    GemmStore(params, tile, math.row(part), math.col(part))
        .template store<F, D>(sums[part], factors.row(part, 0), factors.row(part, 1), columns + math.col(part));
  }
}

template <class Config>
__device__ __forceinline__ void finish(const GemmParams& params, const GemmTileAt& tile, const GemmMath<Config>& math,
                                       const GemmFactors<Config>& factors, const float* columns,
                                       typename GemmMath<Config>::Sums& sums) {
  const auto as = [&]<Finish F, DType D>() { store<Config, F, D>(params, tile, math, factors, columns, sums); };
  if (params.finish == Finish::plain && params.out_dtype == DType::bf16) {
    as.template operator()<Finish::plain, DType::bf16>();
  } else if (params.finish == Finish::columns && params.out_dtype == DType::bf16) {
    as.template operator()<Finish::columns, DType::bf16>();
  } else if (params.finish == Finish::adds) {
    as.template operator()<Finish::adds, DType::f32>();
  } else if (params.finish == Finish::plain && params.out_dtype == DType::f32) {
    as.template operator()<Finish::plain, DType::f32>();
  } else if (params.out_dtype == DType::f32) {
    as.template operator()<Finish::general, DType::f32>();
  } else if (params.out_dtype == DType::bf16) {
    as.template operator()<Finish::general, DType::bf16>();
  } else {
    as.template operator()<Finish::general, DType::f16>();
  }
}

template <class Config>
__device__ void multiply(const GemmParams& params, GemmPipeline<Config>& pipeline) {
  GemmMath<Config> math(params, pipeline);
  const uint32_t turn = threadIdx.x / 128 - 1;
  for (uint32_t number = 0;; ++number) {
    const GemmTileAt& tile = pipeline.take_tile(number);
    if (tile.k_blocks < 0) return;
    const bool mine = !Config::TAKES_TURNS || number % MATH_WARPGROUPS == turn;
    if (Config::TAKES_TURNS && mine) {
      pipeline.wait_turn(number);
      if (tile.k_blocks == 0) pipeline.pass_turn();
    }
    if (!mine) {
      pipeline.skip(tile.k_blocks);
    } else if (tile.k_blocks > 0) {
      const GemmFactors<Config> factors(params, tile, math.row(0), pipeline);
      typename GemmMath<Config>::Sums sums;
      math.run(tile, sums);
      factors.wait(params);
      finish(params, tile, math, factors, pipeline.columns(), sums);
    } else if (!params.accumulate) {
#pragma unroll
      for (int part = 0; part < Config::PARTS; ++part) {
        GemmStore(params, tile, math.row(part), math.col(part)).store_zeros(Config::PART_COLS);
      }
    }
    pipeline.release_tile(number);
  }
}

template <class Config>
__global__ void __launch_bounds__(GEMM_THREADS, 1) gemm_kernel(const __grid_constant__ GemmParams params) {
  extern __shared__ uint8_t memory[];
  const uint32_t begins = shared_address(memory);
  GemmShared<Config>& shared = *reinterpret_cast<GemmShared<Config>*>(memory + ((begins + 1023) / 1024 * 1024 - begins));
  if (threadIdx.x == 0) GemmPipeline<Config>::init(shared);
  __syncthreads();
  GemmPipeline<Config> pipeline(shared);
  if (threadIdx.x < 128) {
    give_up_registers<PRODUCER_REGISTERS>();
    if (threadIdx.x < 32) produce<Config>(params, pipeline);
  } else {
    take_registers<MATH_REGISTERS>();
    multiply<Config>(params, pipeline);
  }
}

template <class Config>
constexpr size_t gemm_shared_bytes() {
  return sizeof(GemmShared<Config>) + 1024;
}

}  // namespace octavo::cuda
