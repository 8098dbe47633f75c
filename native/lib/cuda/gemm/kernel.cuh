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

#include "common/gemm_tile.h"
#include "epilogue.cuh"
#include "mainloop.cuh"
#include "pipeline.cuh"

namespace octavo::cuda {

constexpr int PRODUCER_REGISTERS = 56, MATH_REGISTERS = 224;  // 128 and 256 threads: 64 512 of 65 536

// One kernel. Of a tile each warpgroup has 64 rows, or half of the columns where there are no more rows.
template <int M, int N, int STAGE_COUNT, Element L, Element R, bool LT, bool RT, Promotion P>
struct GemmConfig {
  static constexpr int TILE_M = M, TILE_N = N, STAGES = STAGE_COUNT;
  static constexpr Element LEFT = L, RIGHT = R;
  static constexpr bool LEFT_TRANSPOSED = LT, RIGHT_TRANSPOSED = RT;
  static constexpr Promotion PROMOTION = P;
  static constexpr bool SPLITS_ROWS = M == 64 * MATH_WARPGROUPS;
  static constexpr int COLS = SPLITS_ROWS ? N : N / MATH_WARPGROUPS;  // of a warpgroup
  // promoted, 128 at a time: the tensor cores' sums take 64 registers beside the fp32 ones of all
  static constexpr int PART_COLS = P == Promotion::none ? COLS : 128, PARTS = COLS / PART_COLS;
  // fp32 sums that are added to the result leave by way of shared memory where there is room for a tile of them
  static constexpr bool STAGED = M == 128 && N == 128 && P != Promotion::square;
  static constexpr bool LEFT_SCALES = P >= Promotion::square, RIGHT_SCALES = P == Promotion::vectors;
  // boxes of a bf16 result that a warp has room for, and those that it puts into the tile's last stages, whose left
  // operand nobody reads any more
  static constexpr int OUT_BOXES = M == 64 ? 0 : RIGHT_SCALES ? 1 : 2;
  static constexpr int LENT_BOXES = OUT_BOXES == 0 ? 0 : COLS / 64 - OUT_BOXES;
  static constexpr int K_ELEMENTS = SWIZZLE_BYTES / (L <= Element::e5m2 ? 1 : 2);  // of a K-block
  // a tile of more K-blocks loses from L2 again what was fetched for its end
  static constexpr int PREFETCH_BLOCKS = (N == 256 ? 1024 : 512) / K_ELEMENTS;
  static constexpr uint32_t STAGE_BYTES =
      (M + N) * SWIZZLE_BYTES + (LEFT_SCALES ? 4 * (M + SCALE_BOX_EXTRA) : 0) + (RIGHT_SCALES ? 4 * N : 0);
  // Ways to finish that no launch asks of this kernel are not compiled: FP8 with a scale a row alone has factors of
  // columns, and square blocks are weights', which no wgrad reads.
  static constexpr bool COLUMNS = L <= Element::e5m2 && P <= Promotion::plain;
  static constexpr bool ADDS = P != Promotion::square && LT == RT;
  static_assert(P == Promotion::none || (L <= Element::e5m2 && R <= Element::e5m2));
  static_assert(M == 64 || SPLITS_ROWS);
};

// The copies of one K-block of an operand: ROWS rows of 128 bytes, or boxes of 64 x 64 of a transposed one.
template <class Config, int ROWS, bool TRANSPOSED>
__device__ __forceinline__ void copy_operand(const CUtensorMap& map, OperandWalk walk, const GemmTileAt& tile,
                                             int first, int block, uint8_t* into, uint64_t* barrier) {
  const int32_t before = RAGGED_ROWS - tile.rows, end = tile.start + tile.rows;
  if constexpr (TRANSPOSED) {
#pragma unroll
    for (int box = 0; box < ROWS / 64; ++box) {
      uint8_t* const at = into + box * BLOCK_BYTES;
      if (walk == OperandWalk::rows_t) {
        copy_box(map, at, barrier, first + 64 * box, before + 64 * block, end, RAGGED_ROWS);
      } else {
        copy_box(map, at, barrier, first + 64 * box, 64 * block, tile.group);
      }
    }
  } else if (walk == OperandWalk::rows) {
    copy_box(map, into, barrier, block * Config::K_ELEMENTS, before + first, end, RAGGED_ROWS);
  } else if (walk == OperandWalk::matrices) {
    copy_box(map, into, barrier, block * Config::K_ELEMENTS, first, tile.group);
  } else {
    constexpr int EACH = PANEL_ROWS / Config::K_ELEMENTS;  // K-blocks of a panel
    copy_box(map, into, barrier, block % EACH * Config::K_ELEMENTS, first, tile.panel + block / EACH);
  }
}

template <class Config>
__device__ void produce(const GemmParams& params, GemmPipeline<Config>& pipeline) {
  GemmSchedule<Config> schedule(params);
  const bool asks = threadIdx.x % 32 == 0;
  // the K-block from which on a tile needs stages that were lent to the results of the last one
  const int hold = Config::LENT_BOXES > 0 && params.boxed ? Config::STAGES - Config::LENT_BOXES : -1;
  uint32_t number = 0;
  for (int32_t index = blockIdx.x;; index += gridDim.x, ++number) {
    const GemmTileAt tile = schedule.at(index);
    pipeline.put_tile(number, tile);
    if (tile.k_blocks < 0) return;
    for (int block = 0; asks && block < tile.k_blocks; ++block) {
      if (block == hold) pipeline.wait_released(number);
      int stage;
      uint64_t* const full = pipeline.begin_fill(stage, Config::STAGE_BYTES);
      copy_operand<Config, Config::TILE_M, Config::LEFT_TRANSPOSED>(params.left, params.left_walk, tile, tile.m, block,
                                                                    pipeline.left(stage), full);
      copy_operand<Config, Config::TILE_N, Config::RIGHT_TRANSPOSED>(params.right, params.right_walk, tile, tile.n,
                                                                     block, pipeline.right(stage), full);
      if constexpr (Config::LEFT_SCALES) {
        const bool panels = params.left_walk == OperandWalk::panels;
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
    if (asks && tile.k_blocks <= hold) pipeline.wait_released(number);
    __syncwarp();  // a lane that fell two tiles behind would wait for a phase that is over
  }
}

// All that the end of a tile needs.
template <class Config>
struct GemmEnd {
  const GemmParams& params;
  const GemmTileAt& tile;
  const GemmMath<Config>& math;
  const GemmFactors<Config>& factors;
  const GemmPipeline<Config>& pipeline;

  template <Finish F, DType D>
  __device__ __forceinline__ void store(typename GemmMath<Config>::Sums& sums) const {
#pragma unroll
    for (int part = 0; part < Config::PARTS; ++part) {
      GemmStore(params, tile, math.row(), math.col(part))
          .template store<F, D>(sums[part], factors.upper(), factors.lower(), pipeline.columns() + math.col(part));
    }
  }

  template <Finish F>
  __device__ __forceinline__ void store_bf16(typename GemmMath<Config>::Sums& sums) const {
    if constexpr (Config::OUT_BOXES == 0) {
      store<F, DType::bf16>(sums);
    } else {
      store_boxes<Config, F>(params, tile, math, factors, pipeline, sums);
    }
  }

  __device__ __forceinline__ void add(typename GemmMath<Config>::Sums& sums) const {
    if constexpr (Config::STAGED) {
      add_staged<Config>(params, tile, math.row(), factors.upper(), factors.lower(), pipeline, sums[0]);
    } else if constexpr (Config::OUT_BOXES > 0) {
      add_boxes<Config>(params, tile, factors, pipeline, sums);
    } else {
      store<Finish::adds, DType::f32>(sums);
    }
  }

  __device__ __forceinline__ void run(typename GemmMath<Config>::Sums& sums) const {
    const bool bf16 = params.out_dtype == DType::bf16, f32 = params.out_dtype == DType::f32;
    if (params.finish == Finish::plain && bf16) {
      store_bf16<Finish::plain>(sums);
    } else if (Config::COLUMNS && params.finish == Finish::columns && bf16) {
      if constexpr (Config::COLUMNS) store_bf16<Finish::columns>(sums);
    } else if (Config::ADDS && params.finish == Finish::adds) {
      if constexpr (Config::ADDS) add(sums);
    } else if (params.finish == Finish::plain && f32) {
      store<Finish::plain, DType::f32>(sums);
    } else if (f32) {
      store<Finish::general, DType::f32>(sums);
    } else {
      store<Finish::general, DType::bf16>(sums);
    }
  }
};

template <class Config>
__device__ void multiply(const GemmParams& params, GemmPipeline<Config>& pipeline) {
  GemmMath<Config> math(params, pipeline);
  for (uint32_t number = 0;; ++number) {
    const GemmTileAt& tile = pipeline.take_tile(number);
    if (tile.k_blocks < 0) break;
    if (tile.k_blocks > 0) {
      const GemmFactors<Config> factors(params, tile, math.row(), pipeline);
      if (params.accumulate && tile.k_blocks <= Config::PREFETCH_BLOCKS) GemmStore::prefetch<Config>(params, tile);
      typename GemmMath<Config>::Sums sums;
      math.run(tile, sums);
      factors.wait(params);
      GemmEnd<Config>{params, tile, math, factors, pipeline}.run(sums);
    } else if (!params.accumulate) {
      GemmStore(params, tile, math.row(), math.col(0)).store_zeros(Config::COLS);
    }
    pipeline.release_tile(number);
  }
  bulk_wait();  // shared memory, from which they read, ends with the kernel
}

template <class Config>
__global__ void __launch_bounds__(GEMM_THREADS, 1) gemm_kernel(const __grid_constant__ GemmParams params) {
  extern __shared__ __align__(1024) uint8_t memory[];
  GemmShared<Config>& shared = *reinterpret_cast<GemmShared<Config>*>(memory);
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
  return sizeof(GemmShared<Config>);
}

}  // namespace octavo::cuda
